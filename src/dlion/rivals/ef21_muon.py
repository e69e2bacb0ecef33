"""EF21-Muon: Muon on tracked momenta, of whose changes the largest entries are sent."""

import math
from collections.abc import Iterable
from typing import Any, Unpack

from dlion.core.bucket import Bucket, Names
from dlion.core.optimizer import Common
from dlion.exchange import Exchange
from dlion.methods.muon import (
    BesideAdamW,
    Coefficients,
    NewtonSchulz,
    Precision,
    bucket_orthogonalise,
    matrix_descent,
    rms_scale,
)
from dlion.rivals.exchange.topk import Block, TopKMean, bits_each_way
from dlion.rivals.wire import ValueBits
from dlion.values import Betas, Depth, Name, NotNegative, PositiveShare, Probability


class EF21Muon(BesideAdamW):
    """EF21-Muon: Muon on the mean of estimates that follow the workers' momenta.

    Matrices, worker i: ``m_i <- mu m_i + (1 - mu) g_i``, sends the ``density`` largest entries
    ``r_i`` of ``m_i - h_i``, ``h_i <- h_i + r_i``. Everyone: ``H <- H + sum r_i / n``,
    ``x <- (1 - lr wd) x - 0.2 lr sqrt(max(R, C)) NS(H)`` with the Newton-Schulz iteration NS and
    the scale of :class:`GMuon`. The rest: AdamW on the mean gradient, as in :class:`GMuon`, which
    also says how matrices are found.
    Source: Gruntkowska et al. 2025 (arXiv 2510.00643). Only its abstract and summaries were
    available. Differences:

    - Their server compresses the model's changes for the way back. Here workers send to all others
      and everyone computes the same step, so nothing is lost on the way back.
    - They compare compressors, of the largest entries and of low rank, also with values rounded to
      powers of two. Here values are bfloat16, and the density is ours.
    - Their estimates begin at a gradient, here at zero.

    Memory: 12 bytes of state a parameter of a matrix (momentum, estimate, mean of estimates), 8 of
    the others.

    When not to use it: with many workers, as everyone sends its message to n - 1 others. An entry
    costs its value and its place, ``value_bits + ceil(log2(size of the matrix))`` bits. With
    ``nonfinite=None`` a NaN spoils estimates for ever.

    Args:
        lr: learning rate, about AdamW's.
        momentum: mu.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled.
        density: share of the entries of a matrix that are sent.
        value_bits: of an entry on the wire, as for :class:`DeMo`. What rounding leaves out is sent
            later.
        ns_steps: Newton-Schulz iterations.
        ns_precision: auto, bf16 or float32, of Newton-Schulz, as for :class:`GMuon`.
        ns_coefficients: quintic or polar_express, as for :class:`GMuon`.
        adamw_names: a regular expression: matrices whose name contains it are AdamW's. Without
            ``use_muon`` it takes the place of the usual names of embeddings and heads.
    """

    matrix_state = Names(own_state=["momentum", "estimate"], shared_state=["tracked"])

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.95,
        betas: Betas = (0.9, 0.95),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 2e-2,
        density: PositiveShare = 0.15,
        value_bits: ValueBits = 16,
        ns_steps: Depth = 5,
        ns_precision: Precision = "auto",
        ns_coefficients: Coefficients = "quintic",
        adamw_names: Name | None = None,
        **common: Unpack[Common],
    ):
        self.density, self.value_bits = density, value_bits
        self.newton_schulz = NewtonSchulz(ns_steps, ns_precision, ns_coefficients)
        super().__init__(params, lr, momentum, betas, eps, weight_decay, adamw_names, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """Bits of entries and places, sent to each and received from n - 1, and of the rest."""
        sent = received = parameters = 0.0
        for bucket in self.buckets:
            for slot in bucket.full.slots:
                size, up, down = slot.stop - slot.start, 32.0, 32.0
                if bucket.kind:
                    k = self._count(size)
                    up, down = bits_each_way(size, k, self.value_bits, self.workers.count)
                sent, received = sent + up * size, received + down * size
                parameters += size
        return sent / max(1, parameters), received / max(1, parameters)

    def _count(self, size: int) -> int:
        return math.ceil(self.density * size)

    def make_exchange(self, bucket: Bucket) -> Exchange:
        if not bucket.kind:
            return super().make_exchange(bucket)
        whole = bucket.full
        blocks = [Block(slot.start, 1, slot.stop - slot.start) for slot in whole.slots]
        bits, buffers = self.value_bits, bucket.buffers
        return TopKMean(self.channel, whole.numel, blocks, self._count, bits, **buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        if not bucket.kind:
            super().encode(bucket, local)
            return
        momentum, gradients = bucket.own["momentum"][local], bucket.gradients()
        for segment in bucket.segments("momentum"):
            momentum[segment.part].lerp_(gradients[segment.part], 1 - segment.values[0])
        change = momentum - bucket.own["estimate"][local]
        bucket.exchange.encode(local, bucket.full.gather(change))

    def update(self, bucket: Bucket) -> None:
        if not bucket.kind:
            super().update(bucket)
            return
        exchange, estimates = bucket.exchange, bucket.own["estimate"]
        answer = exchange.decode()
        # also where this worker had no gradient: what was sent counts
        with bucket.preserve_missing(bucket.anywhere, estimates):
            for local in self.channel.local_participants:
                estimates[local] += bucket.scatter(exchange.sent(local))
        # the mean of all estimates: those of absent workers stay
        tracked = bucket.shared["tracked"]
        tracked += bucket.scatter(answer * (exchange.senders / self.workers.count))
        polar = bucket_orthogonalise(bucket, tracked, self.newton_schulz)
        matrix_descent(bucket, polar, rms_scale)
