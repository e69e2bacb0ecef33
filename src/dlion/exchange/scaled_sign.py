"""Scaled signs with a memory: what a message leaves out is not lost but sent later.

A message about a slice is the sign of each value and a scale for each piece, the mean of its
values' sizes; a piece is what lies in the slice of one parameter tensor. Whoever writes a message
keeps the difference to what it stands for, in one of two ways: it adds what is left of a vector to
the next one (error feedback), or it sends no vector but its difference to an estimate that the
receiver keeps as well (EF21).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel, sums_of_rows
from dlion.exchange.direct_send import Buffers, DenseMean, DirectSend
from dlion.wire import ScaledSign, Sign, Wire

Spans = list[tuple[int, int]]
ROW = 64  # values; slices and tensors start at multiples, so that each row is of one piece


class ScaledExchange(DirectSend):
    """Messages of values and a scale for each piece.

    All messages carry as many scales as the slice with most pieces has: 4 bytes each.

    Args:
        spans: ``(start, stop)`` of the parameter tensors in ``numel``, ascending from 0, each
            starting at a multiple of 64, the rest is padding; None: it is one tensor.
        up, down: make the wires of messages and answers, given the number of scales.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None,
        up: Callable[[int], Wire],
        down: Callable[[int], Wire],
        **buffers: Unpack[Buffers],
    ) -> None:
        n, spans = channel.workers.count, spans or [(0, numel)]
        sizes = _sizes_of_pieces(spans, -(-numel // (n * ROW)) * ROW, n)
        messages, answers = (make(sizes.shape[1]) for make in (up, down))
        super().__init__(channel, numel, messages, lambda _: answers, **buffers)
        self._sizes = sizes.clamp(min=1).to(self.device)
        rows = (sizes + ROW - 1) // ROW
        rows[:, -1] += self.slice // ROW - rows.sum(1)  # those of padding alone
        self._rows = rows.to(self.device)
        starts = [*(start for start, _ in spans[1:]), self.numel]
        ends = zip((stop for _, stop in spans), starts, strict=True)
        # also where tensors are made on the meta device
        padding = torch.cat([torch.arange(*gap, device="cpu") for gap in ends])
        counts = (padding // self.slice).bincount(minlength=n)
        self._padding = (padding % self.slice).to(self.device).split(counts.tolist())

    @abstractmethod
    def unpack(self, message: Tensor, index: int) -> Tensor:
        """Return what a message about the slice ``index`` stands for: float32 ``[slice]``."""

    def decode(self) -> Tensor:
        answers = enumerate(self.answer)
        return torch.cat([self.unpack(answer, index) for index, answer in answers])

    def mean_of(self, messages: Tensor, index: int) -> Tensor:
        """Return the mean of what messages about the slice ``index`` stand for."""
        total = torch.zeros(self.slice, dtype=torch.float32, device=self.device)
        for message in messages:
            total += self.unpack(message, index)
        return total.div_(len(messages))

    def by_row(self, scales: Tensor, index: int) -> Tensor:
        """Return the scale of each row of 64 values in the slice ``index``, ``[rows, 1]``."""
        rows = scales.repeat_interleave(self._rows[index], output_size=self.slice // ROW)
        return rows.unsqueeze(1)


class ScaledSignExchange(ScaledExchange):
    """Messages of scaled signs; padding counts in no scale and stands for 0."""

    up: ScaledSign

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None,
        down: Callable[[int], Wire],
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, spans, ScaledSign, down, **buffers)

    def pack(self, values: Tensor, index: int, message: Tensor) -> Tensor:
        """Write values of the slice ``index`` as scaled signs, and return what these stand for.

        Args:
            values: float32 ``[slice]``, 0 in padding. The sign of 0 is +1, as one bit has no zero.
            message: uint8, to be written.
        """
        sums = sums_of_rows(values.view(-1, ROW))
        sums = torch.segment_reduce(sums, "sum", lengths=self._rows[index], unsafe=True, initial=0)
        scales, signs = (sums / self._sizes[index]).to(torch.float32), values >= 0
        message.copy_(self.up.encode((scales, signs)))
        return self._expand(scales, signs, index)

    def unpack(self, message: Tensor, index: int) -> Tensor:
        return self._expand(*self.up.decode(message, self.slice), index)

    def _expand(self, scales: Tensor, signs: Tensor, index: int) -> Tensor:
        values = signs.view(-1, ROW).to(torch.float32).mul_(2).sub_(1)
        values.mul_(self.by_row(scales, index))
        return values.flatten().index_fill_(0, self._padding[index], 0)


class ScaledSignMean(ScaledSignExchange):
    """The mean of scaled signs, itself sent as scaled signs; error feedback both ways.

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
        super().__init__(channel, numel, spans, ScaledSign, **buffers)
        self.state["error"] = torch.zeros(
            channel.workers.local, self.slice, dtype=torch.float32, device=self.device
        )

    def encode(self, local: int, values: Tensor) -> None:
        """Write the message of a local worker, and leave in ``values`` what it does not say."""
        for index, row in enumerate(values.view(-1, self.slice)):
            row -= self.pack(row, index, self._messages[local, index])

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index, error = self.channel.workers.ids[owner], self.state["error"][owner]
        error += self.mean_of(messages, index)
        error -= self.pack(error, index, answer)


class WarmedUpSignMean(ScaledSignMean):
    """The mean of float32 values in the first ``warmup`` runs, of scaled signs in the later ones.

    Attributes:
        exact: whether the latest answer is of float32 values.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        spans: Spans | None = None,
        warmup: int = 0,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, spans, **buffers)
        self.warmup, self.exact, self._buffers = warmup, False, buffers
        # in main memory: it is asked at every step
        self.state["runs"] = torch.zeros(channel.workers.local, 1, dtype=torch.int64, device="cpu")
        self._dense: DenseMean | None = None

    @property
    def warming_up(self) -> bool:
        """Whether the next messages are of float32 values."""
        return int(self.state["runs"][0]) < self.warmup

    @property
    def dense(self) -> DenseMean:
        """The exchange of the first runs; it has no memory in the later ones."""
        if self._dense is None:
            self._dense = DenseMean(self.channel, self.numel, **self._buffers)
        return self._dense

    def encode(self, local: int, values: Tensor) -> None:
        """Write a local worker's message; of signs, leave in ``values`` what it does not say."""
        if self.warming_up:
            self.dense.encode(local, values)
        else:
            super().encode(local, values)

    def encode_header(self, local: int, header: Tensor) -> None:
        if self.warming_up:
            self.dense.encode_header(local, header)
        else:
            super().encode_header(local, header)

    def run(self, step: int) -> None:
        self.exact = self.warming_up
        if self.exact:
            self.dense.run(step)
            self.headers, self.answer = self.dense.headers, self.dense.answer
        else:
            self._dense = None
            super().run(step)
        self.state["runs"] += 1

    def decode(self) -> Tensor:
        return self.dense.decode() if self.exact else super().decode()


class TrackingVote(ScaledSignExchange):
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
        super().__init__(channel, numel, spans, lambda _: Sign(), **buffers)
        k, device = channel.workers.local, self.device
        self.state["estimate"] = torch.zeros(k, self.numel, dtype=torch.float32, device=device)
        self.state["sum"] = torch.zeros(k, self.slice, dtype=torch.float32, device=device)
        shape = k, self.down.nbytes(self.slice)
        self.state["previous"] = torch.full(shape, 255, dtype=torch.uint8, device=device)

    def encode(self, local: int, values: Tensor) -> None:
        """Write how a local worker's vector, ``[numel]``, differs from its estimate; move that."""
        estimates = self.state["estimate"][local].view(-1, self.slice)
        for index, row in enumerate(values.view(-1, self.slice)):
            difference = row - estimates[index]
            estimates[index] += self.pack(difference, index, self._messages[local, index])

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        index, total = self.channel.workers.ids[owner], self.state["sum"][owner]
        for message in messages:
            total += self.unpack(message, index)
        previous = self.state["previous"][owner]
        zero = self.down.encode(total == 0)
        previous ^= zero
        previous &= zero
        previous |= self.down.encode(total > 0)
        answer.copy_(previous)

    def decode(self) -> Tensor:
        return self.down.decode(self.answer, self.slice).flatten().to(torch.float32).mul_(2).sub_(1)


def _sizes_of_pieces(spans: Spans, size: int, slices: int) -> Tensor:
    """Return how many values each piece has, ``[slices, pieces]``; 0 for those there are not.

    Args:
        spans: ``(start, stop)`` of the parameter tensors.
        size: values of a slice.
        slices: their number.
    """
    pieces: list[list[int]] = [[] for _ in range(slices)]
    for start, stop in spans:
        for index in range(start // size, -(-stop // size)):
            pieces[index].append(min(stop, (index + 1) * size) - max(start, index * size))
    most = max(1, *map(len, pieces))
    return torch.tensor([row + [0] * (most - len(row)) for row in pieces], device="cpu")
