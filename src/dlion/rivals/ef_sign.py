"""Scaled signs with a memory, to compare votes with: EF-signSGD, and Lion on EF21."""

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import ScaledSignMean
from dlion.methods.momentum import MomentumOptimizer, lion_direction
from dlion.methods.updates import vote_descent
from dlion.rivals.exchange.tracking import TrackingVote
from dlion.rivals.updates import momentum_descent
from dlion.values import Betas, NotNegative, Probability


class EFSignSGD(DistributedOptimizer):
    """signSGD with error feedback both ways, and momentum SGD on the answer.

    Worker i: ``r_i <- r_i + g_i``, sends ``c_i = mean|r_i| sign(r_i)``, ``r_i <- r_i - c_i``. The
    owner of a slice: ``e <- e + mean c_i``, answers ``a = mean|e| sign(e)``, ``e <- e - a``.
    Everyone: ``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``. Means are over pieces, the part of a
    parameter tensor in a slice, so results depend on the number of workers and on the buckets;
    sign(0) is +1. All messages carry 4 bytes for each piece of the slice that has most.
    Source: Karimireddy et al. 2019 (arXiv 1901.09847), Algorithm 1, without momentum and with a
    weight decay of 5e-4 in their code (github.com/epfml/error-feedback-SGD); both ways as in Zheng
    et al. 2019 (arXiv 1905.10936), whose blocks are parameter tensors. Residuals are in units of
    gradients here: what was held back is applied at the rate of the step in which it is sent. And
    momentum follows the exchange, instead of coming before it.

    Memory: 8 + 4 / n bytes of state a parameter (residual and momentum on every worker, the error
    of the answer on its owner).

    When not to use it: to train where :class:`DLion` can; this is here to compare. An answer is as
    large everywhere in a piece, which is noise to the elements with small gradients; only where all
    of them have been 0 it is 0. With ``nonfinite=None`` a NaN spoils
    the scale, and the piece's residuals for ever.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD. The residual already acts as momentum, and more of it makes the noise of
            the answers last.
        weight_decay: decoupled.
    """

    own_state = ["residual"]
    shared_state = ["momentum_buffer"]
    skips_missing = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-1,
        momentum: Probability = 0.0,
        weight_decay: NotNegative = 0.0,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 1, 1

    def make_exchange(self, bucket: Bucket) -> ScaledSignMean:
        return ScaledSignMean(self.channel, bucket.numel, bucket.spans, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        residual = bucket.own["residual"][local]
        residual += bucket.gradients()
        residual -= bucket.exchange.encode(local, residual)

    def update(self, bucket: Bucket) -> None:
        momentum_descent(bucket, bucket.exchange.decode())


class EF21Sign(MomentumOptimizer):
    """Distributed Lion whose directions are followed by EF21 with scaled signs, not voted on.

    Worker i: ``u_i = b1 m_i + (1 - b1) g_i``, ``m_i <- b2 m_i + (1 - b2) g_i``, sends
    ``q_i = mean|u_i - h_i| sign(u_i - h_i)``, ``h_i <- h_i + q_i``. The owner of a slice keeps the
    sum of all h_i and answers its sign D in one bit, the opposite of its previous one
    where the sum is exactly 0.
    Everyone: ``x <- (1 - lr wd) x - lr D``. Means are over pieces, the part of a parameter tensor
    in a slice, so results depend on the number of workers and on the buckets; sign(0) of a
    difference is +1. Messages up carry 4 bytes for each piece of the slice that has most.
    Source: Richtarik et al. 2021 (arXiv 2106.05203), with Lion (arXiv 2302.06675, Algorithm 2) for
    the descent: its direction instead of the gradient, the sign of the sum instead of the mean.

    A gradient that is missing counts as zero and leaves the momentum alone, but the estimate still
    follows, as worker and owner must move it equally: it is state of the exchange. The last
    known value of an absent worker still counts.

    Memory: 8 + 4 / n bytes and 1 / n bits of state a parameter (momentum and estimate on every
    worker, sum and previous answer on the owner); Distributed Lion has 4 bytes and 1 / n bits.

    When not to use it: on i.i.d. data, where :class:`DLion` learns faster with half of the memory.
    With one scale for all of a piece, estimates of small directions are noise, and rows whose
    gradient is always zero (of padding, say) may drift. With ``nonfinite=None`` a NaN spoils the
    scale, and the piece's estimates for ever.

    Args:
        lr: learning rate, 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
    """

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

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 1, 1

    def make_exchange(self, bucket: Bucket) -> TrackingVote:
        return TrackingVote(self.channel, bucket.numel, bucket.spans, **bucket.buffers)

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        return lion_direction(bucket, local)

    def encode(self, bucket: Bucket, local: int) -> None:
        bucket.exchange.encode(local, self.direction(bucket, local))

    def update(self, bucket: Bucket) -> None:
        vote_descent(bucket)
