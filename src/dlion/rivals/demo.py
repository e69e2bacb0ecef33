"""DeMo: workers keep momenta of their own and send the largest coefficients of their cosines."""

from collections.abc import Iterable
from typing import Any, Unpack

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.methods.updates import descent
from dlion.rivals.exchange.low_rank import Matrix
from dlion.rivals.exchange.topk import CosineTopKMean, bits_each_way
from dlion.rivals.wire import ValueBits
from dlion.values import Count, NotNegative, Probability


class DeMo(DistributedOptimizer):
    """Decoupled momentum: its large entries are sent and subtracted, small ones stay.

    Worker i: ``m_i <- beta m_i + g_i``; each tile of a matrix goes through a cosine transform (DCT,
    orthonormal, of ``chunk`` rows by ``chunk`` columns), its ``topk`` largest coefficients q_i are
    sent with their places, and ``m_i <- m_i - DCT^-1(q_i)``.
    Everyone: ``x <- (1 - lr wd) x - lr sign(DCT^-1(mean q_i))``.
    Source: Peng et al. 2024 (arXiv 2411.19870), with beta 0.999, chunks of 64 and topk 8 to 32, and
    their code (github.com/bloc97/DeMo), whose defaults these are. Differences:

    - Tiles are as equal as can be and at most ``chunk`` long; theirs are the largest divisor of a
      dimension, which for 257 is 1. A vector is a matrix of one row, and a tensor of more
      dimensions one whose rows are along its first (as it lies in memory); theirs takes none.
    - The mean is over all workers; theirs is over those that sent that coefficient.
    - The momentum is of gradients; theirs of gradients times the learning rate, which weighs them
      by the schedule.
    - The momentum is kept as its coefficients, which saves one of two transforms; the transform is
      linear, so it is the same but for rounding.
    - Places take ``ceil(log2(values of a tile))`` bits, theirs 64; a tile of no more than ``topk``
      values is sent whole, without places.

    Memory: 4 bytes of state a parameter.

    When not to use it: with many workers, as everyone sends its message to n - 1 and receives as
    many, at the usual settings 0.34 (n - 1) bits a parameter and step each way, which for n = 6 and
    more is more than :class:`DLion` takes. In small models, whose many small tensors send half of
    themselves. The sign moves all of a tile by the full rate, whatever little was sent: rows whose
    gradient is always zero (of padding, say) drift by 9 rates in 201 steps of 4 workers. With
    ``nonfinite=None`` a NaN spoils its tile's momentum for ever.

    Args:
        lr: learning rate, of a step of signs: 3 to 10 times smaller than AdamW's.
        momentum: beta.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
        chunk: rows and columns of the largest tile.
        topk: coefficients that are sent of each tile (the paper has 8 to 32).
        value_bits: of a coefficient on the wire: 32, 16 (bfloat16) or 2 (a sign and one of two
            sizes). What rounding leaves out stays in the momentum.
    """

    own_state = ["momentum"]
    skips_missing = False
    needs_full_matrices = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 3e-4,
        momentum: Probability = 0.999,
        weight_decay: NotNegative = 0.0,
        chunk: Count = 64,
        topk: Count = 32,
        value_bits: ValueBits = 32,
        **common: Unpack[Common],
    ):
        self.chunk, self.topk, self.value_bits = chunk, topk, value_bits
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """Bits of whole tiles, sent to each and received from n - 1 workers."""
        return bits_each_way(self.chunk**2, self.topk, self.value_bits, self.workers.count)

    def make_exchange(self, bucket: Bucket) -> CosineTopKMean:
        sides = self.chunk, self.topk, self.value_bits
        whole = bucket.full
        matrices = [Matrix(slot.start, slot.stop, slot.rows) for slot in whole.slots]
        return CosineTopKMean(self.channel, whole.numel, matrices, *sides, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        found = bucket.exchange.transform(bucket.full.gather(bucket.gradients()))
        kept = bucket.own["momentum"][local]
        for segment in bucket.segments("momentum"):
            kept[segment.part] *= segment.values[0]
        momentum = bucket.full.gather(kept)
        momentum += found
        momentum -= bucket.exchange.encode(local, momentum)
        kept.copy_(bucket.scatter(momentum))

    def update(self, bucket: Bucket) -> None:
        descent(bucket, bucket.scatter(bucket.exchange.decode()).sign_())
