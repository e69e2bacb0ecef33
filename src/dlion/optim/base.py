"""The walk that every method shares: collect gradients, encode, exchange, update."""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlion.exchange import Channel, Exchange, Traffic
from dlion.optim.bucket import Bucket, InFlight
from dlion.optim.checks import (
    check_alike,
    check_bare,
    check_exchange_states,
    check_hyperparameters,
    check_parameters,
    check_state,
)
from dlion.optim.thread import ExchangeThread
from dlion.workers import Workers

NONFINITE = ("stop", "skip")


class Common(TypedDict, total=False):
    """Keyword arguments of every optimizer, see :class:`DistributedOptimizer`."""

    workers: Workers | None
    seed: int
    overlap: bool
    bucket_cap_mb: float | None
    nonfinite: str | None


class DistributedOptimizer(torch.optim.Optimizer, ABC):
    """A ``torch.optim.Optimizer`` whose workers exchange packed messages instead of gradients.

    It replaces both the optimizer and DistributedDataParallel: use the bare model, one process per
    worker, and the loop everybody knows::

        optimizer = DLion(model.parameters(), lr=1e-4)   # after init_process_group and model.to()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Creating it copies the parameters of process 0 to all and moves the trained ones into flat
    buffers. Gradient accumulation, parameter groups, LR schedulers, autocast and ``state_dict``
    work as usual. The state differs from worker to worker: save it on every rank, not on rank 0
    alone.

    A process may host several virtual workers (``workers.local``): run a backward pass for each,
    with its own data, and call :meth:`collect` after each (the last may be left to ``step()``).

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch. (Methods with
    residuals count it as zero everywhere: what they held back must still be sent.) A frozen
    parameter is neither sent nor given state; it may be unfrozen between steps. One that is frozen
    later keeps its state and its bits in the messages, and is not updated.

    Under ``torch.amp.GradScaler`` an overflow on one worker skips the step on all. That takes one
    more small collective a step, ``overlap=False`` and one worker a process; each process keeps a
    scale of its own.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        workers: who takes part; by default the processes of the default process group.
        seed: of all random draws of the method (the same on every process).
        overlap: let messages leave during the (last virtual worker's) backward pass, bucket by
            bucket, each as soon as its gradients and the bucket before it are there; give
            ``bucket_cap_mb`` too. Then what changes gradients between ``backward()`` and
            ``step()``, clipping say, comes too late and is refused, and all but the last of several
            backward passes per step must run in :meth:`no_sync`. The result is the same to the bit.
        bucket_cap_mb: cut the parameters, last ones first, into buckets of at most so many MB of
            float32 (as DistributedDataParallel's), smaller ones first and towards the end. None:
            one bucket a group.
        nonfinite: what to do about a parameter whose gradient's norm is NaN or infinite. ``stop``
            raises TrainingFailed on that worker before the parameters of that bucket are updated
            (state may hold the gradient by then: go on from a checkpoint only); ``skip`` treats it
            as a parameter without a gradient there, in that step; None sends it as it is.

    Attributes:
        flag, flagged: a bit for the loop's own use. Set ``flag`` and it travels with the next
            messages; after a step in which any process whose workers take part had it set,
            ``flagged`` is true on all.
        skipped: steps of local workers in which a gradient was skipped.

    Raises:
        TrainingFailed: if processes were given other parameters or settings.
        TypeError: for parameters that are not real floating-point numbers.
        RuntimeError: for parameters of a DistributedDataParallel.

    Subclasses fill in the method: the names of their state, the exchange, what a worker sends and
    what is done with the answer. They set their attributes before they call this constructor, which
    makes the exchanges; all public ones must be equal on all processes.
    """

    own_state: ClassVar[list[str]] = []
    shared_state: ClassVar[list[str]] = []
    counters: ClassVar[list[str]] = []  # shared state, one number a parameter
    # a residual that was sent cannot be taken back: such methods count missing gradients as zero
    skips_missing: ClassVar[bool] = True

    _step_supports_amp_scaling = True  # torch.amp.GradScaler sets grad_scale and found_inf

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        workers: Workers | None = None,
        seed: int = 0,
        overlap: bool = False,
        bucket_cap_mb: float | None = None,
        nonfinite: str | None = None,
    ):
        check_hyperparameters(defaults)
        if nonfinite not in (None, *NONFINITE):
            raise ValueError(f"nonfinite={nonfinite} is unknown: choose stop, skip or null (None)")
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} is out of range: it must be above 0")
        given = workers or Workers.current()
        self.seed, self.overlap, self.bucket_cap_mb = seed, overlap, bucket_cap_mb
        self.nonfinite = nonfinite
        check_alike(Channel(given), {"settings": self._settings()})
        # others may talk during the backward pass
        self.workers = given.with_own_group() if overlap else given
        self.channel = Channel(self.workers)
        self.buckets: list[Bucket] = []
        self.flag = self.flagged = False
        self.skipped = 0
        self._thread = ExchangeThread(overlap)
        self._collected: set[int] = set()
        self._sent = 0  # buckets whose messages have left
        self._synchronising = True
        self._skipping: set[int] = set()  # workers that skip a gradient in this step
        self._hooks: list[RemovableHandle] = []
        self._frozen: list[tuple[dict[str, Any], Tensor]] = []  # and the group of each
        own_group = None if self.workers.group is given.group else self.workers.group
        weakref.finalize(self, _close, self._thread, self._hooks, own_group).atexit = False
        self._constructed = False
        super().__init__(params, {**defaults, "steps": 0})
        self._constructed = True
        self._hand_out(self.param_groups, self.buckets)
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step

    # ------------------------------------------------------------------ what a method fills in

    @property
    @abstractmethod
    def paper_bits(self) -> tuple[float, float]:
        """Bits per parameter and step, worker to server and back, as the papers count them."""

    @abstractmethod
    def make_exchange(self, bucket: Bucket) -> Exchange:
        """Make the exchange for a bucket of ``bucket.numel`` parameters."""

    @abstractmethod
    def encode(self, bucket: Bucket, local: int, step: int) -> None:
        """Write a local worker's message from its gradients and its own state."""

    @abstractmethod
    def update(self, bucket: Bucket, step: int) -> None:
        """Apply the answer of ``bucket.exchange`` to ``bucket.params``."""

    def after_step(self, bucket: Bucket, step: int) -> None:
        """Do what workers do together after all updates (averaging momenta, say)."""

    def prepare(self) -> None:
        """Compile what the first step needs, so that processes forked later inherit it."""

    # ------------------------------------------------------------------ a step

    def collect(self, local: int) -> None:
        """Take the gradients of local worker ``local`` (0 to ``workers.local`` - 1).

        Raises:
            RuntimeError: if they were taken before in this step, or it takes no part in it.
        """
        if local not in self.channel.local_participants:
            raise RuntimeError(f"virtual worker {local} does not take part in this step")
        if local in self._collected:
            raise RuntimeError(f"virtual worker {local} was collected twice in one step")
        self._encode_unsent(local)
        super().zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange messages and update the parameters, identically on every worker.

        All processes must call it equally often. Returns the loss of ``closure``, if given.

        Raises:
            RuntimeError: with several virtual workers, if :meth:`collect` was not called for each;
                if gradients were changed after their messages had left.
            TrainingFailed: if another process is in another step, or has ended.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overflowed():
            return loss
        local = self.channel.local_participants
        if local and self._collected == set(local[:-1]):
            self._encode_unsent(local[-1])
        if self._collected != set(local):
            missing = sorted(set(local) - self._collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        for bucket in self.buckets[self._sent :]:
            self._send(bucket)
        for bucket in self.buckets:
            with self.channel.timer("wait"):
                self._wait(bucket)
            bucket.adopt()
            flats = (bucket.params, *bucket.shared.values())
            kept = bucket.untouched(bucket.flight.present, *flats)
            with self.channel.timer("apply"), kept:
                self.update(bucket, bucket.step)
        for bucket in self.buckets:
            self.after_step(bucket, bucket.step)
        self._end_step()
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With ``overlap``: backward passes in here only accumulate gradients."""
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``overlap``, after a backward pass that failed, try it again then.

        What had left by then stays said: the gradients of the failed pass count for these buckets.
        """
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.flight.waiting = None
            bucket.flight.restarted = bucket.flight.sent

    def set_participants(self, workers: Sequence[int] | None) -> None:
        """Say which workers take part from the next step on, ascending; None: all.

        Absent workers send nothing and keep their state; they still receive the update and still
        combine the slice they own (under TernGrad they also send 4 bytes a parameter tensor). They
        are not to be collected. All processes must name the same workers.

        Raises:
            ValueError: if there are none, or unknown ones.
            RuntimeError: in the middle of a step.
        """
        known = None if workers is None else sorted(set(workers))
        if known is not None and not (known and known[0] >= 0 and known[-1] < self.workers.count):
            raise ValueError(
                f"set_participants({list(workers or ())}): give at least one of the"
                f" {self.workers.count} workers"
            )
        if self._collected or self._sent:
            raise RuntimeError("set_participants() in the middle of a step")
        self.channel.set_participants(known)

    def _encode_unsent(self, local: int) -> None:
        """Encode a local worker's messages of all buckets that have not left yet."""
        if not self._collected:
            self._include_unfrozen()
        self._collected.add(local)
        for bucket in self.buckets[: self._sent]:
            bucket.check_unchanged()
        for bucket in self.buckets[self._sent :]:
            self._encode(bucket, local)

    @torch.no_grad()
    def _gradient_is_ready(self, bucket: Bucket, _: Tensor) -> None:
        """After a gradient has been accumulated: send what is complete, in the buckets' order."""
        local, flight = self.channel.local_participants, bucket.flight
        if not local or not self._synchronising or self._collected - {local[-1]} != set(local[:-1]):
            return
        if flight.sent and flight.restarted:
            return
        if flight.waiting is None:
            flight.waiting = sum(slot.tensor.requires_grad for slot in bucket.slots)
        flight.waiting -= 1
        if flight.waiting < 0:
            raise RuntimeError(
                "a second backward pass in one step, after messages have left: run all but the last"
                " backward pass of a step in `with optimizer.no_sync():`, call zero_grad() first if"
                " it is another try, or create the optimizer with overlap=False"
            )
        while self._sent < len(self.buckets) and self.buckets[self._sent].flight.waiting == 0:
            complete = self.buckets[self._sent]
            self._encode(complete, local[-1])
            complete.note_gradients()
            self._send(complete)

    @torch.no_grad()
    def _encode(self, bucket: Bucket, local: int) -> None:
        if self.nonfinite is not None:
            self._look_at_gradients(bucket, local)
        present = bucket.present()
        if not self.skips_missing:
            present = [slot.tensor.requires_grad for slot in bucket.slots]
        kept = bucket.untouched(present, *(rows[local] for rows in bucket.own.values()))
        with self.channel.timer("encode"), kept:
            self.encode(bucket, local, bucket.step)
        header = bucket.header.encode(bucket.step, present, self.flag)
        bucket.exchange.encode_header(local, header.to(bucket.device))

    def _look_at_gradients(self, bucket: Bucket, local: int) -> None:
        """Drop gradients that are not finite, or measure them for the exchange to look at."""
        norms = bucket.norms()
        if self.nonfinite == "stop":
            bucket.flight.norms[local] = norms
            return
        for slot, finite in zip(bucket.slots, norms.isfinite().tolist(), strict=True):
            if not finite:
                slot.tensor.grad = None
                self._skipping.add(local)

    def _send(self, bucket: Bucket) -> None:
        """Let the messages of the next bucket leave."""
        bucket.flight.sent = True
        self._sent += 1
        self._thread.submit(bucket)

    def _wait(self, bucket: Bucket) -> None:
        try:
            self._thread.wait(bucket)
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise RuntimeError(
                f"the exchange of step {bucket.step + 1} broke off ({error}): another process has"
                " ended, hangs, or called step() less often than this one"
            ) from error

    def _end_step(self) -> None:
        self.flagged = any(bucket.flight.flag for bucket in self.buckets)
        self.skipped += len(self._skipping)
        self._skipping.clear()
        self._collected.clear()
        self._sent = 0
        for group in self.param_groups:
            group["steps"] += 1
        for bucket in self.buckets:
            bucket.flight = InFlight()

    def _overflowed(self) -> bool:
        """Whether a GradScaler found an overflow on any worker; if not, unscale the gradients."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if self.overlap or self.workers.local > 1:
            raise RuntimeError(
                "under a GradScaler messages must not be made of scaled gradients: create the"
                " optimizer with overlap=False and one worker a process"
            )
        mine = torch.tensor([[bool(found)]], device=self.param_groups[0]["params"][0].device)
        if self.channel.gather(mine).any():
            return True
        if self.grad_scale is not None:
            tensors = (tensor for group in self.param_groups for tensor in group["params"])
            grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
            torch._foreach_mul_(grads, 1 / self.grad_scale.item())
        return False

    # ------------------------------------------------------------------ parameters and buckets

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, first = self.param_groups[-1], len(self.buckets)
        check_hyperparameters(group)
        check_parameters(group["params"])
        self._frozen += [(group, tensor) for tensor in group["params"] if not tensor.requires_grad]
        self._add_buckets(group, [tensor for tensor in group["params"] if tensor.requires_grad])
        if self._constructed:
            self._hand_out([group], self.buckets[first:])

    def _hand_out(self, groups: list[dict[str, Any]], buckets: list[Bucket]) -> None:
        """Check that all processes were given the same parameters, and give them process 0's."""
        params = [tensor for group in groups for tensor in group["params"]]
        facts = {
            "hyperparameters": [
                {key: group[key] for key in group if key not in ("params", "param_names")}
                for group in groups
            ],
            "parameter groups": [len(group["params"]) for group in groups],
            "parameter names": [group.get("param_names") for group in groups],
            "parameter shapes": [list(tensor.shape) for tensor in params],
            "parameter dtypes": [str(tensor.dtype) for tensor in params],
            "frozen parameters": [tensor.requires_grad for tensor in params],
        }
        check_alike(self.channel, facts)
        check_bare(params)
        for bucket in buckets:
            self.channel.broadcast(bucket.params)
        for tensor in params:
            if not tensor.requires_grad:
                values = tensor.detach().contiguous()
                self.channel.broadcast(values)
                tensor.copy_(values)

    def _add_buckets(self, group: dict[str, Any], tensors: list[torch.nn.Parameter]) -> None:
        """Put parameters of a group into buckets of one dtype and device each."""
        named = dict(zip(group["params"], group.get("param_names") or [], strict=False))
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for kind in kinds.values():
            for part in self._cut(kind):
                bucket = Bucket(
                    len(self.buckets), part, [named.get(tensor, "") for tensor in part], group
                )
                bucket.allocate(self.make_exchange(bucket), self)
                self.buckets.append(bucket)
                self._publish_state(bucket)
                if self.overlap:
                    ready = partial(_call, weakref.WeakMethod(self._gradient_is_ready), bucket)
                    self._hooks += [t.register_post_accumulate_grad_hook(ready) for t in part]

    def _cut(self, tensors: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Parameters by bucket, in the order in which a backward pass is done with them.

        The first bucket is a quarter as large, so that messages start early, and each at most half
        of what is left, so that little is left to send when the backward pass is over.
        """
        if self.bucket_cap_mb is None:
            return [tensors]
        cap, parts, rest = self.bucket_cap_mb * 1e6, [], tensors[::-1]
        while rest:
            sizes = [4 * tensor.numel() for tensor in rest]
            room = min(cap, max(cap / 8, sum(sizes) / 2)) if parts else cap / 4
            count = max(1, sum(total <= room for total in itertools.accumulate(sizes)))
            parts.append(rest[:count])
            rest = rest[count:]
        return parts

    def _include_unfrozen(self) -> None:
        """Make buckets for parameters that were unfrozen since the last step."""
        if not any(tensor.requires_grad for _, tensor in self._frozen):
            return
        for group in self.param_groups:
            unfrozen = [t for owner, t in self._frozen if owner is group and t.requires_grad]
            self._add_buckets(group, unfrozen)
        self._frozen = [pair for pair in self._frozen if not pair[1].requires_grad]

    def _settings(self) -> dict[str, Any]:
        """The public attributes that say what this optimizer does."""
        plain = (int, float, str, bool, list, tuple, type(None))
        facts = {k: v for k, v in vars(self).items() if k[0] != "_" and isinstance(v, plain)}
        return {"method": type(self).__name__, **facts}

    # ------------------------------------------------------------------ state

    def _publish_state(self, bucket: Bucket) -> None:
        """Show the flat state as ``self.state[param][name]``, as views.

        ``worker`` says whose the per-worker state is: id and number of workers, int64 ``[k, 2]``.
        """
        worker = self._worker()
        for index, slot in enumerate(bucket.slots):
            state = self.state[slot.tensor]
            if bucket.own:
                state["worker"] = worker
            for name, flat in (bucket.own | bucket.shared).items():
                state[name] = slot.view(flat)
            for name, counts in bucket.counters.items():
                state[name] = counts[index]

    def _worker(self) -> Tensor:
        return torch.tensor([[worker, self.workers.count] for worker in self.workers.ids])

    def worker_state(self, local: int) -> dict[str, Tensor]:
        """What belongs to one local worker alone, as views by name: the same for every spread."""
        views = {}
        for bucket in self.buckets:
            for name, rows in bucket.own.items():
                views[f"{bucket.index}.{name}"] = rows[local]
            for name, rows in bucket.exchange.state.items():
                views[f"{bucket.index}.exchange.{name}"] = rows[local]
        return views

    def common_state(self) -> dict[str, Tensor]:
        """Parameters and state that are equal on all workers, as views by name."""
        views = {}
        for bucket in self.buckets:
            views[f"{bucket.index}.parameters"] = bucket.params
            for name, values in (bucket.shared | bucket.counters).items():
                views[f"{bucket.index}.{name}"] = values
        return views

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with a leading dimension, the local workers, for per-worker state."""
        state = super().state_dict()
        state["exchanges"] = [bucket.exchange.state for bucket in self.buckets]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must be of the same workers in the same spread.

        Raises:
            ValueError: if it is of other workers, or of other parameters or settings.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        own = [self.state[param] for param in params]
        check_state(state_dict["state"], own, self._worker())
        states = [bucket.exchange.state for bucket in self.buckets]
        check_exchange_states(state_dict["exchanges"], states)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for bucket in self.buckets:
            first = bucket.slots[0].tensor
            bucket.group = next(
                group for group in self.param_groups if any(p is first for p in group["params"])
            )
            self._publish_state(bucket)
        for index, saved in state_dict["state"].items():
            for name, value in saved.items():
                self.state[params[index]][name].copy_(value)
        for state, saved in zip(states, state_dict["exchanges"], strict=True):
            for name, value in saved.items():
                state[name].copy_(value)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it talks to other processes:"
            " make another, and load this one's state_dict()"
        )


def _call(method: weakref.WeakMethod, bucket: Bucket, tensor: Tensor) -> None:
    """Call the method of an optimizer, if there still is one."""
    alive = method()
    if alive is not None:
        alive(bucket, tensor)


def _close(
    thread: ExchangeThread, hooks: list[RemovableHandle], group: dist.ProcessGroup | None
) -> None:
    """Give back the hooks, the thread and the sockets of an optimizer that nobody uses any more."""
    for hook in hooks:
        hook.remove()
    thread.close()
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # it was destroyed with all others
            dist.destroy_process_group(group)
