"""The walk that every method shares: collect gradients, speak, exchange, update."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlion.exchange import Channel, Exchange, Traffic
from dlion.flat import Bucket
from dlion.workers import Workers


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
    with its own data, and call :meth:`collect` after each; then ``step()``.

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        workers: who takes part; by default the processes of the default process group.
        seed: of all random draws of the method (the same on every process).

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
    ):
        _check(defaults)
        self.workers = workers or Workers.current()
        self.seed = seed
        self.channel = Channel(self.workers)
        self.buckets: list[Bucket] = []
        self._exchanges: list[Exchange] = []
        self._collected: set[int] = set()
        super().__init__(params, {**defaults, "steps": 0})
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step

    @property
    @abstractmethod
    def paper_bits(self) -> tuple[float, float]:
        """Bits per parameter and step, worker to server and back, as the papers count them."""

    @abstractmethod
    def make_exchange(self, bucket: Bucket) -> Exchange:
        """The exchange for a bucket of ``bucket.numel`` parameters."""

    @abstractmethod
    def speak(self, bucket: Bucket, i: int, step: int) -> tuple[Tensor, ...]:
        """What local worker i says: the values to post, from its gradient and its own state."""

    @abstractmethod
    def update(self, bucket: Bucket, answer: Tensor, step: int) -> None:
        """Apply the combined answer, float32 ``[padded]``, to ``bucket.params``."""

    def prepare(self, bucket: Bucket, step: int) -> None:
        """Anything workers must agree on before they speak (a shared scale, say)."""

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
            bucket = Bucket(
                [group["params"][i] for i in indices], [names[i] for i in indices], group
            )
            exchange = self.make_exchange(bucket)
            bucket.allocate(exchange.numel, self.workers.local, self.own_state, self.shared_state)
            self.channel.broadcast(bucket.params)
            self.buckets.append(bucket)
            self._exchanges.append(exchange)
            self._publish_state(bucket)

    def collect(self, worker: int) -> None:
        """Take the gradients of local worker ``worker`` (0 to local - 1) from the parameters."""
        self._take(worker)
        self.zero_grad()

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
        local = self.workers.local
        if local == 1 and not self._collected:
            self._take(0)
        if len(self._collected) != local:
            missing = sorted(set(range(local)) - self._collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        self._collected.clear()
        for bucket, exchange in zip(self.buckets, self._exchanges, strict=True):
            self._step(bucket, exchange, bucket.group["steps"])
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def _take(self, worker: int) -> None:
        for bucket in self.buckets:
            bucket.collect(worker)
        self._collected.add(worker)

    def _step(self, bucket: Bucket, exchange: Exchange, step: int) -> None:
        bucket.adopt()
        self.prepare(bucket, step)
        for i in range(self.workers.local):
            if not self.skips_missing:
                bucket.present[i] = True
            missing = bucket.missing(bucket.present[i])
            with bucket.untouched(missing, *(rows[i] for rows in bucket.own.values())):
                exchange.post(i, *self.speak(bucket, i, step), header=bucket.header(i))
        answer = exchange(step)
        missing = bucket.missing_everywhere(exchange.headers)
        with bucket.untouched(missing, bucket.params, *bucket.shared.values()):
            self.update(bucket, answer, step)
        self.finish(bucket, step)

    def _publish_state(self, bucket: Bucket) -> None:
        """Show the flat state as ``self.state[param][name]``, as views."""
        for name, rows in bucket.own.items():
            for tensor, (start, stop) in zip(bucket.tensors, bucket.spans, strict=True):
                self.state[tensor][name] = rows[:, start:stop].view(-1, *tensor.shape)
        for name, flat in bucket.shared.items():
            for tensor, view in zip(bucket.tensors, bucket.views(flat), strict=True):
                self.state[tensor][name] = view

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
        for exchange, saved in zip(self._exchanges, state_dict.get("exchanges", []), strict=False):
            exchange.state = {name: value.clone() for name, value in saved.items()}


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
