"""The mean of rounded messages, rounded again on its way back, without error feedback."""

from typing import Literal, Unpack

from torch import Tensor

from dlion.exchange.channel import Channel, sum_in_order
from dlion.exchange.direct_send import Buffers, DenseMean, DirectSend
from dlion.exchange.scaled import ScaledBytes, Spans
from dlion.wire import BFloat16, Wire

MeanWire = Literal["float32", "bf16", "int8"]
MEAN_WIRES: dict[str, int] = {"float32": 32, "bf16": 16, "int8": 8}  # bits


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


class ScaledInt8Mean(DirectSend):
    """The mean of bytes with a scale for each piece; the answer is of such bytes, too."""

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        device = buffers.get("device", "cpu")
        self._codec = codec = ScaledBytes(numel, channel.workers.count, spans, device)
        super().__init__(channel, numel, codec.wire, lambda _: codec.wire, **buffers)

    def encode(self, local: int, values: Tensor) -> None:
        for index, row in enumerate(values.view(-1, self.slice)):
            self._codec.encode(row, index, self._messages[local, index])

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index = self.channel.workers.ids[owner]
        self._codec.encode(self._codec.mean(messages, index), index, answer)

    def decode(self) -> Tensor:
        return self._codec.decode_all(self.answer)


def make_mean(
    wire: MeanWire, channel: Channel, numel: int, spans: Spans, **buffers: Unpack[Buffers]
) -> DirectSend:
    """Make the exchange of a mean in a wire; ``spans`` are the pieces that int8 scales apart."""
    match wire:
        case "float32":
            return DenseMean(channel, numel, **buffers)
        case "bf16":
            return RoundedMean(channel, numel, BFloat16(), **buffers)
        case "int8":
            return ScaledInt8Mean(channel, numel, spans, **buffers)
