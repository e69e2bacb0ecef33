"""Directions: where a worker would step by itself, by its own momentum and its gradients."""

from abc import abstractmethod

from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.optimizer import DistributedOptimizer
from dlion.kernels import Gradients, reference
from dlion.methods.updates import warm_up


class MomentumOptimizer(DistributedOptimizer):
    """Workers with a momentum each, which their directions are made of."""

    own_state = ["momentum"]

    @abstractmethod
    def direction(self, bucket: Bucket, local: int) -> Tensor:
        """Return a local worker's direction, float32 ``[padded]``, and move its momentum.

        ``bucket.gradients()`` may be overwritten.
        """

    def prepare(self) -> None:
        warm_up(self)


def lion_direction(bucket: Bucket, local: int) -> Tensor:
    """``u = b1 m + (1 - b1) g``, ``m <- b2 m + (1 - b2) g``."""
    momentum, direction = bucket.own["momentum"][local], bucket.gradients()
    for segment in bucket.segments("betas"):
        (betas,), (m, u) = segment.values, segment.of(momentum, direction)
        u.copy_(reference.lion_direction(m, u, *betas))
    return direction


def nesterov_direction(bucket: Bucket, momentum: Tensor, gradients: Tensor) -> Tensor:
    """``m <- mu m + (1 - mu) g``, ``u = mu m + (1 - mu) g``, which overwrites g: Muon's."""
    for segment in bucket.segments("momentum"):
        (mu,), (m, u) = segment.values, segment.of(momentum, gradients)
        m.lerp_(u, 1 - mu)
        u.lerp_(m, mu)
    return gradients


def no_gradients(bucket: Bucket) -> Gradients:
    """Return gradients of zero, with which the kernels take a momentum for the direction."""
    return Gradients([None] * len(bucket.slots), bucket.places)
