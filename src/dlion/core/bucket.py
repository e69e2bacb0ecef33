"""Parameters as one long vector, with all that belongs to them during a step."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dlion.core.header import Header, Headers
from dlion.core.layout import Member, Slot, lay_out
from dlion.exchange import Buffers, Exchange, Stages
from dlion.kernels import Gradients, Places

# a parameter, the name of some state of it, what is here of that, and what is saved
Shown = tuple[Tensor, str, Tensor, Tensor]
Fragment = tuple[int, int, int, Tensor]  # start to stop of a parameter, and their place in a row


class Segment(NamedTuple):
    """Parameters side by side whose groups agree in some hyperparameters.

    Attributes:
        values: of the hyperparameters.
        part: their elements in a flat buffer.
        slots: which of the bucket's slots they are.
    """

    values: tuple[Any, ...]
    part: slice
    slots: slice

    def of(self, *flats: Tensor) -> Any:
        """Return these parameters' part of flat buffers, as views."""
        return tuple([flat[self.part] for flat in flats])


@dataclass
class Names:
    """Names of the state of some of a method's buckets, as an optimizer has them."""

    own_state: list[str] = field(default_factory=list)
    shared_state: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    own_counters: list[str] = field(default_factory=list)


class Full:
    """The tensors of a bucket as wholes, for methods with ``needs_full_matrices``: here they are.

    Attributes:
        slots: those that are whole here, in a flat buffer as :meth:`gather` returns it.
        numel: elements of that buffer, gaps included.
        shapes: of all tensors, wherever they are whole, in the order of memory.
        mine: which of them are whole here.
    """

    def __init__(self, slots: Sequence[Slot], numel: int):
        self.slots, self.numel = [*slots], numel
        self.shapes = [slot.shape_in_memory for slot in slots]
        self.mine = [*range(len(slots))]

    def gather(self, flat: Tensor) -> Tensor:
        """Return whole tensors, float32 ``[numel]``, of the bucket's flat buffer."""
        return flat

    def scatter(self, whole: Tensor, padded: int) -> Tensor:
        """Return the bucket's flat buffer, ``[padded]``, of whole tensors; gaps are zero."""
        return whole

    def anywhere(self, flags: Tensor) -> Tensor:
        """Return for each tensor whether a flag is set on any process, bool ``[T]``."""
        return flags


class Bucket:
    """Parameters of one dtype and device, laid out one after the other.

    Parameters become views into ``params``, so that an update is a few operations on one long
    vector; those in shared memory stay where they are, and ``params`` is a copy. Each starts at a
    multiple of 64. The gaps between them, and the end, are zero in gradients; ``mask`` tells them
    apart where that is not enough.

    Attributes:
        index: its number among the buckets of the optimizer.
        kind: what its parameters have in common, if the method makes a difference.
        groups: the optimizer's parameter group of each parameter; hyperparameters are read from
            them at every step, see :meth:`segments`.
        edges: the slots at which the parameters of another group begin, 0 among them.
        distinct_groups: the group at each edge.
        slots: the parameters and where they are.
        numel: elements, gaps included.
        apart: whether parameters are no views of ``params``.
        exchange: carries the messages about these parameters and holds the answer.
        params: ``[padded]``, in the parameters' dtype.
        own: per-worker state, name -> float32 ``[k, padded]``. Never leaves its worker.
        shared: state that is equal everywhere, name -> float32 ``[padded]``.
        counters: state that is equal everywhere, name -> float32 ``[T]`` in main memory.
        own_counters: per-worker state, name -> float32 ``[k, T]`` in main memory.
        counts_steps: whether ``counters["step"]`` is for others to read: the method has none.
        headers: those of this step's messages, once they are here.
        anywhere: whether some worker has a gradient of each parameter, in the step at hand.
        published: parameter, name and view of what ``state[param]`` of the optimizer shows.
        led: runs the exchange in place of this process.
    """

    in_one: ClassVar[bool] = False  # whether all parameters of a kind are in one bucket
    led: Callable[["Bucket"], Stages] | None = None
    exchange: Any  # the kind that the method made
    kind: Any  # what the method's kind() returned

    def __init__(
        self,
        index: int,
        members: Sequence[Member],
        kind: Hashable = None,
        workers: int = 1,
        header_bytes: int = 0,
    ):
        self.index, self.kind, first = index, kind, members[0].tensor
        self.device, self.dtype = first.device, first.dtype
        self.apart = False
        self.lay_out(members, workers)
        self.places = Places((slot.start, slot.stop) for slot in self.slots)
        self.header = Header(len(members), header_bytes)
        self.headers: Headers | None = None
        self.anywhere: list[bool] = []
        self.published: list[tuple[Tensor, str, Tensor]] = []
        self._places = {(None, None): self.places}
        self._fragments: dict[int, list[Fragment]] = {}
        self._row: Tensor | None = None

    def allocate(self, exchange: Exchange, names: Any) -> None:
        """Make the buffers that go with an exchange and move the parameters in."""
        # an exchange may be about whole tensors of what is sharded here
        local, padded = exchange.channel.workers.local, max(exchange.numel, self.numel)
        self.exchange = exchange
        zeros = partial(torch.zeros, dtype=torch.float32)
        self.params = torch.zeros(padded, dtype=self.dtype, device=self.device)
        self.own = {name: zeros(local, padded, device=self.device) for name in names.own_state}
        self.shared = {name: zeros(padded, device=self.device) for name in names.shared_state}
        self.counts_steps = "step" not in (*names.counters, *names.own_counters)
        counters, own = [*names.counters, *["step"] * self.counts_steps], names.own_counters
        self.counters = {name: zeros(len(self.slots), device="cpu") for name in counters}
        self.own_counters = {name: zeros(local, len(self.slots), device="cpu") for name in own}
        self._place()

    @torch.no_grad()
    def renew(self, exchange: Exchange) -> None:
        """Continue with an exchange for another number of workers, whose padding may differ."""
        self.exchange = exchange
        self._fragments.clear()
        self._row = None
        if exchange.numel != len(self.params):
            self.params = self._resized(self.params)
            self.own = {name: self._resized(rows) for name, rows in self.own.items()}
            self.shared = {name: self._resized(flat) for name, flat in self.shared.items()}
        self._place()

    def _place(self) -> None:
        """Let the parameters be views of a new buffer."""
        first, size = self.params.data_ptr(), self.params.itemsize
        self._homes = [first + slot.start * size for slot in self.slots]
        self._views = [slot.standalone(slot.view(self.params)) for slot in self.slots]
        self.adopt()

    def _resized(self, flat: Tensor) -> Tensor:
        """Copy a flat buffer into one as long as the exchange asks for."""
        new = flat.new_zeros(*flat.shape[:-1], self.exchange.numel)
        new[..., : self.numel] = flat[..., : self.numel]
        return new

    def lay_out(self, members: Sequence[Member], workers: int) -> None:
        """Give each parameter its place, and read hyperparameters from its group."""
        self.slots, self.numel = lay_out(members)
        self.groups = [member.group for member in members]
        pairs = enumerate(itertools.pairwise(self.groups), 1)
        self.edges = [0, *(index for index, (one, two) in pairs if one is not two)]
        self.distinct_groups = [self.groups[index] for index in self.edges]

    @property
    def step(self) -> int:
        """The number of steps that its parameter groups have taken, equally many."""
        return self.groups[0]["steps"]

    def segments(self, *names: str, within: slice = slice(None)) -> list[Segment]:
        """Return parameters side by side whose groups agree in hyperparameters of these names.

        Together the segments are all of the bucket, padding included. An update loops over them, as
        ``descent`` of ``dlion.methods.updates`` does.

        Args:
            within: slots; only what is of these.
        """
        if within != slice(None):
            (start, stop), (slot, *_) = (within.start, within.stop), self.slots[within]
            assert stop == start + 1
            values = tuple(map(self.groups[start].__getitem__, names))
            return [Segment(values, slice(slot.start, slot.stop), within)]
        found: list[tuple[int, tuple[Any, ...]]] = []
        for index in self.edges:
            values = tuple(map(self.groups[index].__getitem__, names))
            if not found or values != found[-1][1]:
                found.append((index, values))
        if len(found) == 1:
            return [Segment(found[0][1], within, within)]
        segments, stop, end = [], None, None
        for index, values in reversed(found):
            start = self.slots[index].start
            segments.append(Segment(values, slice(start, end), slice(index, stop)))
            stop, end = index, start
        return segments[::-1]

    @property
    def names(self) -> list[str]:
        """Name of each parameter, for messages."""
        unnamed = f"of bucket {self.index}"
        return [slot.name or f"parameter {i} {unnamed}" for i, slot in enumerate(self.slots)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of each parameter."""
        return list(self.places.spans)

    @cached_property
    def full(self) -> Full:
        """The tensors as wholes, for methods with ``needs_full_matrices``."""
        return Full(self.slots, self.numel)

    def scatter(self, full: Tensor) -> Tensor:
        """Return a flat buffer of ``full.slots`` as one of ``slots``."""
        return self.full.scatter(full, len(self.params))

    @property
    def buffers(self) -> Buffers:
        """Properties of this bucket that an exchange needs besides ``numel``."""
        return {"header_bytes": self.header.nbytes, "device": self.device}

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter with the gap behind it."""
        edges = [*(slot.start for slot in self.slots), self.numel]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    @property
    def mask(self) -> Tensor:
        """Mask of the elements that belong to parameters, and not to gaps, bool ``[numel]``."""
        mask = torch.zeros(self.numel, dtype=torch.bool, device=self.device)
        for slot in self.slots:
            mask[slot.start : slot.stop] = True
        return mask

    def adopt(self) -> None:
        """Point parameters back into the buffer, should anyone have replaced their storage.

        ``model.load_state_dict(assign=True)``, ``share_memory()`` and others give a parameter
        another one: its values are taken over, or updates would go to memory nobody reads.
        """
        tensors = self.tensors
        here = [*map(Tensor.data_ptr, tensors)] == self._homes
        self.apart = not here and self._take_over(tensors)

    @torch.no_grad()
    def _take_over(self, tensors: list[Tensor]) -> bool:
        """Copy values from elsewhere; return whether some parameters have to stay there."""
        apart = False
        for index, (slot, tensor, home) in enumerate(
            zip(self.slots, tensors, self._homes, strict=True)
        ):
            view = self._views[index]
            if view.data_ptr() != home:  # its storage went elsewhere, into shared memory say
                view = self._views[index] = slot.standalone(slot.view(self.params))
            if tensor.data_ptr() == home:
                continue
            if tensor.device != view.device or tensor.dtype != view.dtype:
                raise RuntimeError(
                    f"a parameter moved from {view.dtype} on {view.device} to {tensor.dtype} on"
                    f" {tensor.device}: create the optimizer after model.to(...)"
                )
            view.copy_(tensor.data)
            if self._stays(tensor):
                apart = True
            else:
                slot.tensor.data = view
        return apart

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a parameter keeps its own memory, as others read it there."""
        return tensor.device.type == "cpu" and tensor.is_shared()

    @torch.no_grad()
    def adopt_state(self, state: dict[Tensor, Any]) -> None:
        """Take over values that others have put into ``state[param]`` in place of those shown."""
        for param, name, view in self.published:
            value = state[param].get(name, view)
            if value is not view:
                view.copy_(torch.as_tensor(value))
            state[param][name] = view

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the buffer into parameters that are no views of it."""
        if self.apart:
            torch._foreach_copy_(self.tensors, self._views)

    def copy_gradients(self, rows: Tensor) -> None:
        """Copy the latest gradients into a message, float32 ``[n, slice]``; zero without one."""
        fragments = self._fragments.get(rows.data_ptr())
        if fragments is None:
            fragments = self._fragments[rows.data_ptr()] = list(self._cut(rows))
        grads, views, parts = self.grads().tensors, [], []
        for index, start, stop, view in fragments:
            grad = grads[index]
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                parts.append(grad if stop - start == grad.numel() else grad[start:stop])
        if parts:
            torch._foreach_copy_(views, parts)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The parameters, as much of each as is here."""
        return [slot.tensor for slot in self.slots]

    def raw_grads(self) -> list[Tensor | None]:
        """Return the latest gradients as autograd has left them, as much of each as is here."""
        grads = [slot.tensor.grad for slot in self.slots]
        for grad in grads:
            if grad is not None and grad.is_sparse:
                text = "sparse gradients are not supported: use Embedding(sparse=False)"
                raise RuntimeError(text)
        return grads

    def grads(self, slots: slice = slice(None)) -> Gradients:
        """Return the latest gradients, of all parameters or some, where autograd has left them.

        They are vectors in the parameters' memory order and without gaps: what autograd has
        expanded is copied.
        """
        vectors: list[Tensor | None] = []
        for slot, grad in zip(self.slots[slots], self.raw_grads()[slots], strict=True):
            if grad is not None:
                grad = grad if slot.order is None else grad.permute(slot.order)
                grad = grad.flatten().contiguous()
            vectors.append(grad)
        key = slots.start, slots.stop
        if key not in self._places:
            self._places[key] = Places(self.places.spans[slots])
        return Gradients(vectors, self._places[key])

    def gradients(self) -> Tensor:
        """Copy the latest gradients to float32 ``[padded]``; the next call overwrites it."""
        if self._row is None:
            self._row = self.params.new_zeros(1, len(self.params), dtype=torch.float32)
        self.copy_gradients(self._row)
        return self._row[0]

    def present(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [slot.tensor.grad is not None for slot in self.slots]

    def trained(self) -> list[bool]:
        """Whether each parameter is trained."""
        return [slot.tensor.requires_grad for slot in self.slots]

    @property
    def exchange_state(self) -> dict[str, Tensor]:
        """What the exchange keeps, as far as ``state[param]`` of the optimizer shows it."""
        return self.exchange.state

    def unpublished(self, placements: Any) -> tuple[list[Shown], list[Callable[[], None]]]:
        """Return state that is saved and not shown, and what puts it back once it is loaded."""
        return [], []

    @staticmethod
    def absent(optimizer: Any, placements: Any) -> dict[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the state of parameters of which this process has nothing: here, and saved."""
        return {}

    def count_step(self) -> None:
        """Count a step in ``state[param]["step"]``, as torch's optimizers do, if no update does."""
        if self.counts_steps:
            present = self.anywhere or self.trained()  # a local step knows of no others
            self.counters["step"] += torch.tensor(present, device="cpu")

    def stages(self) -> Stages:
        """Exchange the messages of this step, on whichever thread: see ``Exchange.stages``."""
        return self.exchange.stages(self.step) if self.led is None else self.led(self)

    def preserve_missing(
        self, present: list[bool], flats: Iterable[Tensor]
    ) -> AbstractContextManager[None]:
        """Keep the part of absent parameters in flat buffers as it was."""
        return nullcontext() if all(present) else self._restored(present, flats)

    @contextmanager
    def _restored(self, present: list[bool], flats: Iterable[Tensor]) -> Iterator[None]:
        absent = [slot for slot, here in zip(self.slots, present, strict=True) if not here]
        parts = [flat[slot.start : slot.stop] for flat in flats for slot in absent]
        before = [part.clone() for part in parts]
        yield
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)

    def _cut(self, rows: Tensor) -> Iterator[Fragment]:
        """Yield the parameters' parts of ``rows``, ``[n, slice]``, a flat buffer in slices."""
        size = rows.shape[1]
        for index, slot in enumerate(self.slots):
            at = slot.start
            while at < slot.stop:
                row, column = divmod(at, size)
                end = min(slot.stop, at + size - column)
                view = rows[row, column : column + end - at]
                yield index, at - slot.start, end - slot.start, view
                at = end
