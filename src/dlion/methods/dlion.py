"""Methods whose workers vote with one bit: Distributed Lion and distributed Signum."""

import math
from collections.abc import Iterable
from typing import Any, Literal, Unpack

from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common
from dlion.exchange import LevelMean, Shape, Ties, Topology, Vote, WeightedVote, make_sum
from dlion.methods.momentum import MomentumOptimizer, lion_direction, no_gradients
from dlion.methods.updates import vote_descent
from dlion.streams import stream_seed
from dlion.values import Betas, NotNegative, Probability

Aggregation = Literal["mavo", "avg"]


class Voting(Common, total=False):
    """Keyword arguments of methods that vote, besides those of every optimizer.

    Args:
        aggregation: mavo: majority vote, 1 bit down; avg: the mean of the signs,
            ``ceil(log2(n + 1))`` bits down.
        ties: the answer to an equal vote of an even n, not used by avg. Only zero costs more than 1
            bit down (1.6).
        weighted: weigh the votes of each worker by how often it was with the majority, see
            :class:`dlion.exchange.WeightedVote`; for ``mavo``.
        exchange: how messages travel: direct: from every worker to every other; grid: along the
            rows and columns of a grid of workers, which is faster where many short messages wait
            for each other, on fast links or with many workers; auto: whichever is faster here, as
            measured when the optimizer is made; [4, 2]: along a grid of these sizes, the last one
            being of neighbours, such as the workers of a node. The result is bit-identical.
    """

    aggregation: Aggregation
    ties: Ties
    weighted: bool
    exchange: Topology | Shape


class SignVoteOptimizer(MomentumOptimizer):
    """Signs of the workers' directions up, their vote or mean down, decoupled weight decay.

    A subclass says what its ``direction`` is and what the vote does in ``update``. Where a
    direction is a sum of momentum and gradients, it overrides ``encode``, too: one pass over both
    moves the momentum and writes the signs.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        aggregation: Aggregation = "mavo",
        ties: Ties = "previous",
        weighted: bool = False,
        exchange: Topology | Shape = "direct",
        **common: Unpack[Common],
    ):
        if weighted and (aggregation != "mavo" or ties == "zero"):
            raise ValueError("weighted=true needs aggregation=mavo, and ties other than zero")
        if weighted and exchange not in ("direct", "auto"):
            raise ValueError(
                "weighted=true needs exchange=direct: on a grid owners see sums, not single votes"
            )
        self.aggregation, self.ties, self.weighted = aggregation, ties, weighted
        self.exchange: Topology | Shape = exchange
        super().__init__(params, defaults, **common)

    @property
    def levels(self) -> int:
        """Levels of a message, see :mod:`dlion.exchange.vote`."""
        return 2

    @property
    def paper_bits(self) -> tuple[float, float]:
        """A bit or p bits up; down a sign, or a sum of n (levels - 1) + 1 values.

        arXiv 2404.00438 says log(n) for the sum, one value fewer: 2 bits for 4 workers, not 2.32.
        """
        up, largest = math.log2(self.levels), self.workers.count * (self.levels - 1)
        if self.aggregation == "avg":
            return math.ceil(up), math.log2(largest + 1)
        tied = self.ties == "zero" and largest % 2 == 0
        return math.ceil(up), math.log2(3) if tied else 1

    def make_exchange(self, bucket: Bucket) -> LevelMean | Vote | WeightedVote:
        channel, numel = self.channel, bucket.numel
        seed = stream_seed(self.seed, "exchange", bucket.index)
        if self.weighted:
            return WeightedVote(channel, numel, self.ties, seed, bucket.mask, **bucket.buffers)
        cls = LevelMean if self.aggregation == "avg" else Vote
        options = () if self.aggregation == "avg" else (self.ties, seed)
        return make_sum(cls, self.exchange, channel, numel, self.levels, *options, **bucket.buffers)

    def check_elastic(self) -> None:
        if self.exchange not in ("direct", "grid"):
            raise ValueError(
                f"exchange={self.exchange} is for one number of workers: where they come and go"
                " (manager=) give direct or grid"
            )

    def encode(self, bucket: Bucket, local: int) -> None:
        message, direction = bucket.exchange.messages[local], self.direction(bucket, local)
        positive = self.zero_is_positive(local, bucket.step)
        kernels.encode_signs(message, direction, no_gradients(bucket), 1.0, 1.0, positive)

    def zero_is_positive(self, local: int, step: int) -> bool:
        """The bit that a local worker sends for u = 0 or NaN: whether +1.

        One bit has no zero. On even steps a little more than half of the participants, another half
        every other step, say +1 and the rest -1; on odd steps the same ones say the opposite. What
        nobody knows so moves back and forth and stays where it is. Where one alone has an opinion,
        chance votes of the others leave it the vote twice as often as they take it, or more (of 8
        workers in 64 steps of 128, against 24, with 40 ties), so x moves its way.
        """
        participants = self.channel.participants
        position, n = participants.index(self.workers.ids[local]), len(participants)
        # neighbours in the order of workers, half of them and one, take turns: whoever is absent
        # leaves the rest as balanced as all are
        majority = (position + step // 2) % n < n // 2 + 1
        return majority if step % 2 == 0 else not majority


class DLion(SignVoteOptimizer):
    """Distributed Lion: every worker keeps its own momentum and sends one bit per parameter.

    Worker i: ``d_i = sign(b1 m_i + (1 - b1) g_i)``, ``m_i <- b2 m_i + (1 - b2) g_i``.
    Everyone: ``x <- (1 - lr wd) x - lr D`` with ``D = sign(sum d_i)`` (``mavo``) or
    ``D = sum d_i / n`` (``avg``). With one worker it is Lion.
    Source: Liu et al. 2024 (arXiv 2404.00438), Algorithm 1.

    The paper does not define sign(0). One bit has no zero: 0 and NaN are what
    ``zero_is_positive`` says, so that workers that know nothing of a parameter do not
    outvote one that does, in the mean over steps. ``ties`` resolves equal votes, see
    :class:`dlion.exchange.Vote`. ``Voting`` describes it and the other options of votes.

    When not to use it: where workers see non-i.i.d. data (shards by class, by user). A vote counts
    heads and loses what a mean would keep, on Dirichlet shards of digits with alpha 0.1 13 points
    with searched settings (results/unlike_data) and up to 45 with the usual ones; there use
    :class:`DLionADM`, or :class:`LionCub` with momentum synchronisation. On a link of 10 Gbit/s and
    more packing gains little. ``avg`` wants a learning rate that grows with n, as the mean of n
    disagreeing signs shrinks like 1 / sqrt(n).

    Args:
        lr: learning rate, 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled and not voted on, 3 to 10 times larger than AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        **options: Unpack[Voting],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        """``u = b1 m + (1 - b1) g``, then ``m <- b2 m + (1 - b2) g``."""
        return lion_direction(bucket, local)

    def encode(self, bucket: Bucket, local: int) -> None:
        """Send ``sign(u)``, in one pass with :meth:`direction` over momentum and gradients."""
        message, momentum = bucket.exchange.messages[local], bucket.own["momentum"][local]
        positive = self.zero_is_positive(local, bucket.step)
        for segment in bucket.segments("betas"):
            gradients, (beta1, beta2) = bucket.grads(segment.slots), segment.values[0]
            kernels.encode_signs(message, momentum, gradients, beta1, beta2, positive)

    def update(self, bucket: Bucket) -> None:
        """``x <- (1 - lr wd) x - lr D`` with the vote D, unpacked in the same pass."""
        vote_descent(bucket)


class Signum(SignVoteOptimizer):
    """Distributed Signum: workers send the sign of their own momentum.

    Worker i: ``m_i <- b m_i + (1 - b) g_i``, ``d_i = sign(m_i)``; then as :class:`DLion`.
    Source: Bernstein et al. 2018 (arXiv 1810.05291), Algorithm 1, and D-SIGNUM of arXiv 2404.00438
    (which uses b = 0.99).

    sign(0), ``aggregation`` and ``ties``: as :class:`DLion`.

    When not to use it: where :class:`DLion` is not to be used. With a momentum as short
    :class:`DLion` is to be preferred; Signum is here to compare.

    Args:
        lr: learning rate.
        momentum: b.
        weight_decay: decoupled and not voted on.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        momentum: Probability = 0.99,
        weight_decay: NotNegative = 0.0,
        **options: Unpack[Voting],
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        """``m <- b m + (1 - b) g``, which is the direction as well."""
        momentum, gradients = bucket.own["momentum"][local], bucket.gradients()
        for segment in bucket.segments("momentum"):
            (b,), (m, g) = segment.values, segment.of(momentum, gradients)
            m.mul_(b).add_(g * (1 - b))
        return momentum

    def encode(self, bucket: Bucket, local: int) -> None:
        """Send ``sign(m)``, in one pass with :meth:`direction`."""
        message, momentum = bucket.exchange.messages[local], bucket.own["momentum"][local]
        positive = self.zero_is_positive(local, bucket.step)
        for segment in bucket.segments("momentum"):
            gradients, (b,) = bucket.grads(segment.slots), segment.values
            kernels.encode_signs(message, momentum, gradients, b, b, positive)

    def update(self, bucket: Bucket) -> None:
        vote_descent(bucket)
