"""The sign of a sum of vectors that scaled signs of their changes tell (EF21)."""

from typing import Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.exchange.scaled import ScaledSigns, Spans
from dlion.exchange.vote import signs_of
from dlion.wire import Sign


class TrackingVote(DirectSend):
    """The sign of a sum of vectors that their owner estimates; it follows them by scaled signs.

    Worker i keeps the estimate h_i of its vector and sends the scaled signs of the difference,
    which both ends add: ``q = mean|u_i - h_i| sign(u_i - h_i)``, ``h_i <- h_i + q``, the means
    over pieces. The owner keeps the sum of the estimates of all workers, in which an absent
    worker's stays, and answers with its sign in one bit. For a sum of exactly 0 that is the
    opposite of its answer before, so that what nobody moves goes back and forth.

    The sum is rounded by itself, so it is that of the workers' estimates up to the rounding of the
    largest so far. It takes 4 bytes a parameter on each worker, and for each parameter it owns 4
    bytes and a bit.
    Source: Richtarik et al. 2021 (arXiv 2106.05203), for the way up.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        n, k = channel.workers.count, channel.workers.local
        self._codec = ScaledSigns(numel, n, spans, buffers.get("device", "cpu"))
        super().__init__(channel, numel, self._codec.wire, lambda _: Sign(), **buffers)
        device = self.device
        self.state["estimate"] = torch.zeros(k, self.numel, dtype=torch.float32, device=device)
        self.state["sum"] = torch.zeros(k, self.slice, dtype=torch.float32, device=device)
        shape = k, self.down.nbytes(self.slice)
        self.state["previous"] = torch.full(shape, 255, dtype=torch.uint8, device=device)

    def encode(self, local: int, values: Tensor) -> None:
        """Write how a local worker's vector, ``[numel]``, differs from its estimate; move that."""
        estimates = self.state["estimate"][local].view(-1, self.slice)
        for index, row in enumerate(values.view(-1, self.slice)):
            difference = row - estimates[index]
            estimates[index] += self._codec.encode(difference, index, self._messages[local, index])

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index, total = self.channel.workers.ids[owner], self.state["sum"][owner]
        for message in messages:
            total += self._codec.decode(message, index)
        previous = self.state["previous"][owner]
        zero = self.down.encode(total == 0)
        previous ^= zero
        previous &= zero
        previous |= self.down.encode(total > 0)
        answer.copy_(previous)

    def decode(self) -> Tensor:
        return signs_of(self)
