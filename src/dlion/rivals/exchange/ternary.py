"""The mean of stochastic ternary messages, with a scale that the workers agree on."""

from typing import Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DirectSend, Exchange
from dlion.rivals import kernels
from dlion.streams import stream
from dlion.transfer import keep_for_this_stream
from dlion.wire import Level, Ternary


class TernaryMean(DirectSend):
    """The mean of ``{-1, 0, 1}``: 1.6 bits up, the sum in ``ceil(log2(2 n + 1))`` bits down."""

    def __init__(
        self,
        channel: Channel,
        numel: int,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, Ternary(), lambda n: Level(2 * n + 1), **buffers)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        n, trits = len(messages), self.up.decode(messages, self.slice)
        total = torch.full_like(trits[0], n, dtype=torch.int8 if n < 64 else torch.int32)
        for row in trits:
            total += row
        answer.copy_(self.down.encode(total))

    def decode(self) -> Tensor:
        n = self.senders
        sums = self.down.decode(self.answer, self.slice)
        return sums.sub_(n).to(torch.float32).div_(n).flatten()


class ScaledTernaryMean(Exchange):
    """The mean of float32 values, ternarised by a scale that all workers share.

    Before messages travel the workers agree on the largest scale of each parameter tensor, 4 bytes
    a tensor and worker, absent workers included. The mean is unbiased: s times that of the trits.
    Source: scaler sharing of Wen et al. 2017 (arXiv 1705.07878), section 4.

    Args:
        sizes: elements of each of T parameter tensors in ``numel``, gaps included.
        seed, index: name, with worker and step, the stream of each message's coins.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        sizes: list[int],
        seed: int = 0,
        index: int = 0,
        **buffers: Unpack[Buffers],
    ) -> None:
        self._trits = TernaryMean(channel, numel, **buffers)
        super().__init__(channel, self._trits.numel, **buffers)
        self.seed, self.index = seed, index
        padding = self.numel - sum(sizes)
        self._sizes = [*sizes[:-1], sizes[-1] + padding]
        self._unscaled: dict[int, tuple[Tensor, Tensor]] = {}

    def encode(self, local: int, values: tuple[Tensor, Tensor]) -> None:
        """Keep a local worker's message, ``[numel]``, and its scale of each tensor, ``[T]``."""
        self._unscaled[local] = values

    def encode_header(self, local: int, header: Tensor) -> None:
        self._trits.encode_header(local, header)

    def run(self, step: int) -> None:
        w = self.channel.workers
        own = torch.zeros(w.local, len(self._sizes), dtype=torch.float32, device=self.device)
        for local, (values, scales) in self._unscaled.items():
            keep_for_this_stream(values, scales)
            own[local] = scales
        largest = self.channel.gather(own).nan_to_num(0.0).amax(0)
        parts = zip(largest, self._sizes, strict=True)
        self._scales = torch.cat([scale.expand(size) for scale, size in parts])
        for local, (values, _) in self._unscaled.items():
            names = ("terngrad", w.ids[local], self.index, step)
            draws = stream(self.seed, *names, device=values.device)
            coins = torch.rand(
                values.shape, generator=draws, dtype=torch.float32, device=values.device
            )
            self._trits.encode(local, kernels.ternarise(values, self._scales, coins))
        self._unscaled.clear()
        self._trits.run(step)
        self.headers, self.answer = self._trits.headers, self._trits.answer

    def decode(self) -> Tensor:
        keep_for_this_stream(self._scales)
        return self._trits.decode().mul_(self._scales)
