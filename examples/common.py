"""What the examples for frameworks train, and what DistributedDataParallel would send for it."""

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def make_data(size: int = 4096) -> TensorDataset:
    """The class of a point is the largest of its first four coordinates."""
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def report(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Print the accuracy and what a worker sent in a step, on process 0."""
    x, y = make_data().tensors
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    n, parameters = dist.get_world_size(), sum(p.numel() for p in model.parameters())
    ring = 4 * parameters * 2 * (n - 1) / n
    if dist.get_rank() == 0:
        sent = optimizer.channel.traffic.sent_bytes / steps
        print(f"accuracy {accuracy:.1%}, {sent:,.0f} bytes sent a step; DDP: {ring:,.0f}")
