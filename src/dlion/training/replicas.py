"""All workers must hold the same parameters; a hash tells."""

import hashlib

import torch
from torch import nn

from dlion.errors import TrainingFailed
from dlion.exchange import Channel


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for _, param in sorted(model.named_parameters()):
        data = param.detach().cpu().contiguous().flatten()
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model: nn.Module, channel: Channel, step: int) -> None:
    """Compare the parameters of all processes.

    Raises:
        TrainingFailed: naming the processes that differ from process 0.
    """
    own = torch.frombuffer(bytearray.fromhex(parameters_sha256(model)), dtype=torch.uint8)
    device = next(model.parameters()).device
    rows = own.repeat(channel.workers.local, 1).to(device)
    everyone = channel.gather(rows)[:: channel.workers.local].cpu()
    different = [p for p, row in enumerate(everyone) if not torch.equal(row, everyone[0])]
    if different:
        raise TrainingFailed(
            f"after step {step} process {different[0]} holds other parameters than process 0"
            f" ({len(different)} of {len(everyone)} processes differ): replicas have drifted apart"
        )
