"""PowerSGD: gradients as matrices of low rank, with error feedback."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import Channel
from dlion.methods.matrices import Matrices
from dlion.rivals.exchange.low_rank import LowRankMean, Matrix, is_smaller
from dlion.rivals.updates import momentum_descent
from dlion.streams import stream, stream_seed
from dlion.values import Count, NotNegative, Probability


class PowerSGD(DistributedOptimizer):
    """PowerSGD: low-rank gradients with error feedback, and momentum SGD on the answer.

    Worker i, of each parameter as a matrix [out, rest]: ``M_i = r_i + g_i``, sends ``P_i = M_i Q``,
    gets the mean P of all and makes its columns orthonormal (P^), sends ``Q_i = M_i^T P^`` and gets
    the mean Q, which it also starts from in the next step; ``r_i <- M_i - P^ Q_i^T``. Everyone:
    ``a = P^ Q^T``, ``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``. Vectors, and matrices that are
    not larger than their P and Q together, are sent as they are. Parameters ``experts.*`` of three
    dimensions have a matrix for each expert.
    Source: Vogels et al. 2019 (arXiv 1905.13727), Algorithms 1 and 2; ranks of 1 to 4, momentum
    0.9, and the rate of SGD.

    What differs in the paper (1), its authors' code (2) and torch's powerSGD_hook (3):

    - 2 and 3 leave out the mean Q instead of a worker's own, ``r_i <- M_i - P^ Q^T``. The mean of
      all r_i is the same, and so are the steps, but here nobody keeps what others have sent.
    - 2 and 3 send everything in full for the first 100 or 1,000 steps, and always what shrinks to
      no less than half. 2 sends only one of P and Q in a step, in turn.
    - 1 and, up to rank 2, 3 orthogonalise by Gram-Schmidt, which has no basis of zeros; 2 and this
      by QR. 3 does so with Q, too, which changes nothing but rounding.
    - 1 descends along ``a + b``, and its weight decay goes through the momentum.

    Matrices are read in the order of memory: a channels_last layout permutes columns, and so gives
    them other rows of the random first Q.

    Memory: 8 bytes of state a parameter (residual and momentum), and 4 r / rows of a matrix (Q).

    When not to use it: where a step waits for latency, as it has two rounds. Where gradients have
    more than a few large directions, residuals grow old. With ``nonfinite=None`` a NaN
    spoils Q for ever. As every process computes P^ by itself, all need the same kind of machine and
    number of threads.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        weight_decay: decoupled.
        rank: r, the columns of P and Q; bits grow with it.
        seed: of the first Q, which is the same on all workers.
    """

    own_state = ["residual"]
    shared_state = ["momentum_buffer"]
    skips_missing = False
    needs_full_matrices = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-1,
        momentum: Probability = 0.9,
        weight_decay: NotNegative = 0.0,
        rank: Count = 4,
        **common: Unpack[Common],
    ):
        self.rank = rank
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """The values of both rounds in float32, by the shapes of the parameters."""
        slots = (slot for bucket in self.buckets for slot in bucket.full.slots)
        parameters = max(1, sum(slot.stop - slot.start for slot in slots))
        bits = 32 * sum(bucket.exchange.values for bucket in self.buckets) / parameters
        return bits, bits

    def make_exchange(self, bucket: Bucket) -> LowRankMean:
        seed = stream_seed(self.seed, "powersgd", bucket.index)
        return low_rank_mean(self.channel, bucket, lambda rows, columns: self.rank, seed)

    def encode(self, bucket: Bucket, local: int) -> None:
        residual = bucket.own["residual"][local]
        residual += bucket.gradients()
        bucket.exchange.encode(local, bucket.full.gather(residual))

    def update(self, bucket: Bucket) -> None:
        residuals = bucket.own["residual"]
        with bucket.preserve_missing(bucket.anywhere, residuals):
            for local in self.channel.local_participants:
                residuals[local] -= bucket.scatter(bucket.exchange.sent(local))
        momentum_descent(bucket, bucket.scatter(bucket.exchange.decode()))


def low_rank_mean(
    channel: Channel,
    bucket: Bucket,
    rank: Callable[[int, int], int],
    seed: int,
    unit: bool = False,
) -> LowRankMean:
    """Make the exchange for the tensors of a bucket that are whole here.

    All processes draw the first Q of all matrices, so that it is the same wherever a matrix is.

    Args:
        rank: of a matrix of so many rows and columns.
        seed, unit: of the first Q, and as for :class:`dlion.rivals.exchange.low_rank.LowRankMean`.
    """
    shapes = [
        Matrices.of(group, slot.name, shape).stored(shape)
        for slot, group, shape in zip(bucket.slots, bucket.groups, bucket.full.shapes, strict=True)
    ]
    ranks = [[rank(*shape) for shape in parts] for parts in shapes]
    sizes = [
        sum(
            columns * r if unit or is_smaller(r, rows, columns) else 0
            for (rows, columns), r in zip(*both, strict=True)
        )
        for both in zip(shapes, ranks, strict=True)
    ]
    # made in main memory: the same on every kind of device
    draws = torch.randn(
        sum(sizes), generator=stream(seed, "query"), dtype=torch.float32, device="cpu"
    ).split(sizes)
    mine = bucket.full.mine
    return LowRankMean(
        channel,
        bucket.full.numel,
        [
            matrix
            for slot, index in zip(bucket.full.slots, mine, strict=True)
            for matrix in _matrices(slot.start, shapes[index])
        ],
        [r for index in mine for r in ranks[index]],
        torch.cat([torch.zeros(0, dtype=torch.float32), *(draws[index] for index in mine)]),
        unit,
        **bucket.buffers,
    )


def _matrices(start: int, shapes: list[tuple[int, int]]) -> Iterator[Matrix]:
    for rows, columns in shapes:
        yield Matrix(start, start + rows * columns, rows)
        start += rows * columns
