"""State that workers keep apart although they share a process and a model."""

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
