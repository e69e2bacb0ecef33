"""A small regression: a model, its samples, its loss, and a plain loop; and matrices alone."""

import torch


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7))


def samples(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 20, generator=generator), torch.randn(64, 7, generator=generator)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> torch.Tensor:
    device = next(model.parameters()).device
    for t in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, *(part.to(device) for part in samples(t))).backward()
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# some alike, which are multiplied as a batch, or too small for it
SHAPES = (20, 33), (40, 6), (9, 9), (33, 20), (9, 9), (20, 33)


def matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
