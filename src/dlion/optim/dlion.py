"""Methods whose workers vote: Distributed Lion and distributed Signum."""

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange import TIES, LevelSum
from dlion.optim.base import Common, DistributedOptimizer
from dlion.optim.bucket import Bucket, dense
from dlion.streams import stream_seed

AGGREGATIONS = ("mavo", "avg")


class LevelOptimizer(DistributedOptimizer):
    """Small integers up, their sum or its sign down; signed descent with decoupled weight decay.

    Each parameter is encoded straight from its gradient, in one pass that also moves the momentum;
    answers are unpacked in the pass that applies them.
    """

    own_state = ["momentum"]
    levels = 2  # of a message, see LevelSum
    answer = "sign"

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        ties: str,
        weighted: bool = False,
        **common: Unpack[Common],
    ):
        if ties not in TIES:
            raise ValueError(f"ties={ties} is unknown: choose one of {', '.join(TIES)}")
        if weighted and (self.answer != "sign" or ties == "zero"):
            raise ValueError("weighted=true needs aggregation=mavo, and ties other than zero")
        self.ties, self.weighted = ties, weighted
        super().__init__(params, defaults, **common)

    def prepare(self) -> None:
        values = torch.zeros(64)
        bucket = Bucket([torch.nn.Parameter(values)], [""], self.param_groups[0])
        exchange = self.make_exchange(bucket)
        message = exchange.outbox(0).view(torch.int64)
        self.encode(exchange, message, 0, values.clone(), values.clone(), 0, bucket.group)
        exchange.apply(torch.zeros(exchange.numel), exchange.deliver(0), lr=0.0, weight_decay=0.0)

    def make_exchange(self, bucket: Bucket) -> LevelSum:
        return LevelSum(
            self.channel,
            bucket.numel,
            levels=self.levels,
            answer=self.answer,
            ties=self.ties,
            weighted=self.weighted,
            spans=bucket.spans,
            seed=stream_seed(self.seed, "exchange", len(self.buckets)),
            header_bytes=bucket.header_bytes,
            device=bucket.device,
        )

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Of the direction whose sign is said, and of the momentum."""
        return group["betas"]

    def encode(
        self,
        exchange: LevelSum,
        message: Tensor,
        at: int,
        momentum: Tensor,
        grad: Tensor,
        step: int,
        group: dict[str, Any],
    ) -> None:
        """Write what a worker says about one parameter into its message, and move its momentum.

        ``message``: int64 ``[n, any]``; ``at``: where the parameter starts in the bucket.
        """
        view = message[:, : exchange.words].unsqueeze(1)
        kernels.encode_signs(view, at, momentum, grad, *self.betas(group), step % 2 == 0)

    def speak(self, bucket: Bucket, exchange: LevelSum, i: int, step: int) -> None:
        message = exchange.outbox(i).view(torch.int64)
        momenta = bucket.own["momentum"][i]
        for tensor, (start, stop) in zip(bucket.tensors, bucket.spans, strict=True):
            momentum = momenta[start:stop]
            if tensor.grad is None:
                grad = torch.zeros_like(momentum)
            else:
                grad = dense(tensor.grad).flatten()
            self.encode(exchange, message, start, momentum, grad, step, bucket.group)

    def update(self, bucket: Bucket, exchange: LevelSum, answers: list[Tensor], step: int) -> None:
        group = bucket.group
        exchange.apply(bucket.params, answers, group["lr"], group["weight_decay"])


class VotingOptimizer(LevelOptimizer):
    """Signs up; their majority (``mavo``) or their mean (``avg``) down."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        aggregation: str,
        ties: str,
        weighted: bool,
        **common: Unpack[Common],
    ):
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation} is unknown: choose mavo or avg")
        self.aggregation = aggregation
        self.answer = "sign" if aggregation == "mavo" else "level"
        super().__init__(params, defaults, ties, weighted, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        if self.aggregation == "avg":
            return 1, math.log2(self.workers.count + 1)
        tied = self.ties == "zero" and self.workers.count % 2 == 0
        return 1, math.log2(3) if tied else 1


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
        ties: previous | zero | plus | alternate | random. Only zero costs more than 1 bit down
            (1.6, for even n). Not used by ``avg``.
        weighted: weigh the votes of each worker by how often it was with the majority, see
            :class:`dlion.exchange.LevelSum`; for ``mavo``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        aggregation: str = "mavo",
        ties: str = "previous",
        weighted: bool = False,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, weighted, **common)


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
        ties: str = "previous",
        weighted: bool = False,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, weighted, **common)

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        return group["momentum"], group["momentum"]
