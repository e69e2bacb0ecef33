"""Baselines that exchange whole gradients: the quality to reach, and the traffic to beat."""

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from dlion import kernels
from dlion.exchange import DenseMean
from dlion.optim.base import Common, DistributedOptimizer
from dlion.optim.bucket import Bucket, Piece, copy_gradients
from dlion.optim.updates import adamw


class MeanGradientOptimizer(DistributedOptimizer):
    """Workers say their float32 gradients, everyone gets the mean: 32 bits each way."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], **common: Unpack[Common]
    ) -> None:
        self._pieces: dict[tuple[Bucket, int], list[Piece]] = {}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 32, 32

    def make_exchange(self, bucket: Bucket) -> DenseMean:
        return DenseMean(self.channel, bucket.numel, bucket.header_bytes, bucket.device)

    def speak(self, bucket: Bucket, exchange: DenseMean, i: int, step: int) -> None:
        pieces = self._pieces.get((bucket, i))
        if pieces is None:
            pieces = self._pieces[bucket, i] = bucket.cut(exchange.values(i))
        copy_gradients(pieces)


class GAdamW(MeanGradientOptimizer):
    """Global AdamW: torch.optim.AdamW on the mean gradient of all workers.

    Args:
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; the decay is decoupled.
    """

    shared_state = ["exp_avg", "exp_avg_sq"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    def update(self, bucket: Bucket, exchange: DenseMean, answers: list[Tensor], step: int) -> None:
        group, state = bucket.group, bucket.shared
        adamw(
            bucket.params,
            state["exp_avg"],
            state["exp_avg_sq"],
            exchange.read(answers),
            step + 1,
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
        )


class GLion(MeanGradientOptimizer):
    """Global Lion: Lion on the mean gradient of all workers.

    ``x <- (1 - lr wd) x - lr sign(b1 m + (1 - b1) g)``, ``m <- b2 m + (1 - b2) g``; sign(0) = 0.
    Source: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2.

    Args:
        lr: 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
    """

    shared_state = ["momentum"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    def update(self, bucket: Bucket, exchange: DenseMean, answers: list[Tensor], step: int) -> None:
        group = bucket.group
        kernels.lion(
            bucket.params,
            bucket.shared["momentum"],
            exchange.read(answers),
            *group["betas"],
            group["lr"],
            group["weight_decay"],
        )
