"""The mean of scaled signs with error feedback: a message's residual is sent later.

A message about a slice is the sign of each value and a scale for each piece, the mean of its
values' sizes; a piece is what lies in the slice of one parameter tensor. An owner adds what
its answer leaves out to the next one (error feedback); of messages to owners the method does so.
"""

from typing import Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.exchange.scaled import ScaledSigns, Spans


class ScaledSignMean(DirectSend):
    """The mean of scaled signs, itself sent as scaled signs with error feedback.

    The owner of a slice keeps what its answers have left out, 4 bytes for each parameter it owns.
    Source: Zheng et al. 2019 (arXiv 1905.10936), with pieces as blocks.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        n, k = channel.workers.count, channel.workers.local
        self._codec = codec = ScaledSigns(numel, n, spans, buffers.get("device", "cpu"))
        super().__init__(channel, numel, codec.wire, lambda _: codec.wire, **buffers)
        self.state["error"] = torch.zeros(k, self.slice, dtype=torch.float32, device=self.device)

    def encode(self, local: int, values: Tensor) -> Tensor:
        """Write the message of a local worker; return its decoded value: float32 ``[numel]``."""
        said = torch.empty_like(values)
        rows = zip(values.view(-1, self.slice), said.view(-1, self.slice), strict=True)
        for index, (row, says) in enumerate(rows):
            self._codec.encode(row, index, self._messages[local, index], out=says)
        return said

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index, error = self.channel.workers.ids[owner], self.state["error"][owner]
        error += self._codec.mean(messages, index)
        error -= self._codec.encode(error, index, answer)

    def decode(self) -> Tensor:
        return self._codec.decode_all(self.answer)
