"""Steps of its own that a worker takes between two exchanges."""

import torch
from torch import nn


class LocalSteps:
    """Gradient accumulation along a worker's own path of SGD.

    With H local steps a worker starts at the common parameters x, takes H - 1 steps of SGD at the
    rate ``lr`` and says the mean of the H gradients it met, ``(x - x_H) / (lr H)``: federated
    averaging's pseudo-gradient (McMahan et al. 2017, arXiv 1602.05629; Reddi et al. 2021, arXiv
    2003.00295), here under any rule and wire. Its gradients must be of the loss divided by H.
    """

    def __init__(self, model: nn.Module, steps: int, lr: float):
        self.steps, self.lr = steps, lr
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._params] if steps > 1 else []

    @torch.no_grad()
    def begin(self) -> None:
        """A worker sets out from the common parameters."""
        if self.steps > 1:
            torch._foreach_copy_(self._start, self._params)

    @torch.no_grad()
    def move(self) -> None:
        """Take all its steps so far again, from the start: the gradients of all are added up."""
        if self.steps > 1:
            for param, start in zip(self._params, self._start, strict=True):
                if param.grad is not None:
                    param.copy_(start.sub(param.grad, alpha=self.lr * self.steps))

    @torch.no_grad()
    def end(self) -> None:
        """Back to the common parameters."""
        if self.steps > 1:
            torch._foreach_copy_(self._params, self._start)
