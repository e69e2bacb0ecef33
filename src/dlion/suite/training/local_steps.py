"""Local steps of SGD before each exchange, under any rule and wire.

A worker starts at the common parameters x and takes H steps of SGD to x_H. What it then sends as
its gradient is ``(x - x_H) / (lr H)``, federated averaging's pseudo-gradient (McMahan et al. 2017,
arXiv 1602.05629; Reddi et al. 2021, arXiv 2003.00295), which is the mean gradient of its path.
Gradients must be of the loss divided by H. They accumulate, so messages leave during the last
backward pass as they always do. Other inner optimizers are those of :class:`dlion.DiLoCo`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class LocalSteps:
    """The path of a worker within a step.

    Args:
        model: its trainable parameters move.
        steps: H, 1: nothing moves.
        lr: learning rate of the local steps.

    Attributes:
        state_bytes: of the copy of the common parameters.
    """

    def __init__(self, model: nn.Module, steps: int, lr: float):
        self.steps, self.lr = steps, lr
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._params = trainable if steps > 1 else []
        self._common = [p.detach().clone() for p in self._params]
        self.state_bytes = sum(common.nbytes for common in self._common)

    @contextmanager
    def path(self) -> Iterator[None]:
        """Start at the common parameters, and return to them at the end."""
        with torch.no_grad():
            for param, common in zip(self._params, self._common, strict=True):
                common.copy_(param)
        yield
        with torch.no_grad():
            for param, common in zip(self._params, self._common, strict=True):
                param.copy_(common)

    @torch.no_grad()
    def move(self) -> None:
        """Take a step by the gradients accumulated so far."""
        for param, common in zip(self._params, self._common, strict=True):
            if param.grad is not None:
                param.copy_(common.sub(param.grad, alpha=self.lr * self.steps))
