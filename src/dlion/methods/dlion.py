"""Methods whose workers vote with one bit: Distributed Lion and distributed Signum."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer, warm_up
from dlion.exchange import (
    Costs,
    LevelMean,
    Shape,
    Ties,
    Topology,
    Vote,
    WeightedVote,
    grid_shape,
    measure_costs,
)
from dlion.kernels import Gradients
from dlion.methods.updates import descent
from dlion.streams import stream_seed
from dlion.values import Betas, NotNegative, Probability
from dlion.wire import Sign, Ternary

Aggregation = Literal["mavo", "avg"]
# a momentum m, gradients g of some of its parameters, and the betas b1, b2: a worker's direction is
# b1 m + (1 - b1) g, and m moves to b2 m + (1 - b2) g
Terms = tuple[Tensor, Gradients, tuple[float, float]]


def sign_descent(bucket: Bucket, scale: float = 1.0) -> None:
    """``x <- (1 - lr wd) x - scale lr D`` with the signs D of an answer of one bit."""
    words, runs = bucket.exchange.answer.view(torch.int64), bucket.runs("lr", "weight_decay")
    if len(runs) == 1:
        lr, decay = runs[0].values
        kernels.apply_signs(bucket.params, words, scale * lr, decay / scale)
        return
    rates = [(scale * run.values[0], run.values[1] / scale) for run in runs]
    edges = [*(run.part.start for run in runs), len(bucket.params)]
    kernels.apply_signs_by_run(bucket.params, words, edges, rates)


class Directed(DistributedOptimizer):
    """Workers with a momentum each, which their directions are made of."""

    own_state = ["momentum"]

    def terms(self, bucket: Bucket, momentum: Tensor) -> Iterator[Terms]:
        """Yield what a worker's direction is made of, from its momentum, ``[padded]``: Lion's."""
        for run in bucket.runs("betas"):
            yield momentum, bucket.grads(run.slots), run.values[0]


class SignedDescent(Directed):
    """Levels of the workers' own momenta up, their vote or mean down, decoupled weight decay.

    A bucket is encoded straight from its gradients, in one pass that also moves the momentum;
    answers are unpacked in the pass that applies them. A subclass says in ``terms`` what directions
    are made of.

    With ``exchange=grid`` the workers stand on a grid of two dimensions, or three beyond 256 of
    them, as near to a square as their number allows, see :mod:`dlion.exchange.grid`; a prime number
    of workers has none and exchanges directly. Owners and sums are those of the direct exchange, so
    answers, ties of every kind, state and checkpoints are bit-identical for any participants.
    ``exchange=[nodes, workers_per_node]`` is the exact vote on two levels: workers of a node, which
    are numbered one after the other, add their votes, and nodes exchange the sums.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        aggregation: Aggregation,
        ties: Ties,
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
        self.exchange = exchange
        self._costs: Costs | None = None
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
        grid = self._grid(bucket)
        if self.aggregation == "avg":
            return LevelMean(channel, numel, self.levels, grid, **bucket.buffers)
        return Vote(channel, numel, self.levels, self.ties, seed, grid, **bucket.buffers)

    def _grid(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of the grid for a bucket; of fewer than two dimensions: none."""
        n = self.workers.count
        if not isinstance(self.exchange, str):
            if math.prod(self.exchange) != n:
                raise ValueError(
                    f"exchange={list(self.exchange)} is not possible: a grid of {n} workers has"
                    f" sizes whose product is {n}"
                )
            return tuple(self.exchange)
        if self.exchange == "grid":
            return grid_shape(n)
        if self.exchange == "direct" or self.workers.processes == 1:
            return ()
        if self._costs is None:
            self._costs = measure_costs(self.workers, bucket.device)
        return self._costs.best(bucket.numel, self.levels - 1)

    def check_elastic(self) -> None:
        if self.exchange not in ("direct", "grid"):
            raise ValueError(
                f"exchange={self.exchange} is for one number of workers: where they come and go"
                " (manager=) give direct or grid"
            )

    def encode(self, bucket: Bucket, local: int) -> None:
        positive = self.zero_is_positive(local, bucket.step)
        message = bucket.exchange.messages[local]
        for momentum, grads, betas in self.terms(bucket, bucket.own["momentum"][local]):
            kernels.encode_signs(message, momentum, grads, *betas, positive)

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

    def update(self, bucket: Bucket, scale: float = 1.0) -> None:
        """``x <- (1 - lr wd) x - scale lr D``, D unpacked in the same pass."""
        params, exchange = bucket.params, bucket.exchange
        if isinstance(exchange.down, Sign):
            sign_descent(bucket, scale)
            return
        runs = bucket.runs("lr", "weight_decay")
        if len(runs) > 1:
            descent(bucket, exchange.decode(), scale)
            return
        lr, decay = runs[0].values
        rates = scale * lr, decay / scale
        if isinstance(exchange.down, Ternary):
            kernels.apply_trits(params, exchange.answer, exchange.slice, *rates)
        else:
            sums = exchange.down.view(exchange.answer)
            kernels.apply_levels(params, sums, exchange.largest, *rates)

    def prepare(self) -> None:
        warm_up(self)


class DLion(SignedDescent):
    """Distributed Lion: every worker keeps its own momentum and sends one bit per parameter.

    Worker i: ``d_i = sign(b1 m_i + (1 - b1) g_i)``, ``m_i <- b2 m_i + (1 - b2) g_i``.
    Everyone: ``x <- (1 - lr wd) x - lr D`` with ``D = sign(sum d_i)`` (``mavo``) or
    ``D = sum d_i / n`` (``avg``). With one worker it is Lion.
    Source: Liu et al. 2024 (arXiv 2404.00438), Algorithm 1.

    The paper does not define sign(0). One bit has no zero: 0 and NaN are what
    ``zero_is_positive`` says, so that workers that know nothing of a parameter do not
    outvote one that does, in the mean over steps. ``ties`` resolves equal votes, see
    :class:`dlion.exchange.Vote`.

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

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        aggregation: Aggregation = "mavo",
        ties: Ties = "previous",
        weighted: bool = False,
        exchange: Topology | Shape = "direct",
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, weighted, exchange, **common)


class Signum(SignedDescent):
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
        aggregation: as for :class:`DLion`.
        ties: the answer to an equal vote of an even n, as for :class:`DLion`.
        weighted: weigh the votes of each worker by how often it was with the majority.
        exchange: how messages travel, as for :class:`DLion`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        momentum: Probability = 0.99,
        weight_decay: NotNegative = 0.0,
        aggregation: Aggregation = "mavo",
        ties: Ties = "previous",
        weighted: bool = False,
        exchange: Topology | Shape = "direct",
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, aggregation, ties, weighted, exchange, **common)

    def terms(self, bucket: Bucket, momentum: Tensor) -> Iterator[Terms]:
        for run in bucket.runs("momentum"):  # equal betas: Lion's direction is the new momentum
            yield momentum, bucket.grads(run.slots), (run.values[0],) * 2
