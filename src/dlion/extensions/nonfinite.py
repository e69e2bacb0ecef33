"""Gradients that are NaN or infinite: training stops on all workers, or they are left out."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dlion.checks import warn
from dlion.core.bucket import Bucket
from dlion.core.header import Headers
from dlion.errors import TrainingFailed
from dlion.extensions.protocol import Extension
from dlion.transfer import download

_SKIPPED = (
    "the gradient of {} is not finite in step {}: nonfinite=skip leaves it out, and will leave out"
    " others without a word (optimizer.skipped counts them)"
)


class Nonfinite(Extension):
    """Looks at the norm of every gradient.

    Args:
        way: ``stop`` says in the headers which gradient is not finite, and all processes raise
            TrainingFailed; ``skip`` drops it, as if the worker had none.
    """

    def __init__(self, way: Literal["stop", "skip"]):
        self._way = way
        self._norms: dict[tuple[Bucket, int], Tensor] = {}  # of a worker's gradients, ``[T]``
        self._skipping: set[int] = set()  # workers that leave out a gradient in this step

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        if self._way == "skip":
            self._leave_out(buckets, local)
            return
        for bucket in buckets:
            self._norms[bucket, local] = norms(bucket)
        if self.optimizer.moves_alone:  # no header will stop the others first
            self._refuse(buckets, local)

    def _leave_out(self, buckets: Sequence[Bucket], local: int) -> None:
        """Drop gradients that are not finite. The host waits once."""
        found = []
        flags = [~norms(bucket).isfinite() for bucket in buckets]
        if self.optimizer.needs_full_matrices:
            pairs = zip(buckets, flags, strict=True)
            flags = [bucket.full.anywhere(broken) for bucket, broken in pairs]
        for bucket, here in zip(buckets, download(flags), strict=True):
            for slot, name, broken in zip(bucket.slots, bucket.names, here.tolist(), strict=True):
                if broken:
                    slot.tensor.grad = None
                    found.append(name)
        if found and not (self._skipping or self.optimizer.skipped):
            warn(_SKIPPED.format(found[0], buckets[0].step + 1))
        if found:
            self._skipping.add(local)

    def _refuse(self, buckets: Sequence[Bucket], local: int) -> None:
        """Raise TrainingFailed for a gradient that is not finite. The host waits once."""
        found = download([self._norms[bucket, local] for bucket in buckets])
        for bucket, here in zip(buckets, found, strict=True):
            broken = (~here.isfinite()).nonzero()
            if len(broken):
                worker = self.optimizer.workers.ids[local]
                raise _not_finite(bucket, int(broken[0]), f"worker {worker}")

    def veto(self, bucket: Bucket, local: int) -> Tensor | None:
        found = self._norms.pop((bucket, local), None)
        return None if found is None else found < torch.inf

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        for sender, broken in zip(senders, headers.vetoed, strict=True):
            if broken is not None:
                raise _not_finite(bucket, broken, sender)

    def after_step(self, counts: bool) -> None:
        if counts:
            self.optimizer.skipped += len(self._skipping)
        self._skipping.clear()
        self._norms.clear()


def norms(bucket: Bucket) -> Tensor:
    """Return the norm of each gradient, float32 ``[T]``, 0 where there is none."""
    grads, precision = bucket.raw_grads(), torch.promote_types(bucket.dtype, torch.float32)
    present = [grad for grad in grads if grad is not None]
    found = torch._foreach_norm(present, dtype=precision) if present else ()
    if len(present) < len(grads):
        rest, zero = iter(found), bucket.params.new_zeros((), dtype=precision)
        found = [zero if grad is None else next(rest) for grad in grads]
    return torch.stack(found).to(torch.float32)


def _not_finite(bucket: Bucket, index: int, whose: str) -> TrainingFailed:
    return TrainingFailed(
        f"the gradient of {bucket.names[index]} is not finite on {whose} in step"
        f" {bucket.step + 1}: lower the learning rate, or leave such gradients out with"
        " nonfinite=skip"
    )
