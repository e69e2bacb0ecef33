"""Baselines that exchange whole gradients: the quality to reach, and the traffic to beat."""

from collections.abc import Iterable
from typing import Any, Unpack

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import DenseMean, Exchange
from dlion.methods.updates import adamw_descent
from dlion.values import Betas, NotNegative


class MeanGradientOptimizer(DistributedOptimizer):
    """Workers send their float32 gradients, everyone gets the mean: 32 bits each way."""

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 32, 32

    def make_exchange(self, bucket: Bucket) -> Exchange:
        return DenseMean(self.channel, bucket.numel, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        bucket.copy_gradients(bucket.exchange.messages[local])


class GAdamW(MeanGradientOptimizer):
    """Global AdamW: torch.optim.AdamW on the mean gradient of all workers.

    Everyone, with g the mean gradient: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``,
    ``x <- (1 - lr wd) x - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.
    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101), Algorithm 2.

    As in torch, steps t are counted for each parameter: those in which some worker had a gradient.

    When not to use it: to train. DistributedDataParallel with torch.optim.AdamW computes the same
    on a fast link; this is the quality that compressed methods are compared with.

    Args:
        lr: learning rate.
        betas: of the means of the gradient and of its square.
        eps: added to the root of the second.
        weight_decay: decoupled.
    """

    shared_state = ["exp_avg", "exp_avg_sq"]
    counters = ["step"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 1e-2,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    def update(self, bucket: Bucket) -> None:
        adamw_descent(bucket, bucket.exchange.decode())


class GLion(MeanGradientOptimizer):
    """Global Lion: Lion on the mean gradient of all workers.

    Everyone, with g the mean gradient: ``u = b1 m + (1 - b1) g``, ``m <- b2 m + (1 - b2) g``,
    ``x <- (1 - lr wd) x - lr sign(u)``.
    Source: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2.

    When not to use it: on a slow link, where :class:`DLion` sends 1/32 of the bits and
    on i.i.d. data learns as well.

    Args:
        lr: 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
    """

    shared_state = ["momentum"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    def update(self, bucket: Bucket) -> None:
        vectors = bucket.params, bucket.shared["momentum"], bucket.exchange.decode()
        for segment in bucket.segments("betas", "lr", "weight_decay"):
            betas, *rates = segment.values
            kernels.lion(*segment.of(*vectors), *betas, *rates)
