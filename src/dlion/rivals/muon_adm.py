"""Muon by adaptive delta modulation: one bit each way, orthogonalised by the owner of a matrix."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.layout import ALIGNMENT, Member, lay_out, local_part
from dlion.core.optimizer import Common
from dlion.exchange import DeltaVote, PolarDeltaVote
from dlion.extensions.shards import ShardedBucket, deal
from dlion.methods.adm import DeltaVoteOptimizer
from dlion.methods.matrices import tensors_of
from dlion.methods.momentum import lion_direction, nesterov_direction
from dlion.methods.muon import (
    RMS,
    Coefficients,
    MatricesApart,
    NewtonSchulz,
    Precision,
    orthogonalise_to,
)
from dlion.methods.sign_muon import LION_SHARE
from dlion.methods.updates import vote_descent
from dlion.values import Betas, Depth, Limits, Name, NotNegative, Probability


class OwnedBucket(Bucket):
    """Parameters that lie each in one of the equal slices, so that one worker owns it whole."""

    in_one = True

    def lay_out(self, members: Sequence[Member], workers: int) -> None:
        members, starts, numel = dealt(members, workers)
        super().lay_out(members, workers)
        self.slots, _ = lay_out(members, starts)
        self.numel = numel


def dealt(members: Sequence[Member], owners: int) -> tuple[list[Member], list[int], int]:
    """Order members so that each lies in one of the equal slices of so many owners.

    Returns them, where each starts, and the elements of all slices.
    """
    sizes = [-(-local_part(m.tensor).numel() // ALIGNMENT) * ALIGNMENT for m in members]
    parts = deal(sizes, owners)
    length = max(sum(sizes[index] for index in part) for part in parts)
    starts = [
        owner * length + start
        for owner, part in enumerate(parts)
        for start in itertools.accumulate((sizes[index] for index in part[:-1]), initial=0)
        if part
    ]
    return [members[index] for part in parts for index in part], starts, owners * length


class MuonADM(MatricesApart, DeltaVoteOptimizer):
    """Muon whose momenta are followed by adaptive delta modulation: for non-i.i.d. data.

    Matrices, worker i: ``m_i <- mu m_i + (1 - mu) g_i``, ``u_i = mu m_i + (1 - mu) g_i``, whose
    estimate h_i a bit moves as in :class:`DLionADM`. Each matrix has one owner, which keeps the sum
    H of its estimates and answers in one bit ``D = sign(NS(H + lookahead * change of H))`` with the
    Newton-Schulz iteration NS of :class:`GMuon`; where that is 0 its previous answer. Everyone:
    ``x <- (1 - lr wd) x - 0.2 lr D``. The rest (vectors, embeddings, heads): as :class:`DLionADM`,
    at a tenth of the rate.

    Source: no publication of this method is known; the coder is that of :class:`DLionADM`.

    The polar step comes after the sum, so large gradients of one worker count for more than small
    ones of another, and is computed once. :class:`SignMuon` takes it before the sum, which is
    better on i.i.d. data and loses where workers see other classes. Matrices are found as by
    :class:`GMuon`.

    Memory: as :class:`DLionADM`, of slices that hold whole matrices: where matrices do not fill
    the n slices evenly, padding is kept and sent. With fewer matrices than workers that is most.

    When not to use it: with more workers than matrices; on i.i.d. data, where :class:`SignMuon`
    learns faster; on parameters that FSDP2 has sharded, which it refuses. All matrices are in one
    bucket, so little is sent during a backward pass. With ``nonfinite=None`` the estimate of an
    entry that was not finite once grows for ever, and takes the polar step of its matrix along.

    Args:
        lr: learning rate of matrices, about that of :class:`GMuon`.
        momentum: mu, of matrices.
        betas: of Lion, for the rest.
        weight_decay: decoupled and not voted on.
        rise: as for :class:`DLionADM`.
        lookahead: as for :class:`DLionADM`.
        ns_steps: Newton-Schulz iterations.
        ns_precision: auto, bf16 or float32, of Newton-Schulz, as for :class:`GMuon`.
        ns_coefficients: quintic or polar_express, as for :class:`GMuon`.
        adamw_names: a regular expression: matrices whose name contains it are of the rest. Without
            ``use_muon`` it takes the place of the usual names of embeddings and heads.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.95,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        rise: Annotated[int, Limits(ge=1, le=32)] = 3,
        lookahead: NotNegative = 0.5,
        ns_steps: Depth = 5,
        ns_precision: Precision = "auto",
        ns_coefficients: Coefficients = "quintic",
        adamw_names: Name | None = None,
        **common: Unpack[Common],
    ):
        self.rise, self.lookahead = rise, lookahead
        self.newton_schulz = NewtonSchulz(ns_steps, ns_precision, ns_coefficients)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "use_muon": None,
        }
        super().__init__(params, defaults=defaults, adamw_names=adamw_names, **common)

    def bucket_of(self, member: Member) -> type[Bucket]:
        whole = self.kind(member) is not None and self.bucket_type is Bucket
        return OwnedBucket if whole else super().bucket_of(member)

    def make_exchange(self, bucket: Bucket) -> DeltaVote:
        if not bucket.kind:
            return super().make_exchange(bucket)
        if isinstance(bucket, ShardedBucket):
            raise ValueError(
                "MuonADM needs owners of whole matrices, and FSDP has sharded these: choose"
                " SignMuon"
            )

        # which hold neither of the two
        slots, matrices, newton_schulz = bucket.slots, bucket.kind, self.newton_schulz

        def polar(indices: list[int], flat: list[Tensor]) -> list[Tensor]:
            alone = [
                slots[index]._replace(start=0, stop=len(values))
                for index, values in zip(indices, flat, strict=True)
            ]
            answers = [torch.empty_like(values) for values in flat]
            targets, tensors = (tensors_of(alone, each, matrices) for each in (answers, flat))
            orthogonalise_to(targets, tensors, newton_schulz)
            return answers

        return PolarDeltaVote(
            self.channel,
            bucket.numel,
            bucket.sizes,
            self.rise,
            self.lookahead,
            bucket.spans,
            polar,
            **bucket.buffers,
        )

    def direction(self, bucket: Bucket, local: int) -> Tensor:
        if not bucket.kind:
            return lion_direction(bucket, local)
        return nesterov_direction(bucket, bucket.own["momentum"][local], bucket.gradients())

    def update(self, bucket: Bucket) -> None:
        vote_descent(bucket, RMS if bucket.kind else LION_SHARE)
