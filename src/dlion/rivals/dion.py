"""Dion: orthonormal factors of low rank for matrices, AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any, Literal, Unpack

from dlion.core.bucket import Bucket, Names
from dlion.core.optimizer import Common
from dlion.exchange import Exchange
from dlion.methods.muon import BesideAdamW, matrix_descent, rms_scale
from dlion.rivals.powersgd import low_rank_mean
from dlion.streams import stream_seed
from dlion.values import Betas, Name, NotNegative, PositiveShare, Probability


class Dion(BesideAdamW):
    """Dion: a step of power iteration on the workers' momenta, whose factors are orthonormalised.

    Matrices, worker i: ``M_i <- M_i + g_i``, sends ``P_i = M_i Q``, gets the mean P of all and
    makes its columns orthonormal (P^), sends ``R_i = M_i^T P^``, gets the mean R, and keeps
    ``M_i <- M_i - (1 - mu) P^ R^T``. Everyone: Q is R with columns of norm 1, the start of the next
    step, and ``x <- (1 - lr wd) x - lr s P^ Q^T``. The rank is ``rank_fraction`` of the smaller
    side, rounded up. The rest: AdamW on the mean gradient, as in :class:`GMuon`, which also says
    how matrices are found.
    What workers keep of their own cancels out: a step depends on the mean gradient alone, and
    settings hold for any number of workers at one global batch.
    Source: Ahn et al. 2025 (arXiv 2504.05295), with mu 0.95, and their code
    (github.com/microsoft/dion), which by now prefers a successor. Differences:

    - s is that of :class:`GMuon`, ``0.2 sqrt(max(R, C))``, for a rate like AdamW's: a step has the
      RMS ``0.2 sqrt(rank_fraction)``. Theirs is ``sqrt(R / C)`` (``original``), with 0.01.
    - QR is Householder's; theirs is a randomised Cholesky QR where a matrix is tall.
    - Their code transposes wide matrices, and averages the gradients of matrices that are not
      larger than P and R together.

    Memory: 4 bytes of state a parameter of a matrix and 4 r / rows (Q), 8 of the others.

    When not to use it: where a step waits for latency, as it has two rounds. In models whose
    embeddings and heads are large: they are sent in float32, and at a fraction of 1/16 they are
    most of what is sent. As every process computes P^ by itself, all need the same kind of machine
    and number of threads. Matrices are read in the order of memory: a channels_last layout permutes
    columns, and a permuted tensor may be another matrix.

    Args:
        lr: learning rate, with ``match_rms_adamw`` about AdamW's.
        momentum: mu; ``1 - mu`` of what was sent leaves the momentum.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled.
        rank_fraction: the rank, as a share of the smaller side of a matrix.
        adjust_lr: s, the scale of a matrix.
        adamw_names: a regular expression: matrices whose name contains it are AdamW's. Without
            ``use_muon`` it takes the place of the usual names of embeddings and heads.
        seed: of the first Q, which is the same on all workers.
    """

    matrix_state = Names(own_state=["momentum"])

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.95,
        betas: Betas = (0.9, 0.95),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 1e-2,
        rank_fraction: PositiveShare = 0.25,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_names: Name | None = None,
        **common: Unpack[Common],
    ):
        self.rank_fraction, self.adjust_lr = rank_fraction, adjust_lr
        super().__init__(params, lr, momentum, betas, eps, weight_decay, adamw_names, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """The values of both rounds, and the gradients of the rest, in float32."""
        slots = [slot for bucket in self.buckets for slot in bucket.full.slots]
        parameters = sum(slot.stop - slot.start for slot in slots)
        values = sum(self._values(bucket) for bucket in self.buckets)
        bits = 32 * values / max(1, parameters)
        return bits, bits

    def _values(self, bucket: Bucket) -> int:
        if bucket.kind:
            return bucket.exchange.values
        return sum(slot.stop - slot.start for slot in bucket.full.slots)

    def make_exchange(self, bucket: Bucket) -> Exchange:
        if not bucket.kind:
            return super().make_exchange(bucket)
        seed = stream_seed(self.seed, "dion", bucket.index)
        return low_rank_mean(self.channel, bucket, self._rank, seed, unit=True)

    def _rank(self, rows: int, columns: int) -> int:
        return math.ceil(self.rank_fraction * min(rows, columns))

    def encode(self, bucket: Bucket, local: int) -> None:
        if not bucket.kind:
            super().encode(bucket, local)
            return
        momentum = bucket.own["momentum"][local]
        momentum += bucket.gradients()
        bucket.exchange.encode(local, bucket.full.gather(momentum))

    def update(self, bucket: Bucket) -> None:
        if not bucket.kind:
            super().update(bucket)
            return
        sent, momenta = bucket.scatter(bucket.exchange.product()), bucket.own["momentum"]
        with bucket.preserve_missing(bucket.anywhere, momenta):
            for local in self.channel.local_participants:
                for segment in bucket.segments("momentum"):
                    momenta[local, segment.part].sub_(
                        sent[segment.part], alpha=1 - segment.values[0]
                    )
        scale = rms_scale if self.adjust_lr == "match_rms_adamw" else _aspect
        matrix_descent(bucket, bucket.scatter(bucket.exchange.decode()), scale)


def _aspect(rows: int, columns: int) -> float:
    return math.sqrt(rows / columns)
