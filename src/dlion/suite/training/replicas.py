"""Checks that all processes hold the same parameters."""

import hashlib

import torch
from torch import nn

from dlion.errors import TrainingFailed
from dlion.exchange import Channel


def parameters_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for _, param in sorted(model.named_parameters()):
        data = param.detach().cpu().contiguous().flatten()
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model: nn.Module, channel: Channel, step: int) -> None:
    """Compare the parameters of all processes.

    Raises:
        TrainingFailed: naming the first process that differs from process 0.
    """
    digest = torch.frombuffer(bytearray.fromhex(parameters_sha256(model)), dtype=torch.uint8)
    local = channel.workers.local
    digests = channel.gather(digest.repeat(local, 1))[::local]
    different = [rank for rank, row in enumerate(digests) if not torch.equal(row, digests[0])]
    if different:
        raise TrainingFailed(
            f"after step {step} process {different[0]} holds other parameters than process 0"
            f" ({len(different)} of {len(digests)} processes differ): replicas have drifted apart"
        )
