"""The mean of rounded messages, rounded again on its way back; nothing is kept of what is lost."""

from typing import Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel, sum_in_order
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.exchange.scaled_sign import ROW, ScaledExchange, Spans
from dlion.wire import ScaledInt8, Wire


class RoundedMean(DirectSend):
    """The mean of float32 values in one wire both ways, added in float32."""

    def __init__(
        self, channel: Channel, numel: int, wire: Wire, **buffers: Unpack[Buffers]
    ) -> None:
        super().__init__(channel, numel, wire, lambda _: wire, **buffers)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        total = sum_in_order(self.up.decode(messages, self.slice))
        answer.copy_(self.down.encode(total / len(messages)))

    def decode(self) -> Tensor:
        return self.down.decode(self.answer, self.slice).flatten()


class ScaledInt8Mean(ScaledExchange):
    """The mean of whole multiples, -127 to 127, of a scale for each piece; the answer is, too.

    The scale is ``max|v| / 127``, and ``v / scale`` is rounded to nearest, halves to even.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, spans, ScaledInt8, ScaledInt8, **buffers)

    def encode(self, local: int, values: Tensor) -> None:
        for index, row in enumerate(values.view(-1, self.slice)):
            self.pack(row, index, self._messages[local, index])

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index = self.channel.workers.ids[owner]
        self.pack(self.mean_of(messages, index), index, answer)

    def pack(self, values: Tensor, index: int, message: Tensor) -> None:
        """Write values of the slice ``index``, float32 ``[slice]``, 0 in padding."""
        rows = values.view(-1, ROW)
        largest = torch.segment_reduce(
            rows.abs().amax(1), "max", lengths=self._rows[index], unsafe=True, initial=0
        )
        scales = largest / 127
        by_row = self.by_row(scales, index)
        numbers = (rows / by_row).where(by_row > 0, 0).round_()
        message.copy_(self.up.encode((scales, numbers.to(torch.int8).flatten())))

    def unpack(self, message: Tensor, index: int) -> Tensor:
        scales, numbers = self.up.decode(message, self.slice)
        return (numbers.view(-1, ROW) * self.by_row(scales, index)).flatten()
