"""A small regression: a model, its samples, its loss, and a plain loop."""

import torch


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7))


def samples(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 20, generator=generator), torch.randn(64, 7, generator=generator)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, *samples(t)).backward()
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
