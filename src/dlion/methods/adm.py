"""Distributed Lion by adaptive delta modulation: one bit each way that tells how much, too."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common
from dlion.exchange import DeltaVote
from dlion.kernels import Gradients
from dlion.methods.momentum import MomentumOptimizer, lion_direction, no_gradients
from dlion.methods.updates import vote_descent
from dlion.values import Betas, Limits, NotNegative

Terms = tuple[Gradients, float, float]  # g of some parameters, b1 and b2


class DeltaVoteOptimizer(MomentumOptimizer):
    """Workers whose directions owners follow bit by bit, and signs of the sum as answers.

    A subclass says what its ``direction`` is, and may take and send it in one pass in ``encode``.
    """

    rise: int  # and others of :class:`dlion.exchange.DeltaVote`
    lookahead: float
    limit: float | None = None
    weighted: bool = False

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 1, 1

    def make_exchange(self, bucket: Bucket) -> DeltaVote:
        coding = self.rise, self.lookahead, self.limit, self.weighted, bucket.mask
        return DeltaVote(self.channel, bucket.numel, bucket.sizes, *coding, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        self._send(bucket, local, self.direction(bucket, local), [(no_gradients(bucket), 1.0, 1.0)])

    def _send(self, bucket: Bucket, local: int, momentum: Tensor, terms: Sequence[Terms]) -> None:
        """Send ``u >= h`` of ``u = b1 m + (1 - b1) g``, and do ``m <- b2 m + (1 - b2) g``."""
        exchange = bucket.exchange
        if not exchange.begun:
            sizes = [kernels.measure(momentum, grads, beta1, "l1") for grads, beta1, _ in terms]
            exchange.start(local, torch.cat(sizes))
        message, coder = exchange.messages[local], exchange.coder(local)
        for gradients, beta1, beta2 in terms:
            kernels.encode_deltas(message, momentum, gradients, coder, beta1, beta2, self.rise)

    def update(self, bucket: Bucket) -> None:
        """``x <- (1 - lr wd) x - lr D``."""
        vote_descent(bucket)


class DLionADM(DeltaVoteOptimizer):
    """Distributed Lion whose directions are followed by adaptive delta modulation, not voted on.

    Worker i: ``u_i = b1 m_i + (1 - b1) g_i``, ``m_i <- b2 m_i + (1 - b2) g_i``, sends
    ``bit_i = (u_i >= h_i)``. It and the owner of the slice then move the step size of each
    coordinate, a level ``l_i`` of 256, eight an octave: down by 1 if the bit is not the last one,
    by nothing if it is, up by ``rise`` if it was so before as well; and the estimate:
    ``h_i <- h_i + s(l_i)`` for 1, ``h_i - s(l_i)`` for 0. The owner keeps the sum of all h_i and
    answers, in one bit, ``D = sign(sum h_i + lookahead * sum (steps of those who sent))``; where
    that is 0 its previous answer. Everyone: ``x <- (1 - lr wd) x - lr D``.

    Source: the coder is that of adaptive delta modulation (Jayant 1970), with two bits of memory:
    step sizes rest at the size of the noise, and fall to nothing where there is none.
    Lion's direction: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2.

    A gradient that is missing counts as zero and leaves the momentum alone, but the estimate still
    follows, as worker and owner must move it equally: it is state of the exchange. The last
    known value of an absent worker still counts.

    Memory: 10.5 + 4 / n bytes of state a parameter (Distributed Lion has 4, AdamW 8): momentum and
    estimate, a level and two bits on the worker, a level and two bits of each worker and the sum on
    the owner; 4 more with ``limit`` or ``weighted``.

    The default betas are not Lion's: a momentum of 0.99 begins far below the gradients, so the
    estimates start small, and what they miss lasts. On digits with alpha 0.1 (8 workers of 16, 400
    steps, one seed) it has 89.5 % with (0.8, 0.9), and 78.7 with Lion's (0.9, 0.99).

    When not to use it: with Byzantine workers and no ``limit``, as one with large gradients
    dominates; where memory is short. In the first hundred steps, and with long momenta (0.99), it
    lags behind a vote on i.i.d. data. Gradients whose entries are below 1e-9 or above 100 are too
    small or too large for the step sizes, 2.3e-10 to 0.94: scale the loss. Rows whose gradient is
    always zero (of padding, say) drift by 17 rates in 201 steps of 4 workers: their estimates
    swing about 0, and a sign has no zero. Where data
    differ between workers it stays within 1.4 points and 0.008 nats of Lion on the mean gradient in
    small trainings (results/unlike_data, unlike_cifar10, unlike_text). It is 0.023 nats behind on
    the board's text, and not tried in large trainings.

    Args:
        lr: learning rate, 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
        rise: levels that a step size grows by; 2 is neutral to noise, more let it grow there.
        lookahead: steps that estimates are taken ahead, for answers that lag behind less.
        limit: a worker's estimates count at most so many times as much as the median of all
            workers', see :class:`dlion.exchange.DeltaVote`; None: no limit.
        weighted: weigh workers by how often their estimates had the sign of the answer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        betas: Betas = (0.8, 0.9),
        weight_decay: NotNegative = 0.0,
        rise: Annotated[int, Limits(ge=1, le=32)] = 3,
        lookahead: NotNegative = 0.5,
        limit: Annotated[float, Limits(ge=1)] | None = None,
        weighted: bool = False,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        self.rise, self.lookahead, self.limit, self.weighted = rise, lookahead, limit, weighted
        super().__init__(params, defaults, **common)

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        """``u = b1 m + (1 - b1) g``, then ``m <- b2 m + (1 - b2) g``."""
        return lion_direction(bucket, local)

    def encode(self, bucket: Bucket, local: int) -> None:
        """Send ``u >= h``, in one pass with :meth:`direction` over momentum and gradients."""
        terms = [
            (bucket.grads(segment.slots), *segment.values[0])
            for segment in bucket.segments("betas")
        ]
        self._send(bucket, local, bucket.own["momentum"][local], terms)
