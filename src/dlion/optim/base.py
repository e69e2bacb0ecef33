"""The walk that every method shares: collect gradients, speak, exchange, update."""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from dlion.errors import TrainingFailed
from dlion.exchange import Channel, Exchange, Traffic
from dlion.optim.bucket import Bucket
from dlion.optim.thread import ExchangeThread
from dlion.workers import Workers


class Common(TypedDict, total=False):
    """Keyword arguments of every optimizer, see :class:`DistributedOptimizer`."""

    workers: Workers | None
    seed: int
    overlap: bool
    bucket_cap_mb: float | None
    nonfinite: str | None


NONFINITE = ("stop", "skip")


class DistributedOptimizer(torch.optim.Optimizer, ABC):
    """A ``torch.optim.Optimizer`` whose workers exchange packed messages instead of gradients.

    It replaces both the optimizer and DistributedDataParallel: use the bare model, one process per
    worker, and the loop everybody knows::

        optimizer = DLion(model.parameters(), lr=1e-4)   # after init_process_group and model.to()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Creating it copies the parameters of process 0 to all and moves them into flat buffers. Gradient
    accumulation, parameter groups, LR schedulers, autocast and ``state_dict`` work as usual. The
    state differs from worker to worker: save it on every rank, not on rank 0 alone.

    A process may host several virtual workers (``workers.local``): run a backward pass for each,
    with its own data, and call :meth:`collect` after each (the last may be left to ``step()``).

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch. (Methods with
    residuals count it as zero everywhere: what they held back must still be sent.)

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        workers: who takes part; by default the processes of the default process group.
        seed: of all random draws of the method (the same on every process).
        overlap: let messages leave during the (last virtual worker's) backward pass, bucket by
            bucket, each as soon as its gradients and the bucket before it are there; give
            ``bucket_cap_mb`` too. Then what changes gradients between ``backward()`` and
            ``step()``, clipping say, comes too late, and all but the last of several backward
            passes per step must run in :meth:`no_sync`. The result is the same to the bit.
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

    Subclasses fill in the method: the names of their state, the exchange, what a worker says and
    what is done with the answer.
    """

    own_state: ClassVar[list[str]] = []
    shared_state: ClassVar[list[str]] = []
    # error feedback must not be taken back once sent, so methods with residuals always speak
    skips_missing: ClassVar[bool] = True

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
        _check(defaults)
        if nonfinite not in (None, *NONFINITE):
            raise ValueError(f"nonfinite={nonfinite} is unknown: choose stop, skip or null (None)")
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} is out of range: it must be above 0")
        self.workers = workers or Workers.current()
        if overlap:
            self.workers = self.workers.with_own_group()  # others may talk during the backward pass
        self.seed, self.overlap, self.bucket_cap_mb = seed, overlap, bucket_cap_mb
        self.channel = Channel(self.workers)
        self.buckets: list[Bucket] = []
        self._exchanges: list[Exchange] = []
        self._collected: set[int] = set()
        self._missing: list[list[int]] = []  # of each bucket, what nobody has a gradient for
        self._waiting: list[int] = []  # parameters of each bucket whose gradient is not there yet
        self._sent = 0  # buckets whose messages have left
        self._synchronising = True
        self._thread = ExchangeThread(overlap)
        self.nonfinite, self.skipped = nonfinite, 0
        self._skipping: set[int] = set()  # workers that skip a gradient in this step
        self.flag = self.flagged = False
        self._flags: list[bool] = []  # of each bucket
        self._norms: list[dict[int, Tensor]] = []  # of each bucket and worker, to be looked at
        super().__init__(params, {**defaults, "steps": 0})
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step

    @property
    @abstractmethod
    def paper_bits(self) -> tuple[float, float]:
        """Bits per parameter and step, worker to server and back, as the papers count them."""

    @abstractmethod
    def make_exchange(self, bucket: Bucket) -> Exchange:
        """The exchange for a bucket of ``bucket.numel`` parameters."""

    def prepare(self) -> None:
        """Compile what the first step needs, so that processes forked later inherit it."""

    @abstractmethod
    def speak(self, bucket: Bucket, exchange: Any, i: int, step: int) -> None:
        """Post what local worker i says, from its gradients (``bucket``) and its own state."""

    def agree(self, bucket: Bucket, exchange: Any, step: int) -> None:
        """Anything workers must agree on before messages travel (a shared scale, say)."""

    @abstractmethod
    def update(self, bucket: Bucket, exchange: Any, answers: list[Tensor], step: int) -> None:
        """Apply the packed answers of ``exchange`` to ``bucket.params``."""

    def finish(self, bucket: Bucket, step: int) -> None:
        """Anything workers do together after the update (synchronise momentum, say)."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        names = group.get("param_names") or [""] * len(group["params"])
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(group["params"]):
            kinds.setdefault((param.dtype, param.device), []).append(index)
        for indices in kinds.values():
            for part in self._cut(indices, group["params"]):
                self._add_bucket([group["params"][i] for i in part], [names[i] for i in part])

    def _cut(self, indices: list[int], params: list[Tensor]) -> list[list[int]]:
        """Parameters by bucket, in the order in which a backward pass is done with them.

        The first bucket is a quarter as large, so that messages start early, and each at most half
        of what is left, so that little is left to send when the backward pass is over.
        """
        if self.bucket_cap_mb is None:
            return [indices]
        cap, parts, order = self.bucket_cap_mb * 1e6, [], indices[::-1]
        while order:
            sizes = [4 * params[i].numel() for i in order]
            room = min(cap, max(cap / 8, sum(sizes) / 2)) if parts else cap / 4
            count = max(1, sum(total <= room for total in itertools.accumulate(sizes)))
            parts.append(order[:count])
            order = order[count:]
        return parts

    def _add_bucket(self, tensors: list[torch.nn.Parameter], names: list[str]) -> None:
        bucket = Bucket(tensors, names, self.param_groups[-1])
        exchange = self.make_exchange(bucket)
        bucket.allocate(exchange.numel, self.workers.local, self.own_state, self.shared_state)
        self.channel.broadcast(bucket.params)
        if self.overlap:
            ready = partial(_call, weakref.WeakMethod(self._ready), len(self.buckets))
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_post_accumulate_grad_hook(ready)
        self.buckets.append(bucket)
        self._exchanges.append(exchange)
        self._missing.append([])
        self._flags.append(False)
        self._norms.append({})
        self._waiting.append(_trainable(bucket))
        self._publish_state(bucket)

    def set_participants(self, participants: Sequence[int] | None) -> None:
        """Which workers take part from the next step on, ascending; None: all.

        The others say nothing, their state stays as it is, and they are not to be collected; they
        get the answer like all, and what they own of the exchange they do (under TernGrad they
        also say 4 bytes a parameter tensor). All processes must name the same workers.

        Raises:
            ValueError: if there are none, or unknown ones.
            RuntimeError: in the middle of a step.
        """
        known = None if participants is None else sorted(set(participants))
        if known is not None and not (known and known[0] >= 0 and known[-1] < self.workers.count):
            raise ValueError(
                f"set_participants({list(participants or ())}): give at least one of the {self.workers.count}"
                " workers"
            )
        if self._collected or self._sent:
            raise RuntimeError("set_participants() in the middle of a step")
        self.channel.set_participants(known)

    def collect(self, worker: int) -> None:
        """Take the gradients of local worker ``worker`` (0 to local - 1) from the parameters.

        Raises:
            RuntimeError: if they were taken before in this step, or it takes no part in it.
        """
        if worker not in self.channel.local_participants:
            raise RuntimeError(f"virtual worker {worker} does not take part in this step")
        if worker in self._collected:
            raise RuntimeError(f"virtual worker {worker} was collected twice in one step")
        self._take(worker)
        self.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With ``overlap``: backward passes in here only accumulate gradients."""
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange messages and update the parameters, identically on every worker.

        All processes must call it equally often. Returns the loss of ``closure``, if given.

        Raises:
            RuntimeError: with several virtual workers, if :meth:`collect` was not called for each.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        here = self.channel.local_participants
        if self._collected == set(here[:-1]) and here:
            self._take(here[-1])
        if self._collected != set(here):
            missing = sorted(set(here) - self._collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        while self._sent < len(self.buckets):
            self._send()
        pairs = zip(self.buckets, self._exchanges, strict=True)
        for place, (bucket, exchange) in enumerate(pairs):
            with self.channel.timer("wait"):
                answers = self._thread.receive(place)
            bucket.adopt()
            step = bucket.group["steps"]
            kept = bucket.untouched(self._missing[place], bucket.params, *bucket.shared.values())
            with self.channel.timer("apply"), kept:
                self.update(bucket, exchange, answers, step)
        for bucket in self.buckets:
            self.finish(bucket, bucket.group["steps"])
        for group in self.param_groups:
            group["steps"] += 1
        self.flagged = any(self._flags)
        self.skipped += len(self._skipping)
        self._skipping.clear()
        self._collected.clear()
        self._sent = 0
        self._waiting = [_trainable(bucket) for bucket in self.buckets]
        return loss

    def _take(self, worker: int) -> None:
        """Let a local worker speak, about all buckets that have not left yet."""
        self._collected.add(worker)
        for place in range(self._sent, len(self.buckets)):
            self._speak(place, worker)

    @torch.no_grad()
    def _ready(self, place: int, _: Tensor) -> None:
        """After a gradient has been accumulated: send what is complete, in the buckets' order."""
        here = self.channel.local_participants
        if not self._synchronising or self._collected - {here[-1]} != set(here[:-1]):
            return
        last = here[-1]
        self._waiting[place] -= 1
        if self._waiting[place] < 0:
            raise RuntimeError(
                "a second backward pass in one step, after messages have left: run all but the last"
                " backward pass of a step in `with optimizer.no_sync():`, or create the optimizer"
                " with overlap=False"
            )
        while self._sent < len(self.buckets) and self._waiting[self._sent] == 0:
            self._speak(self._sent, last)
            self._send()

    def _speak(self, place: int, i: int) -> None:
        bucket, exchange = self.buckets[place], self._exchanges[place]
        if self.nonfinite is not None:
            self._look_at(place, i)
        present = bucket.present()
        if not self.skips_missing:
            present = tuple(tensor.requires_grad for tensor in bucket.tensors)
        missing = [] if all(present) else [t for t, there in enumerate(present) if not there]
        kept = bucket.untouched(missing, *(rows[i] for rows in bucket.own.values()))
        with self.channel.timer("encode"), kept:
            self.speak(bucket, exchange, i, bucket.group["steps"])
        exchange.post_header(i, bucket.header(present, self.flag))

    def _look_at(self, place: int, i: int) -> None:
        """Drop gradients that are not finite, or measure them for :meth:`_check_finite`."""
        bucket = self.buckets[place]
        norms = bucket.norms()
        if self.nonfinite == "stop":
            self._norms[place][i] = norms
            return
        for tensor, good in zip(bucket.tensors, norms.isfinite().tolist(), strict=True):
            if not good:
                tensor.grad = None
                self._skipping.add(i)

    def _check_finite(self, place: int) -> None:
        """Raise what was seen in gradients; late, as looking makes a GPU's host wait."""
        bucket = self.buckets[place]
        for i, norms in self._norms[place].items():
            if not norms.isfinite().all():
                index = int((~norms.isfinite()).nonzero()[0])
                name = bucket.names[index] or f"parameter {index} of bucket {place}"
                raise TrainingFailed(
                    f"the gradient of {name} is not finite on worker {self.workers.ids[i]} in step"
                    f" {bucket.group['steps'] + 1}: lower the learning rate, or leave such"
                    " gradients out with nonfinite=skip"
                )
        self._norms[place].clear()

    def _send(self) -> None:
        """Send the messages of the next bucket."""
        place = self._sent
        bucket, exchange = self.buckets[place], self._exchanges[place]
        step = bucket.group["steps"]

        def exchanged() -> list[Tensor]:
            self._check_finite(place)
            self.agree(bucket, exchange, step)
            answers = exchange.deliver(step)
            self._missing[place], self._flags[place] = bucket.read_headers(exchange.headers)
            return answers

        self._thread.send(place, bucket.device, exchanged)
        self._sent += 1

    def _publish_state(self, bucket: Bucket) -> None:
        """Show the flat state as ``self.state[param][name]``, as views."""
        for name, rows in bucket.own.items():
            for tensor, (start, stop) in zip(bucket.tensors, bucket.spans, strict=True):
                self.state[tensor][name] = rows[:, start:stop].view(-1, *tensor.shape)
        for name, flat in bucket.shared.items():
            for tensor, view in zip(bucket.tensors, bucket.views(flat), strict=True):
                self.state[tensor][name] = view

    def worker_state(self, i: int) -> dict[str, Tensor]:
        """What belongs to local worker i alone, as views by name: the same for every spread."""
        views = {}
        for place, (bucket, exchange) in enumerate(zip(self.buckets, self._exchanges, strict=True)):
            views |= {f"{place}.{name}": rows[i] for name, rows in bucket.own.items()}
            views |= {f"{place}.exchange.{name}": rows[i] for name, rows in exchange.state.items()}
        return views

    def common_state(self) -> dict[str, Tensor]:
        """Parameters and state that are equal on all workers, as views by name."""
        views = {}
        for place, bucket in enumerate(self.buckets):
            views[f"{place}.parameters"] = bucket.params
            views |= {f"{place}.{name}": flat for name, flat in bucket.shared.items()}
        return views

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with a leading dimension, the local workers, for per-worker state."""
        state = super().state_dict()
        state["exchanges"] = [exchange.state for exchange in self._exchanges]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must come from the same spread of workers."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for bucket in self.buckets:
            bucket.group = next(
                g for g in self.param_groups if any(p is bucket.tensors[0] for p in g["params"])
            )
            self._publish_state(bucket)
        params = [param for group in self.param_groups for param in group["params"]]
        for index, saved in state_dict["state"].items():
            for name, value in saved.items():
                view = self.state[params[index]][name]
                if view.shape != value.shape:
                    raise ValueError(
                        f"saved {name} of parameter {index} has shape {tuple(value.shape)}, this"
                        f" optimizer holds {tuple(view.shape)}: load it with as many virtual"
                        " workers per process as it was saved with"
                    )
                view.copy_(value)
        kept = state_dict["exchanges"]
        held = [exchange.state for exchange in self._exchanges]
        if [_shapes(state) for state in kept] != [_shapes(state) for state in held]:
            raise ValueError(
                "the saved state of the exchanges does not fit: load it with the bucket_cap_mb,"
                " ties and spread of workers that it was saved with"
            )
        for exchange, saved in zip(self._exchanges, kept, strict=True):
            for name, value in saved.items():
                exchange.state[name].copy_(value)


def _call(method: weakref.WeakMethod, place: int, tensor: Tensor) -> None:
    """Call the method of an optimizer, if there still is one."""
    alive = method()
    if alive is not None:
        alive(place, tensor)


def _trainable(bucket: Bucket) -> int:
    return sum(tensor.requires_grad for tensor in bucket.tensors)


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _check(group: dict[str, Any]) -> None:
    """Refuse hyperparameters outside their range."""
    ranges = {"lr": (0, None), "weight_decay": (0, None), "eps": (0, None), "momentum": (0, 1)}
    for name, (low, high) in ranges.items():
        value = group.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise ValueError(f"{name}={value} is not a number")
        if value is not None and not (low <= value and (high is None or value < high)):
            limit = f"at least {low}" if high is None else f"in [{low}, {high})"
            raise ValueError(f"{name}={value} is out of range: it must be {limit}")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise ValueError(f"betas={tuple(group['betas'])} is out of range: each is in [0, 1)")
