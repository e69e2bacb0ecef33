"""PowerSGD: gradients as matrices of low rank, with error feedback."""

from collections.abc import Iterable
from typing import Any, Unpack

from dlion.engine.bucket import Bucket
from dlion.engine.optimizer import Common, DistributedOptimizer
from dlion.exchange import LowRankMean, Matrix
from dlion.methods.updates import momentum_descent
from dlion.streams import stream_seed
from dlion.values import Count, NotNegative, Probability


class PowerSGD(DistributedOptimizer):
    """PowerSGD: low-rank gradients with error feedback, and momentum SGD on the answer.

    Worker i, of each parameter as a matrix [out, rest]: ``M_i = r_i + g_i``, sends ``P_i = M_i Q``,
    gets the mean P of all and makes its columns orthonormal (P^), sends ``Q_i = M_i^T P^`` and gets
    the mean Q, which it also starts from in the next step; ``r_i <- M_i - P^ Q_i^T``. Everyone:
    ``a = P^ Q^T``, ``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``. Vectors, and matrices that are
    not larger than their P and Q together, are sent as they are.
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
    more than a few large directions, residuals grow old. NaN in a gradient spoils Q for ever: use
    ``nonfinite``. As every process computes P^ by itself, all need the same kind of machine and
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
        parameters = sum(stop - start for bucket in self.buckets for start, stop in bucket.spans)
        bits = 32 * sum(bucket.exchange.values for bucket in self.buckets) / parameters
        return bits, bits

    def make_exchange(self, bucket: Bucket) -> LowRankMean:
        tensors = [Matrix(slot.start, slot.stop, slot.rows) for slot in bucket.slots]
        seed = stream_seed(self.seed, "powersgd", bucket.index)
        return LowRankMean(self.channel, bucket.numel, tensors, self.rank, seed, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        residual = bucket.own["residual"][local]
        residual += bucket.gradients()
        bucket.exchange.encode(local, residual)

    def update(self, bucket: Bucket) -> None:
        residuals = bucket.own["residual"]
        with bucket.untouched(bucket.flight.present, residuals):
            for local in self.channel.local_participants:
                residuals[local] -= bucket.exchange.sent(local)
        momentum_descent(bucket, bucket.exchange.decode())
