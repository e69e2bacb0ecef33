"""PowerSGD: gradients as matrices of low rank, with error feedback."""

from collections.abc import Iterable
from typing import Any, Unpack

from dlion.exchange import LowRankMean, Matrix
from dlion.optim.base import Common, DistributedOptimizer
from dlion.optim.bucket import Bucket, Slot
from dlion.optim.updates import momentum_descent
from dlion.streams import stream_seed
from dlion.values import Count, NotNegative, Probability


class PowerSGD(DistributedOptimizer):
    """PowerSGD with momentum SGD.

    Worker i, of each parameter as a matrix [out, rest]: ``M_i = r_i + g_i``, sends ``P_i = M_i Q``,
    gets the mean P of all, makes its columns orthonormal (P^), sends ``Q_i = M_i^T P^``, gets the
    mean Q, which is also the Q of the next step, ``r_i <- M_i - P^ Q_i^T``. Everyone: ``a = P^
    Q^T``, ``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``. Vectors, and matrices that are not
    larger than their P and Q together, are sent as they are. See
    :class:`dlion.exchange.LowRankMean`. Source: Vogels et al. 2019 (arXiv 1905.13727), Algorithms 1
    and 2, with rank 1 to 4 and the momentum and rate of SGD. Where they, or their public code and
    torch's powerSGD_hook, differ: Both codes keep ``M_i - P^ Q^T`` with the mean Q: of all workers
    together that is the same, and so are the steps, but a worker that is absent or sees other data
    keeps only what is its own here. Both send all in full for the first steps (torch 1,000), and
    matrices that shrink less than 2 times always; here compression starts at once. The paper
    orthogonalises by Gram-Schmidt, torch too up to rank 2 (and Q besides, which changes nothing but
    rounding); here it is a QR decomposition, which has a basis even of zeros. The paper adds ``a``
    to the descent once more, and its decay goes through the momentum. Matrices are read in the
    order of memory, so with channels_last the random first Q belongs to other columns.

    Memory: 8 bytes of state a parameter (residual and momentum), and 4 r / rows of a matrix (Q).

    When not to use it: where a step waits for latency, as it has two rounds, or where gradients
    have no few large directions. NaN in a gradient spoils Q for ever: use ``nonfinite``. As all
    processes compute P^ by themselves, they need the same kind of machine and number of threads.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        weight_decay: decoupled.
        rank: r.
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
        rank: Count = 2,
        **common: Unpack[Common],
    ):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank={rank} is not possible: give a whole number, at least 1")
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
        tensors = [Matrix(slot.start, slot.stop, _rows(slot)) for slot in bucket.slots]
        seed = stream_seed(self.seed, "powersgd", bucket.index)
        return LowRankMean(self.channel, bucket.numel, tensors, self.rank, seed, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        bucket.exchange.encode(local, bucket.own["residual"][local] + bucket.gradients())

    def update(self, bucket: Bucket) -> None:
        residuals = bucket.own["residual"]
        with bucket.untouched(bucket.flight.present, *residuals):
            for local in self.channel.local_participants:
                residuals[local] = bucket.exchange.unsent(local)
        momentum_descent(bucket, bucket.exchange.decode())


def _rows(slot: Slot) -> int:
    """The length of the outermost dimension in memory; 1 of a vector."""
    shape, order = slot.tensor.shape, slot.order or (0,)
    return shape[order[0]] if len(shape) > 1 else 1
