"""What workers must not share although they share a process and a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dlion.exchange import Channel, sum_in_order
from dlion.streams import stream_seed
from dlion.workers import Workers


class VirtualWorkers:
    """Hands the model to one local worker after the other.

    Each worker has its own buffers (BatchNorm's running statistics), which are swapped in. The
    model's random draws (dropout) come from a stream of the worker and the step.
    """

    def __init__(self, model: nn.Module, workers: Workers, seed: int):
        self.workers, self.seed = workers, seed
        self._buffers = list(model.buffers())
        self._saved = [[b.clone() for b in self._buffers] for _ in workers.ids]

    @contextmanager
    def hosting(self, i: int, step: int) -> Iterator[None]:
        """Let the model be that of local worker i, for its forward and backward passes."""
        seed = stream_seed(self.seed, "model", self.workers.ids[i], step)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a traceback: 0.8 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        for buffer, saved in zip(self._buffers, self._saved[i], strict=True):
            buffer.copy_(saved)
        yield
        for buffer, saved in zip(self._buffers, self._saved[i], strict=True):
            saved.copy_(buffer)

    def state(self, i: int) -> dict[str, torch.Tensor]:
        """Return the buffers of local worker i, as views by name."""
        return {f"buffer.{index}": saved for index, saved in enumerate(self._saved[i])}

    def load_mean_buffers(self, channel: Channel) -> None:
        """Give the model the mean of all workers' buffers; integers are those of worker 0."""
        for buffer, *local in zip(self._buffers, *self._saved, strict=True):
            everyone = channel.gather(torch.stack(local))
            if buffer.is_floating_point():
                buffer.copy_(sum_in_order(everyone) / len(everyone))
            else:
                buffer.copy_(everyone[0])


class LocalSteps:
    """Gradient accumulation along a worker's own path of SGD.

    With H local steps a worker starts at the common parameters x, takes H - 1 steps of SGD at the
    rate ``lr`` and sends the mean of the H gradients along that path, ``(x - x_H) / (lr H)``. This
    is federated averaging's pseudo-gradient (McMahan et al. 2017, arXiv 1602.05629; Reddi et al.
    2021, arXiv 2003.00295), here under any rule and wire. Gradients must be of the loss divided by
    H.
    """

    def __init__(self, model: nn.Module, steps: int, lr: float):
        self.steps, self.lr = steps, lr
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._params = trainable if steps > 1 else []  # without local steps nothing moves
        self._common = [p.detach().clone() for p in self._params]

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
        """Set the parameters to where the gradients so far, summed in ``.grad``, lead from x."""
        for param, common in zip(self._params, self._common, strict=True):
            if param.grad is not None:
                param.copy_(common.sub(param.grad, alpha=self.lr * self.steps))
