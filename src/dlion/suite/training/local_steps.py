"""Steps that a worker takes on its own before each exchange, under any rule and wire.

A worker starts at the common parameters x and takes H inner steps to x_H. What it then sends as
its gradient is ``(x - x_H) / (lr H)``, federated averaging's pseudo-gradient (McMahan et al. 2017,
arXiv 1602.05629; Reddi et al. 2021, arXiv 2003.00295). Gradients must be of the loss divided by H.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dlion.engine.bucket import Bucket
from dlion.engine.layout import Member, by_kind
from dlion.methods.inner import INNER
from dlion.workers import Workers


class LocalSteps(Protocol):
    """What the training loop does about local steps.

    Attributes:
        late: whether what is sent is known only after the last backward pass.
        state_bytes: what a worker keeps for them, what all share included.
    """

    late: bool
    state_bytes: int

    def path(self, i: int) -> AbstractContextManager[None]:
        """Start at the common parameters, and return to them at the end."""
        ...

    def move(self, i: int) -> None:
        """Let local worker i take a step by the gradients of its latest batch."""
        ...

    def arrive(self, i: int) -> None:
        """Leave what local worker i sends in ``.grad``, as a backward pass does, hooks included."""
        ...

    def state(self, i: int) -> dict[str, Tensor]:
        """Return what local worker i keeps between two exchanges, as views by name."""
        ...


def make_local_steps(model: nn.Module, workers: Workers, config: DictConfig) -> LocalSteps:
    """Return the local steps of a run: ``local_*`` of :class:`dlion.suite.settings.Settings`."""
    optimizer, steps, lr = config.local_optimizer, config.local_steps, config.local_lr
    if optimizer == "sgd":
        return SGDSteps(model, steps, lr)
    return InnerSteps(model, workers, steps, lr, optimizer, config.local_betas)


class SGDSteps:
    """Local steps of SGD, whose displacement is the sum of their gradients.

    So gradients accumulate, and messages leave during the last backward pass as they always do.
    """

    late = False

    def __init__(self, model: nn.Module, steps: int, lr: float):
        self.steps, self.lr = steps, lr
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._params = trainable if steps > 1 else []  # without local steps nothing moves
        self._common = [p.detach().clone() for p in self._params]
        self.state_bytes = sum(common.nbytes for common in self._common)

    @contextmanager
    def path(self, i: int) -> Iterator[None]:
        with torch.no_grad():
            for param, common in zip(self._params, self._common, strict=True):
                common.copy_(param)
        yield
        with torch.no_grad():
            for param, common in zip(self._params, self._common, strict=True):
                param.copy_(common)

    @torch.no_grad()
    def move(self, i: int) -> None:
        for param, common in zip(self._params, self._common, strict=True):
            if param.grad is not None:
                param.copy_(common.sub(param.grad, alpha=self.lr * self.steps))

    def arrive(self, i: int) -> None:
        """Do nothing: it is there."""

    def state(self, i: int) -> dict[str, Tensor]:
        return {}


class InnerSteps:
    """Local steps of an inner optimizer, one of those inside :class:`dlion.DiLoCo`.

    Its state stays with its worker and goes on after an exchange. A parameter without a gradient in
    any of the steps has none to send. Nothing decays here: the method's own decay acts on what all
    share.
    """

    late = True

    def __init__(
        self,
        model: nn.Module,
        workers: Workers,
        steps: int,
        lr: float,
        optimizer: str,
        betas: tuple[float, float],
    ):
        self.steps, self.lr = steps, lr
        self._inner = INNER[optimizer]()
        group = {"lr": lr, "betas": tuple(betas), "weight_decay": 0.0}
        members = [
            Member(p, name, group) for name, p in model.named_parameters() if p.requires_grad
        ]
        self._buckets: list[Bucket] = []  # their params are what all share, not the model's
        self._moved: set[nn.Parameter] = set()
        for index, kind in enumerate(by_kind(members)):
            bucket = Bucket(index, kind)
            state, counters = self._inner.own_state, self._inner.own_counters
            bucket.allocate_own(state, counters, workers.local, bucket.numel)
            path = torch.zeros(1, bucket.numel, device=bucket.device)
            bucket.own["local"] = path.expand(workers.local, -1)  # one after the other
            self._buckets.append(bucket)
        shared = [
            tensor for each in self._buckets for tensor in (each.params, each.own["local"][0])
        ]
        kept = [*shared, *self.state(0).values()]
        self.state_bytes = sum(tensor.nbytes for tensor in kept)

    @contextmanager
    def path(self, i: int) -> Iterator[None]:
        self._moved.clear()
        for bucket in self._buckets:
            with torch.no_grad():
                for slot in bucket.slots:
                    slot.view(bucket.params).copy_(slot.tensor)
            bucket.own["local"][i].copy_(bucket.params)
        yield
        for bucket in self._buckets:
            _host(bucket, bucket.params)

    @torch.no_grad()
    def move(self, i: int) -> None:
        for bucket in self._buckets:
            present = bucket.present()
            moved = [slot.tensor for slot, here in zip(bucket.slots, present, strict=True) if here]
            self._moved.update(moved)
            for tensor in moved:
                tensor.grad *= self.steps
            with bucket.untouched(present, *(rows[i] for rows in bucket.own.values())):
                self._inner.step(bucket, i)
            _host(bucket, bucket.own["local"][i])
            for tensor in moved:
                tensor.grad = None

    def arrive(self, i: int) -> None:
        moved, sent = [], []
        for bucket in self._buckets:
            way = (bucket.params - bucket.own["local"][i]).div_(self.lr * self.steps)
            for slot in bucket.slots:
                if slot.tensor in self._moved:
                    moved.append(slot.tensor)
                    sent.append(slot.view(way).to(bucket.dtype))
        torch.autograd.backward(moved, sent)

    def state(self, i: int) -> dict[str, Tensor]:
        return {
            f"local.{bucket.index}.{name}": rows[i]
            for bucket in self._buckets
            for name, rows in (bucket.own | bucket.own_counters).items()
            if name != "local"  # begins anew
        }


@torch.no_grad()
def _host(bucket: Bucket, values: Tensor) -> None:
    for slot in bucket.slots:
        slot.tensor.copy_(slot.view(values))
