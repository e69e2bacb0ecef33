"""Handling of gradients that are NaN or infinite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.header import not_finite
from dlion.transfer import download


def measure(buckets: Sequence[Bucket], local: int) -> None:
    """Take the norms of a local worker's gradients along, for the headers of its messages."""
    for bucket in buckets:
        bucket.flight.norms[local] = bucket.norms()


def leave_out(buckets: Sequence[Bucket], whole: bool) -> list[str]:
    """Drop gradients that are not finite; return the names of theirs. The host waits once.

    Args:
        whole: drop all parts of a tensor that FSDP2 has sharded, if one is not finite.
    """
    found = []
    flags = [~bucket.norms().isfinite() for bucket in buckets]
    if whole:
        pairs = zip(buckets, flags, strict=True)
        flags = [bucket.whole.anywhere(broken) for bucket, broken in pairs]
    for bucket, here in zip(buckets, download(flags), strict=True):
        for slot, name, broken in zip(bucket.slots, bucket.names, here.tolist(), strict=True):
            if broken:
                slot.tensor.grad = None
                found.append(name)
    return found


def refuse(buckets: Sequence[Bucket], local: int) -> None:
    """Raise TrainingFailed for a measured gradient that is not finite. The host waits once."""
    norms = download([bucket.flight.norms[local] for bucket in buckets])
    for bucket, here in zip(buckets, norms, strict=True):
        broken = (~here.isfinite()).nonzero()
        if len(broken):
            worker = bucket.exchange.channel.workers.ids[local]
            raise not_finite(bucket.names[int(broken[0])], f"worker {worker}", bucket.step)


def overflowed(optimizer: Any) -> bool:
    """Whether a GradScaler found an overflow on any worker; if not, unscale the gradients."""
    if optimizer._step.elastic is not None:
        raise RuntimeError("a GradScaler does not work with manager=: train in bfloat16")
    if optimizer.overlap or optimizer.workers.local > 1:
        raise RuntimeError(
            "under a GradScaler messages must not be made of scaled gradients: create the"
            " optimizer with overlap=False and one worker a process"
        )
    mine = optimizer.found_inf.view(1) != 0
    if optimizer.node is not None:
        mine = optimizer.node.any(mine)
    if optimizer.channel.gather(mine[None]).any():
        return True
    if optimizer.grad_scale is not None:
        grads = [tensor.grad for tensor in optimizer.params if tensor.grad is not None]
        _unscale(grads, optimizer.grad_scale)
    return False


@torch.no_grad()
def _unscale(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Divide gradients by the scale of a GradScaler, without the host knowing it."""
    factor = scale.double().reciprocal().float()
    for device in {grad.device for grad in grads}:
        here = [grad for grad in grads if grad.device == device]
        torch._foreach_mul_(here, factor.to(device))
