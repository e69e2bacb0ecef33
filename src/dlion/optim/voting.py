"""Methods whose workers say one bit: Distributed Lion and distributed Signum."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dlion.exchange import TIES, LevelSum
from dlion.flat import Bucket
from dlion.optim.base import DistributedOptimizer
from dlion.optim.rules import lion_direction, one_bit_sign
from dlion.optim.updates import descent
from dlion.workers import Workers

AGGREGATIONS = ("mavo", "avg")


class VotingOptimizer(DistributedOptimizer):
    """Signs up; their majority (``mavo``) or their mean (``avg``) down; signed descent."""

    own_state = ["momentum"]

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        aggregation: str,
        ties: str,
        workers: Workers | None,
        seed: int,
    ):
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation} is unknown: choose mavo or avg")
        if ties not in TIES:
            raise ValueError(f"ties={ties} is unknown: choose one of {', '.join(TIES)}")
        self.aggregation, self.ties = aggregation, ties
        super().__init__(params, defaults, workers, seed)

    @property
    def paper_bits(self) -> tuple[float, float]:
        if self.aggregation == "avg":
            return 1, math.log2(self.workers.count + 1)
        tied = self.ties == "zero" and self.workers.count % 2 == 0
        return 1, math.log2(3) if tied else 1

    def make_exchange(self, bucket: Bucket) -> LevelSum:
        return LevelSum(
            self.channel,
            bucket.numel,
            answer="sign" if self.aggregation == "mavo" else "level",
            ties=self.ties,
            seed=self.seed,
            header_bytes=bucket.header_bytes,
        )

    @abstractmethod
    def direction(self, momentum: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """What a worker takes the sign of; updates its momentum in place."""

    def speak(self, bucket: Bucket, i: int, step: int) -> tuple[Tensor, ...]:
        direction = self.direction(bucket.own["momentum"][i], bucket.grads[i], bucket.group)
        return (one_bit_sign(direction, step),)

    def update(self, bucket: Bucket, answer: Tensor, step: int) -> None:
        group = bucket.group
        descent(bucket.params, answer, group["lr"], group["weight_decay"])


class DLion(VotingOptimizer):
    """Distributed Lion: every worker keeps its own momentum and sends one bit per parameter.

    Worker i: ``d_i = sign(b1 m_i + (1 - b1) g_i)``, ``m_i <- b2 m_i + (1 - b2) g_i``.
    Everyone: ``x <- (1 - lr wd) x - lr D`` with ``D = sign(sum d_i)`` (``mavo``) or
    ``D = sum d_i / n`` (``avg``). With one worker it is Lion.
    Source: Liu et al. 2024 (arXiv 2404.00438), Algorithm 1.

    The paper does not define sign(0). Here 0 and NaN say +1 on even steps and -1 on odd ones (one
    bit has no zero), so that a parameter that never has a gradient stays where it is; ``ties``
    resolves equal votes, see :class:`dlion.exchange.LevelSum`.

    Args:
        lr, betas, weight_decay: as for Lion; the decay is decoupled and not voted on.
        aggregation: ``mavo`` (1 bit down) or ``avg`` (``ceil(log2(n + 1))`` bits down).
        ties: zero | plus | alternate | random | previous. Only zero costs more than 1 bit down
            (1.6, for even n). Not used by ``avg``.
        workers: who takes part; seed: of random ties.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        aggregation: str = "mavo",
        ties: str = "alternate",
        *,
        workers: Workers | None = None,
        seed: int = 0,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, workers, seed)

    def direction(self, momentum: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return lion_direction(momentum, grad, *group["betas"])


class Signum(VotingOptimizer):
    """Distributed Signum: workers send the sign of their own momentum.

    Worker i: ``m_i <- b m_i + (1 - b) g_i``, ``d_i = sign(m_i)``; then as :class:`DLion`.
    Source: Bernstein et al. 2018 (arXiv 1810.05291), Algorithm 1, and D-SIGNUM of arXiv 2404.00438
    (which uses b = 0.99). sign(0), ``aggregation`` and ``ties`` as in :class:`DLion`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        momentum: float = 0.99,
        weight_decay: float = 0.0,
        aggregation: str = "mavo",
        ties: str = "alternate",
        *,
        workers: Workers | None = None,
        seed: int = 0,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, workers, seed)

    def direction(self, momentum: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return momentum.mul_(group["momentum"]).add_(grad, alpha=1 - group["momentum"])
