"""SparseLoCo: workers take local steps and send the largest entries of their displacements."""

from collections.abc import Iterable
from typing import Any, Unpack

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common
from dlion.methods.local import InnerOptimizer, LocalUpdate
from dlion.rivals.exchange.topk import TopKMean, bits_each_way, blocks_of
from dlion.rivals.wire import ValueBits
from dlion.values import Betas, Count, NotNegative, Share


class SparseLoCo(LocalUpdate):
    """DiLoCo whose displacements are sparse, in place of an outer momentum.

    Worker i takes H inner steps from x to x_i; ``e_i <- decay e_i + (x - x_i)``; the ``topk``
    largest entries of each chunk of e_i are sent with their places, each value in ``value_bits``,
    as q_i, and ``e_i <- e_i - q_i``. Everyone: ``x <- x - outer_lr mean q_i``, at a constant rate.
    Source: Sarfi et al. 2025 (arXiv 2508.15706), with AdamW inside, H from 15 to 250, decay 0.95, 1
    to 3 % of the entries in 2 bits and an outer rate of 1; and their code
    (github.com/tplr-ai/templar), with 64 of 4,096 entries and H = 30, the defaults here.
    Differences:

    - Chunks are ``chunk`` values of a flat tensor or fewer, as equal as can be; theirs are tiles of
      64 by 64, of divisors of the dimensions. A chunk of no more than ``topk`` values is sent
      whole, without places.
    - The mean is over all workers; theirs is over those that sent that entry.
    - 2 bits are a sign and one of two sizes, the means of the small and of the large entries of a
      chunk, so that no entry changes its sign; theirs are four bins of 1.5 standard deviations
      around a tensor's mean, each read as the mean of its entries.
    - What decays is in units of displacements; theirs of these times the outer rate.

    Memory: 12 bytes of state a parameter (its own and the shared parameters, e) and that of the
    inner optimizer: 8 with adamw, 4 with lion and for muon's matrices, 0 with sgd.

    When not to use it: where :class:`DiLoCo` is not to be used. With many workers, as everyone
    sends its message to n - 1 and receives as many, at the usual settings 0.0076 (n - 1) bits a
    parameter and step each way, which for n = 9 and more is more than DiLoCo takes with signs. In
    short trainings: an entry that is not among the largest waits for many rounds, and decays.

    Args:
        lr: of the inner optimizer, scheduled as always.
        inner: the optimizer that each worker takes its own steps with, without momentum for sgd.
            Muon is for the matrices that :class:`GMuon` chooses.
        betas: of adamw and lion; the first is the momentum of muon.
        weight_decay: of the inner optimizer, decoupled.
        local_steps: inner steps of each worker between two exchanges.
        outer_lr: rate of the outer step, not scheduled.
        decay: of what was held back, in each round.
        chunk: values of the largest chunk.
        topk: entries that are sent of each chunk.
        value_bits: of an entry on the wire: 32, 16 (bfloat16) or 2.
    """

    own_state = ["residual"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-3,
        inner: InnerOptimizer = "adamw",
        betas: Betas = (0.9, 0.999),
        weight_decay: NotNegative = 0.0,
        local_steps: Count = 30,
        outer_lr: NotNegative = 1.0,
        decay: Share = 0.95,
        chunk: Count = 4096,
        topk: Count = 64,
        value_bits: ValueBits = 2,
        **common: Unpack[Common],
    ):
        self.chunk, self.topk, self.value_bits = chunk, topk, value_bits
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "outer_lr": outer_lr,
            "decay": decay,
        }
        super().__init__(params, defaults, inner, local_steps, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """Bits of whole chunks a step, sent to each and received from n - 1 workers."""
        sizes = self.chunk, self.topk, self.value_bits
        up, down = bits_each_way(*sizes, self.workers.count)
        return up / self.local_steps, down / self.local_steps

    def make_exchange(self, bucket: Bucket) -> TopKMean:
        spans = ((start, stop - start) for start, stop in bucket.spans if stop > start)
        blocks = [block for span in spans for block in blocks_of(*span, self.chunk)]
        settings = self.topk, self.value_bits
        return TopKMean(self.channel, bucket.numel, blocks, *settings, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        residual = bucket.own["residual"][local]
        for segment in bucket.segments("decay"):
            residual[segment.part] *= segment.values[0]
        residual += self.displacement(bucket, local)
        residual -= bucket.exchange.encode(local, residual)

    def update(self, bucket: Bucket) -> None:
        outer, answer = bucket.shared["outer"], bucket.exchange.decode()
        for segment in bucket.segments("outer_lr"):
            kernels.descend(outer[segment.part], answer[segment.part], segment.values[0], 0.0)
