"""Replicas of a model: made equal at the start, and compared on the way."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlion.errors import TrainingFailed
from dlion.transfer import download


def replicate(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all processes the parameters and buffers of the group's first process.

    DistributedDataParallel does so too. It also sends process 0's buffers before each forward
    pass: call this for the statistics of BatchNorm before saving or evaluating, or better, on a
    GPU, take ``nn.SyncBatchNorm.convert_sync_batchnorm(model)``, whose statistics are of all
    samples.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel():
                values = tensor.detach().contiguous()
                dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
                tensor.copy_(values)


def check_replicas(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare the parameters of all processes: a hash of each tensor, 8 bytes, is exchanged.

    Call it on all processes after every n-th step. With DiLoCo and SparseLoCo call
    ``optimizer.host(None)`` before, as workers differ between exchanges.

    Raises:
        TrainingFailed: on all processes, naming parameters that have drifted apart.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.numel()]
    hashes = torch.stack([_hash(tensor) for _, tensor in named])
    rows = [torch.empty_like(hashes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, hashes, group=group)
    (alike,) = download([torch.stack([row == rows[0] for row in rows]).all(0)])
    apart = [name for (name, _), same in zip(named, alike.tolist(), strict=True) if not same]
    if apart:
        shown = ", ".join(apart[:5]) + (f" and {len(apart) - 5} more" if len(apart) > 5 else "")
        raise TrainingFailed(
            f"parameters differ between processes: {shown}. Give each to an optimizer of dlion"
            " (GAdamW(rest) in place of AdamW(rest)), and call replicate(model) at the start"
        )


def _hash(tensor: Tensor) -> Tensor:
    return torch.hash_tensor(tensor.detach()).view(torch.int64)
