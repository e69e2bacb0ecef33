"""Parameters as one long vector, with all that belongs to them during a step."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlion.engine.shards import local_part
from dlion.errors import TrainingFailed
from dlion.exchange import Buffers, Exchange, Stages
from dlion.kernels import Gradients, Places
from dlion.transfer import upload
from dlion.wire import Header, Headers

ALIGNMENT = 64  # elements: every parameter starts at a whole word of a one-bit message


class Slot(NamedTuple):
    """The place of a parameter in a bucket.

    Attributes:
        tensor, name: the parameter and its name (``""`` where unnamed).
        shape: of what is here of it: all, but of a parameter that FSDP2 has sharded.
        start, stop: its elements in a flat buffer.
        order: its dimensions as they lie in memory, outermost first; None if that is their order.
    """

    tensor: torch.nn.Parameter
    name: str
    shape: torch.Size
    start: int
    stop: int
    order: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        """Rows of the parameter as a matrix [outermost in memory, rest]; 1 of a vector."""
        shape, order = self.shape, self.order or (0,)
        return shape[order[0]] if len(shape) > 1 else 1

    def flatten(self, values: Tensor) -> Tensor:
        """Return values in the parameter's shape as a vector, in the parameter's memory order."""
        return (values if self.order is None else values.permute(self.order)).flatten()

    def gradient(self) -> Tensor | None:
        """Return the gradient as a vector in the parameter's memory order, None without one.

        It has no gaps in memory: what autograd has expanded is copied.
        """
        grad = self.tensor.grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError("sparse gradients are not supported: use Embedding(sparse=False)")
        return None if grad is None else self.flatten(local_part(grad)).contiguous()

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of flat buffers ``[..., padded]``, in its shape."""
        part, shape = flat[..., self.start : self.stop], self.shape
        if self.order is None:
            return part.view((*part.shape[:-1], *shape))
        leading = range(part.dim() - 1)
        part = part.unflatten(-1, [shape[dim] for dim in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return part.permute(*leading, *(len(leading) + dim for dim in back))


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, and their place in some buffer."""

    slot: Slot
    start: int
    stop: int
    view: Tensor


class StateNames(Protocol):
    """What a method calls its state."""

    own_state: list[str]
    shared_state: list[str]
    counters: list[str]
    own_counters: list[str]


def plain_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return numbers, texts and lists among named values; objects are of one process alone."""
    plain = (int, float, str, bool, list, tuple, type(None))
    kept = {name: value for name, value in facts.items() if isinstance(value, plain)}
    return {name: value for name, value in kept.items() if name not in ("params", "param_names")}


def by_kind(tensors: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return parameters of one dtype and device together, without those that have no elements."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for tensor in tensors:
        if local_part(tensor).numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*kinds.values()]


@dataclass
class InFlight:
    """What one step of a bucket has to remember until it is over.

    Attributes:
        waiting: trained parameters whose gradient is not there yet; None before the first is.
        sent: whether the messages have left.
        restarted: whether zero_grad() has given up the backward pass that they were made in.
        rates: the hyperparameters that the latest message was made with.
        norms: the norms of local workers' gradients, ``[T]`` each, for their headers.
        gradients: those that messages were made of, with their versions.
        present: whether some worker has a gradient, for each parameter.
        flag: whether some worker's flag is set.
        slow: whether some worker's links are slow.
        prepare: writes the message just before its exchange, if that was put off.
    """

    waiting: int | None = None
    sent: bool = False
    restarted: bool = False
    rates: str = ""
    norms: dict[int, Tensor] = field(default_factory=dict)
    gradients: list[tuple[Slot, Tensor, int]] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    flag: bool = False
    slow: bool = False
    prepare: Callable[[], None] | None = None


class Bucket:
    """Parameters of one group, dtype and device, laid out one after the other.

    Parameters become views into ``params``, so that an update is a few operations on one long
    vector; those that FSDP2 has sharded stay where they are, and ``params`` is a copy of the shards
    here. Each starts at a multiple of 64. The gaps between them, and the end, are zero in
    gradients; ``mask`` tells them apart where that is not enough.

    Attributes:
        index: its number among the buckets of the optimizer.
        group: the optimizer's parameter group; hyperparameters are read from it at every step.
        slots: the parameters and where they are.
        numel: elements, gaps included.
        exchange: carries the messages about these parameters and holds the answer.
        params: ``[padded]``, in the parameters' dtype.
        own: per-worker state, name -> float32 ``[k, padded]``. Never leaves its worker.
        shared: state that is equal everywhere, name -> float32 ``[padded]``.
        counters: state that is equal everywhere, name -> float32 ``[T]`` in main memory.
        own_counters: per-worker state, name -> float32 ``[k, T]`` in main memory.
        flight: what the present step has to remember.
        run_led: runs the exchange, if only one process of a node does.
    """

    run_led: Callable[["Bucket"], None] | None = None
    exchange: Any  # the kind that the method made

    def __init__(
        self, index: int, tensors: list[torch.nn.Parameter], names: list[str], group: dict[str, Any]
    ):
        self.index, self.group = index, group
        self.device, self.dtype = tensors[0].device, tensors[0].dtype
        self.sharded = isinstance(tensors[0], DTensor)
        self.slots: list[Slot] = []
        start = 0
        for tensor, name in zip(tensors, names, strict=True):
            here = local_part(tensor)
            stop = start + here.numel()
            self.slots.append(Slot(tensor, name, here.shape, start, stop, _memory_order(here)))
            start += -(-here.numel() // ALIGNMENT) * ALIGNMENT
        self.numel = start
        self.places = Places((slot.start, slot.stop) for slot in self.slots)
        self.header = Header(len(tensors))
        self.flight = InFlight()
        self._pieces: dict[int, list[Piece]] = {}
        self._row: Tensor | None = None

    def allocate(self, exchange: Exchange, names: StateNames) -> None:
        """Make the buffers that go with an exchange and move the parameters in."""
        local, padded = exchange.channel.workers.local, exchange.numel
        self.exchange = exchange
        self.allocate_own(names.own_state, names.own_counters, local, padded)
        zeros = partial(torch.zeros, dtype=torch.float32)
        self.shared = {name: zeros(padded, device=self.device) for name in names.shared_state}
        self.counters = {name: zeros(len(self.slots), device="cpu") for name in names.counters}
        self._views = [_standalone(slot.view(self.params), slot) for slot in self.slots]
        self.adopt()

    def allocate_own(
        self, state: Sequence[str], counters: Sequence[str], local: int, padded: int
    ) -> None:
        """Make ``params`` and what belongs to each of the local workers alone."""
        zeros = partial(torch.zeros, dtype=torch.float32)
        self.params = torch.zeros(padded, dtype=self.dtype, device=self.device)
        self.own = {name: zeros(local, padded, device=self.device) for name in state}
        self.own_counters = {name: zeros(local, len(self.slots), device="cpu") for name in counters}

    @property
    def step(self) -> int:
        """The number of steps that its parameter group has taken."""
        return self.group["steps"]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of each parameter."""
        return list(self.places.spans)

    @property
    def buffers(self) -> Buffers:
        """What an exchange has to know of this bucket besides ``numel``."""
        return {"header_bytes": self.header.nbytes, "device": self.device}

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter with the gap behind it."""
        edges = [*(slot.start for slot in self.slots), self.numel]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    @property
    def mask(self) -> Tensor:
        """Which elements are of parameters, and not gaps, bool ``[numel]``."""
        mask = torch.zeros(self.numel, dtype=torch.bool, device=self.device)
        for slot in self.slots:
            mask[slot.start : slot.stop] = True
        return mask

    def adopt(self) -> None:
        """Point parameters back into the buffer, should anyone have replaced their storage.

        Of sharded ones, which stay where they are, it takes a copy.
        """
        for index, slot in enumerate(self.slots):
            tensor, view = local_part(slot.tensor), self._views[index]
            home = self.params.data_ptr() + slot.start * self.params.itemsize
            if view.data_ptr() != home:  # its storage went elsewhere, into shared memory say
                view = self._views[index] = _standalone(slot.view(self.params), slot)
            if tensor.data_ptr() != home:
                if tensor.device != view.device or tensor.dtype != view.dtype:
                    raise RuntimeError(
                        f"a parameter moved from {view.dtype} on {view.device} to {tensor.dtype} on"
                        f" {tensor.device}: create the optimizer after model.to(...)"
                    )
                view.copy_(tensor.data)
                if not self.sharded:
                    slot.tensor.data = view

    @torch.no_grad()
    def write_back(self) -> None:
        """Let sharded parameters be what the buffer holds; others are the buffer."""
        if self.sharded:
            shards = [local_part(slot.tensor) for slot in self.slots]
            torch._foreach_copy_(shards, self._views)

    def copy_gradients(self, rows: Tensor) -> None:
        """Copy the latest gradients into a message, float32 ``[n, slice]``; zero without one."""
        pieces = self._pieces.get(rows.data_ptr())
        if pieces is None:
            pieces = self._pieces[rows.data_ptr()] = list(self._cut(rows))
        views, parts = [], []
        for slot, start, stop, view in pieces:
            grad = slot.gradient()
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                parts.append(grad if stop - start == grad.numel() else grad[start:stop])
        if parts:
            torch._foreach_copy_(views, parts)

    @property
    def grads(self) -> Gradients:
        """The latest gradients, where autograd has left them."""
        return Gradients([slot.gradient() for slot in self.slots], self.places)

    def parts(self, name: str, local: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield a start, a part of a worker's state from there on, and its gradients or zeros.

        That is each parameter by itself, and on a GPU, where a launch costs more than a copy, all
        of the bucket.
        """
        if self.device.type == "cuda":
            yield 0, self.own[name][local], self.gradients()
        else:
            yield from self.grads.parts(self.own[name][local])

    def gradients(self) -> Tensor:
        """Copy the latest gradients to float32 ``[padded]``; the next call overwrites it."""
        if self._row is None:
            self._row = self.params.new_zeros(1, len(self.params), dtype=torch.float32)
        self.copy_gradients(self._row)
        return self._row[0]

    def present(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [slot.tensor.grad is not None for slot in self.slots]

    def norms(self) -> Tensor:
        """Return the norm of each gradient, float32 ``[T]``, 0 where there is none."""
        grads = self.grads
        precision = torch.promote_types(self.dtype, torch.float32)
        found = iter(torch._foreach_norm(grads.present, dtype=precision) if grads.present else ())
        if len(grads.present) == len(self.slots):
            return torch.stack(list(found)).to(torch.float32)
        zero = self.params.new_zeros((), dtype=precision)
        norms = [zero if grad is None else next(found) for grad in grads.tensors]
        return torch.stack(norms).to(torch.float32)

    def count(self, name: str) -> list[tuple[int, slice]]:
        """Count a step for every parameter that some worker has a gradient for.

        Returns the counts, each with the elements that it holds for; absent parameters are left
        out where counts differ.
        """
        return self._count(self.counters[name], self.flight.present)

    def count_own(self, name: str, local: int) -> list[tuple[int, slice]]:
        """As :meth:`count`, for the parameters that a local worker has a gradient for."""
        return self._count(self.own_counters[name][local], self.present())

    def _count(self, counter: Tensor, here: list[bool]) -> list[tuple[int, slice]]:
        present = torch.tensor(here, device="cpu")
        counter += present
        counts = set(counter[present].tolist())
        if len(counts) <= 1:
            return [(int(count), slice(None)) for count in counts]
        return [
            (int(count), slice(slot.start, slot.stop))
            for slot, count, here in zip(self.slots, counter.tolist(), present, strict=True)
            if here
        ]

    def note_gradients(self) -> None:
        """Remember the gradients that messages were made of, for :meth:`check_unchanged`."""
        for slot in self.slots:
            grad = slot.tensor.grad
            if grad is not None:
                self.flight.gradients.append((slot, grad, local_part(grad)._version))

    def check_unchanged(self) -> None:
        """Refuse gradients and hyperparameters that were changed after messages had left."""
        if self.flight.rates != self._rates():
            raise RuntimeError(
                "the learning rate or another hyperparameter was changed between backward() and"
                " step(), when messages had left: set it before backward(), or create the optimizer"
                " with overlap=False"
            )
        for slot, grad, version in [] if self.flight.restarted else self.flight.gradients:
            if slot.tensor.grad is not grad or local_part(grad)._version != version:
                raise RuntimeError(
                    f"the gradient of {slot.name or 'a parameter'} was changed between backward()"
                    " and step(), when it had been sent: clip or scale gradients with overlap=False"
                )

    def prepare(self) -> None:
        """Write the message of this step, if that was put off until now."""
        if self.flight.prepare is not None:
            self.flight.prepare()

    def run_exchange(self) -> None:
        """Exchange the messages of this step, on whichever thread."""
        if self.run_led is None:
            self.exchange.run(self.step)
        else:
            self.run_led(self)

    def stages(self) -> Stages:
        """As :meth:`run_exchange`, together with other buckets: see ``Exchange.stages``."""
        if self.run_led is None:
            yield from self.exchange.stages(self.step)
        else:
            self.run_led(self)

    def read_headers(self, headers: Tensor) -> None:
        """Note what the headers of all senders say, uint8 ``[m, bytes]`` in main memory.

        Raises:
            TrainingFailed: if a gradient is not finite and that is to end training, or if workers
                are in different steps or have different hyperparameters.
        """
        read = self.header.decode(headers)
        self.check_in_step(read, self.exchange.channel.participants, "worker")
        self.flight.present, self.flight.flag, self.flight.slow = read.present, read.flag, read.slow

    def make_header(self, present: list[bool], trained: int, flag: bool) -> Tensor:
        """Return the header of a worker's message, uint8 ``[header.nbytes]``.

        Its checksum is of what must be equal on all workers as long as they keep in step: the
        hyperparameters and how many parameters are trained.
        """
        self.flight.rates = self._rates()
        checksum = zlib.crc32(f"{trained} {self.flight.rates}".encode())
        slow = self.exchange.channel.slow
        return self.header.encode(self.step, checksum, present, flag, slow)

    def write_header(self, local: int, header: Tensor) -> None:
        """Let a header go with a local worker's message.

        Where ``norms`` are known, it says which gradient is not finite, in place of the step.
        """
        header = upload(header, self.device)
        norms = self.flight.norms.get(local)
        if norms is not None:
            self.header.mark(header, norms)
        self.exchange.encode_header(local, header)

    def _rates(self) -> str:
        rates = plain_values(self.group)
        return repr([(name, rates[name]) for name in sorted(rates.keys() - {"steps"})])

    def untouched(self, present: list[bool], *flats: Tensor) -> AbstractContextManager[None]:
        """Keep the part of absent parameters in flat buffers as it was."""
        return nullcontext() if all(present) else self._restored(present, *flats)

    @contextmanager
    def _restored(self, present: list[bool], *flats: Tensor) -> Iterator[None]:
        absent = [slot for slot, here in zip(self.slots, present, strict=True) if not here]
        parts = [flat[slot.start : slot.stop] for slot in absent for flat in flats]
        before = [part.clone() for part in parts]
        yield
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)

    def _cut(self, rows: Tensor) -> Iterator[Piece]:
        """Where the parameters lie in ``rows``, ``[n, slice]``, a flat buffer cut into slices."""
        size = rows.shape[1]
        for slot in self.slots:
            at = slot.start
            while at < slot.stop:
                row, column = divmod(at, size)
                end = min(slot.stop, at + size - column)
                view = rows[row, column : column + end - at]
                yield Piece(slot, at - slot.start, end - slot.start, view)
                at = end

    def check_in_step(self, headers: Headers, senders: Sequence[int], kind: str) -> None:
        """Compare all senders, a ``kind`` of such numbers, with the first.

        Raises:
            TrainingFailed: if one has a gradient that is not finite, is in another step, or has
                other hyperparameters.
        """
        for sender, broken in zip(senders, headers.broken, strict=True):
            if broken is not None:
                self.refuse_gradient(broken, f"{kind} {sender}")
        first, *senders = senders
        step, checksum = headers.steps[0], headers.checksums[0]
        others = zip(senders, headers.steps[1:], headers.checksums[1:], strict=True)
        for sender, their_step, their_checksum in others:
            if their_step != step:
                raise TrainingFailed(
                    f"{kind} {sender} is in step {their_step + 1}, {kind} {first} in step"
                    f" {step + 1}: all processes must load the same state and call step() equally"
                    " often"
                )
            if their_checksum != checksum:
                raise TrainingFailed(
                    f"in step {step + 1} {kind} {sender} has other hyperparameters or frozen"
                    f" parameters than {kind} {first} (here: lr={self.group['lr']}): all processes"
                    " must set the same, and call step() of the optimizer and of its schedules"
                    " equally often"
                )

    def refuse_gradient(self, parameter: int, whose: str) -> NoReturn:
        """Raise TrainingFailed for the gradient of a parameter, which is not finite."""
        name = self.slots[parameter].name or f"parameter {parameter} of bucket {self.index}"
        raise TrainingFailed(
            f"the gradient of {name} is not finite on {whose} in step {self.step + 1}: lower the"
            " learning rate, or leave such gradients out with nonfinite=skip"
        )


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of a dense tensor's dimensions in memory, None if it is contiguous or has gaps."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
    return order if tensor.permute(order).is_contiguous() else None


def _standalone(view: Tensor, slot: Slot) -> Tensor:
    """The same memory behind a storage of its own.

    What saves tensors writes whole storages, and asks which tensors share one; a parameter is to
    look as it did before.
    """
    if view.device.type not in ("cpu", "cuda"):
        return view
    alone = torch.from_dlpack(slot.flatten(view))
    return slot._replace(start=0, stop=alone.numel()).view(alone)
