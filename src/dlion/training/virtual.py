"""What virtual workers must not share although they share a process and a model."""

import torch
from torch import nn

from dlion.exchange import Channel
from dlion.streams import stream_seed
from dlion.workers import Workers


class VirtualWorkers:
    """Hands the model to one local worker after the other.

    Buffers (BatchNorm's running statistics) are kept for each worker and swapped in. Random draws
    of the model (dropout) come from a stream of the worker and the step.
    """

    def __init__(self, model: nn.Module, workers: Workers, seed: int):
        self.workers, self.seed = workers, seed
        self._buffers = list(model.buffers())
        self._kept = [[b.clone() for b in self._buffers] for _ in workers.ids]

    def enter(self, i: int, step: int) -> None:
        """Before the forward pass of local worker i."""
        seed = stream_seed(self.seed, "model", self.workers.ids[i], step)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a traceback: 0.8 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        self._load(self._kept[i])

    def leave(self, i: int) -> None:
        """After the backward pass of local worker i."""
        for kept, buffer in zip(self._kept[i], self._buffers, strict=True):
            kept.copy_(buffer)

    def state(self, i: int) -> dict[str, torch.Tensor]:
        """The buffers of local worker i, as they are kept."""
        return {f"buffer.{place}": kept for place, kept in enumerate(self._kept[i])}

    def load_mean_buffers(self, channel: Channel) -> None:
        """For evaluation: the mean over all workers, in their order; integers are worker 0's."""
        for place, buffer in enumerate(self._buffers):
            rows = torch.stack([kept[place].flatten() for kept in self._kept])
            everyone = channel.gather(rows.view(torch.uint8)).view(rows.dtype)
            total = everyone[0].clone()
            if buffer.is_floating_point():
                for row in everyone[1:]:
                    total += row
                total /= len(everyone)
            buffer.copy_(total.view(buffer.shape))

    def _load(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)
