"""SignMuon: one bit of an orthogonalised momentum, voted on or averaged."""

from collections.abc import Iterable
from typing import Any, Literal, Unpack

from torch import Tensor

from dlion.core.bucket import Bucket, Names
from dlion.exchange import MeanWire
from dlion.extensions.momentum_sync import Every, MomentumSync
from dlion.kernels.reference import lion_direction
from dlion.methods.dlion import SignVoteOptimizer, Voting
from dlion.methods.momentum import nesterov_direction
from dlion.methods.muon import (
    RMS,
    Coefficients,
    MatricesApart,
    NewtonSchulz,
    Precision,
    bucket_orthogonalise,
    matrix_descent,
    rms_scale,
)
from dlion.methods.updates import variance_descent, vote_descent
from dlion.values import Betas, Depth, Name, NotNegative, Probability

Rest = Literal["lion", "adamw"]

LION_SHARE = 0.1  # of AdamW's rate


class SignMuon(MatricesApart, SignVoteOptimizer):
    """SignMuon: workers orthogonalise their own momenta and send one bit per parameter.

    Matrices, worker i: ``m_i <- mu m_i + (1 - mu) g_i``, ``d_i = sign(NS(mu m_i + (1 - mu) g_i))``
    with the Newton-Schulz iteration NS of :class:`GMuon`. Everyone:
    ``x <- (1 - lr wd) x - 0.2 lr D`` with ``D = sign(sum d_i)`` (``mavo``) or ``D = sum d_i / n``
    (``avg``). With ``local_polar`` the step is ``0.2 lr sqrt(max(R, C)) NS(D)`` for R rows and C
    columns. NS makes entries similar in size, so a sign loses little of them.

    The rest (vectors, embeddings, heads) with ``rest=lion``: as :class:`DLion`, at a tenth of the
    rate: ``x <- (1 - lr wd) x - 0.1 lr D``. With ``rest=adamw``, for ``avg``:
    ``m_i <- b1 m_i + (1 - b1) g_i``, ``d_i = sign(m_i)``, ``v <- b2 v + (1 - b2) D D``,
    ``x <- (1 - lr wd) x - lr D / (sqrt(v / (1 - b2^t)) + 1e-8)``: AdamW whose first moment is D.

    Matrices are found as by :class:`GMuon`; sign(0) and ``ties`` are those of :class:`DLion`.
    Source: SignMuon (Mishra et al. 2026, arXiv 2605.16311), which votes, with an optional local
    polar step. Only its abstract was available. ``avg``, both treatments of the rest and
    ``momentum_sync`` are not in it. Such a step may ascend even on a linear function (Smirnova and
    Kravatskiy 2026, arXiv 2607.29674, abstract); of the placements of the sign that they compare it
    is the best in experiments all the same.

    Memory: 4 bytes of state a parameter, 8 of the rest with ``rest=adamw``.

    When not to use it: where workers see other classes, with ``momentum_sync=0``. A sign of an
    orthogonalised momentum forgets how large a worker's gradient is. Averages of the momenta every
    20 steps put it back, for 2.8 bits more a parameter and step in float32 and 0.7 in int8 (8
    workers): on digits 89 % instead of 77 at alpha 0.1 (searched, five seeds, results/unlike_data).
    But an average has no limit for a Byzantine worker, as a vote has. Text by source file costs it
    0.014 nats (4 workers, five seeds, results/unlike_text). Where computation is scarce, as every
    worker runs Newton-Schulz. With ``local_polar`` all processes also orthogonalise D by
    themselves, and get the same bits on one kind of machine with one number of threads only.

    Args:
        lr: learning rate of matrices, about that of :class:`GMuon`.
        momentum: mu, of matrices.
        betas: of the rest: Lion's or AdamW's.
        weight_decay: decoupled and not voted on.
        local_polar: orthogonalise the answer before the step.
        rest: the optimizer of the rest: lion, or for avg adamw.
        ns_steps: Newton-Schulz iterations.
        ns_precision: auto, bf16 or float32, of Newton-Schulz, as for :class:`GMuon`.
        ns_coefficients: quintic or polar_express, as for :class:`GMuon`.
        adamw_names: a regular expression: matrices whose name contains it are of the rest. Without
            ``use_muon`` it takes the place of the usual names of embeddings and heads.
        momentum_sync: steps between averages of the momenta of all workers; 0: never; exponential
            and floored: at growing intervals, as for :class:`LionCub`.
        sync_wire: what momenta and their mean are rounded to on their way; int8 has a scale for
            each parameter tensor of a slice.
    """

    shared_state = ["exp_avg_sq"]
    counters = ["step"]
    needs_full_matrices = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.95,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        local_polar: bool = False,
        rest: Rest = "lion",
        ns_steps: Depth = 5,
        ns_precision: Precision = "auto",
        ns_coefficients: Coefficients = "quintic",
        adamw_names: Name | None = None,
        momentum_sync: Every = 0,
        sync_wire: MeanWire = "float32",
        **options: Unpack[Voting],
    ):
        if rest == "adamw" and options.get("aggregation") != "avg":
            raise ValueError("rest=adamw needs aggregation=avg: a vote has no second moment")
        self.local_polar, self.rest = local_polar, rest
        self.momentum_sync, self.sync_wire = momentum_sync, sync_wire
        if momentum_sync:
            sync = MomentumSync(momentum_sync, wire=sync_wire)
            options["extensions"] = [*options.get("extensions", ()), sync]
        self.newton_schulz = NewtonSchulz(ns_steps, ns_precision, ns_coefficients)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "use_muon": None,
        }
        super().__init__(params, defaults=defaults, adamw_names=adamw_names, **options)

    def state_names(self, bucket: Bucket) -> Any:
        return self if self._is_adamw(bucket) else Names(own_state=["momentum"])

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        """``NS(mu m + (1 - mu) g)`` of matrices; Lion's of the rest, or its momentum."""
        momentum, direction = bucket.own["momentum"][local], bucket.gradients()
        if bucket.kind:
            direction = nesterov_direction(bucket, momentum, direction)
            return bucket_orthogonalise(bucket, direction, self.newton_schulz)
        for segment in bucket.segments("betas"):
            ((beta1, beta2),), (m, u) = segment.values, segment.of(momentum, direction)
            u.copy_(lion_direction(m, u, beta1, beta1 if self.rest == "adamw" else beta2))
        return direction

    def update(self, bucket: Bucket) -> None:
        if self._is_adamw(bucket):
            variance_descent(bucket, bucket.exchange.decode())
        elif bucket.kind and self.local_polar:
            polar = bucket_orthogonalise(bucket, bucket.exchange.decode(), self.newton_schulz)
            matrix_descent(bucket, polar, rms_scale)
        else:
            vote_descent(bucket, RMS if bucket.kind else LION_SHARE)

    def _is_adamw(self, bucket: Bucket) -> bool:
        return self.rest == "adamw" and not bucket.kind
