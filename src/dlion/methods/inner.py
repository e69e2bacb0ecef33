"""Inner optimizers: a worker's local steps between two exchanges.

A worker's own parameters are ``bucket.own["local"]``, float32 ``[k, padded]``; rates are read from
the bucket's group.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket, Names
from dlion.methods.muon import NewtonSchulz, bucket_orthogonalise, rms_scale, scaled
from dlion.methods.updates import adamw, counts

Maker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_EPS = 1e-8
_NEWTON_SCHULZ = NewtonSchulz(5, "float32")
_RATES = ("lr", "betas", "weight_decay")


class Inner(ABC):
    """One inner optimizer for all local workers."""

    own_state: list[str] = []
    own_counters: list[str] = []

    def state_names(self, bucket: Bucket) -> Names:
        """Return the names of its state of a bucket's parameters."""
        return Names(own_state=self.own_state, own_counters=self.own_counters)

    @abstractmethod
    def step(self, bucket: Bucket, local: int) -> None:
        """Move a local worker's own parameters by its latest gradients.

        What it does to parameters without a gradient, and to their state, is undone.
        """

    def state_dict(self, buckets: list[Bucket]) -> list[list[dict[str, Any]]]:
        """Return the state that is not in the buckets: of each of them, each local worker's."""
        return []

    def load_state_dict(  # noqa: B027 - most have nothing to put back
        self, buckets: list[Bucket], saved: list[list[dict[str, Any]]]
    ) -> None:
        """Restore the result of :meth:`state_dict`."""


class SGD(Inner):
    """``y <- (1 - lr wd) y - lr g``."""

    def step(self, bucket: Bucket, local: int) -> None:
        own, gradients = bucket.own["local"][local], bucket.gradients()
        for segment in bucket.segments("lr", "weight_decay"):
            kernels.descend(own[segment.part], gradients[segment.part], *segment.values)


class Lion(Inner):
    """Lion (arXiv 2302.06675), as :class:`dlion.GLion` does it on the mean gradient."""

    own_state = ["momentum"]

    def step(self, bucket: Bucket, local: int) -> None:
        vectors = *(bucket.own[name][local] for name in ("local", "momentum")), bucket.gradients()
        for segment in bucket.segments(*_RATES):
            lr, (beta1, beta2), weight_decay = segment.values
            x, momentum, gradients = segment.of(*vectors)
            kernels.lion(x, momentum, gradients, beta1, beta2, lr, weight_decay)


class AdamW(Inner):
    """AdamW (arXiv 1711.05101) with an eps of 1e-8; each worker counts its own steps."""

    own_state = ["exp_avg", "exp_avg_sq"]
    own_counters = ["step"]

    def step(self, bucket: Bucket, local: int) -> None:
        own = [bucket.own[name][local] for name in ("local", *AdamW.own_state)]
        gradients = bucket.gradients()
        for count, slots in counts(bucket.own_counters["step"][local], bucket.present()):
            for segment in bucket.segments(*_RATES, within=slots):
                lr, betas, weight_decay = segment.values
                x, m, v, g = segment.of(*own, gradients)
                adamw(x, m, v, g, count, lr, betas, _EPS, weight_decay)


class Muon(AdamW):
    """Muon for matrices, AdamW for the rest, as :class:`dlion.GMuon` tells them apart.

    ``m <- b1 m + (1 - b1) g``, ``y <- (1 - lr wd) y - 0.2 lr sqrt(max(rows, columns)) O`` with
    ``O = NS((1 - b1) g + b1 m)``, five iterations in float32. Source: GMuon's.
    """

    def state_names(self, bucket: Bucket) -> Names:
        if bucket.kind:
            return Names(own_state=["muon_momentum"])
        return super().state_names(bucket)

    def step(self, bucket: Bucket, local: int) -> None:
        if not bucket.kind:
            super().step(bucket, local)
            return
        own, momentum = (bucket.own[name][local] for name in ("local", "muon_momentum"))
        directions = bucket.gradients()
        for segment in bucket.segments("betas"):
            ((beta, _),), (m, u) = segment.values, segment.of(momentum, directions)
            m.lerp_(u, 1 - beta)
            u.lerp_(m, beta)
        steps = bucket_orthogonalise(bucket, directions, _NEWTON_SCHULZ)
        for slot, group in zip(bucket.slots, bucket.groups, strict=True):
            for step, factor in scaled(bucket, slot, [slot.view(steps)], rms_scale):
                step *= factor
            part = slice(slot.start, slot.stop)
            kernels.descend(own[part], steps[part], group["lr"], group["weight_decay"])


class OfTorch(Inner):
    """Any torch optimizer: one for each bucket and local worker, on float32 parameters.

    Args:
        make: makes one of a list of parameter groups, which have ``lr``, ``betas`` and
            ``weight_decay``; these are set before every step.
    """

    def __init__(self, make: Maker):
        self._make = make
        self._made: dict[Bucket, list[torch.optim.Optimizer]] = {}

    def step(self, bucket: Bucket, local: int) -> None:
        optimizer, gradients = self._of(bucket)[local], bucket.gradients()
        for group, rates in zip(optimizer.param_groups, bucket.distinct_groups, strict=True):
            group |= _rates(rates)
        params = (param for group in optimizer.param_groups for param in group["params"])
        for slot, own in zip(bucket.slots, params, strict=True):
            own.grad = None if slot.tensor.grad is None else slot.view(gradients)
        optimizer.step()

    def state_dict(self, buckets: list[Bucket]) -> list[list[dict[str, Any]]]:
        return [[each.state_dict() for each in self._of(bucket)] for bucket in buckets]

    def load_state_dict(self, buckets: list[Bucket], saved: list[list[dict[str, Any]]]) -> None:
        if not saved:
            raise ValueError(
                "the state lacks the inner optimizer, as torch.distributed.checkpoint"
                " omits entries it does not know: save optimizer.state_dict() with torch.save, or"
                " take inner=adamw, lion, muon or sgd"
            )
        for bucket, states in zip(buckets, saved, strict=True):
            for optimizer, state in zip(self._of(bucket), states, strict=True):
                optimizer.load_state_dict(state)

    def _of(self, bucket: Bucket) -> list[torch.optim.Optimizer]:
        if bucket not in self._made:
            self._made[bucket] = [self._make(_groups(bucket, row)) for row in bucket.own["local"]]
        return self._made[bucket]


INNER: dict[str, type[Inner]] = {"adamw": AdamW, "lion": Lion, "muon": Muon, "sgd": SGD}


def _groups(bucket: Bucket, row: Tensor) -> list[dict[str, Any]]:
    """Return the parameters of a worker, float32 ``[padded]``, in the groups of a bucket."""
    edges = [*bucket.edges, len(bucket.slots)]
    return [
        {"params": [torch.nn.Parameter(slot.view(row)) for slot in bucket.slots[start:stop]]}
        | _rates(bucket.groups[start])
        for start, stop in itertools.pairwise(edges)
    ]


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _RATES}
