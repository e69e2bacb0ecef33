"""Values of a slice and a scale for each piece, the part of a parameter tensor in the slice."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from dlion.exchange.channel import sums_of_rows
from dlion.exchange.direct_send import slice_size
from dlion.wire import ScaledInt8, ScaledSign

Spans = list[tuple[int, int]]
ROW = 64  # values; slices and tensors start at multiples, so that each row is of one piece


class ScaledCodec(ABC):
    """Writes and reads messages about slices; padding counts in no scale and stands for 0.

    All messages carry as many scales as the slice with most pieces has: 4 bytes each.

    Args:
        numel: number of parameters, which n ``workers`` own a slice each of.
        spans: ``(start, stop)`` of the parameter tensors in ``numel``, ascending from 0, each
            starting at a multiple of 64, the rest is padding; None: it is one tensor.

    Attributes:
        wire: of a message.
    """

    kind: ClassVar[type[ScaledSign | ScaledInt8]]

    def __init__(
        self, numel: int, workers: int, spans: Spans | None, device: torch.device | str = "cpu"
    ) -> None:
        spans = spans or [(0, numel)]
        self.slice = slice_size(numel, workers, ROW)
        sizes = _sizes_of_pieces(spans, self.slice, workers)
        self.wire = self.kind(sizes.shape[1])
        self._sizes = sizes.clamp(min=1).to(device)
        rows = (sizes + ROW - 1) // ROW
        rows[:, -1] += self.slice // ROW - rows.sum(1)  # those of padding alone
        self._rows = rows.to(device)
        starts = [*(start for start, _ in spans[1:]), workers * self.slice]
        ends = zip((stop for _, stop in spans), starts, strict=True)
        # also where tensors are made on the meta device
        padding = torch.cat([torch.arange(*gap, device="cpu") for gap in ends])
        counts = (padding // self.slice).bincount(minlength=workers)
        self._padding = (padding % self.slice).to(device).split(counts.tolist())

    @abstractmethod
    def decode(self, message: Tensor, index: int) -> Tensor:
        """Return the decoded message about the slice ``index``: float32 ``[slice]``."""

    def decode_all(self, messages: Iterable[Tensor]) -> Tensor:
        """Return the decoded messages about all slices, one each: float32 ``[numel]``."""
        return torch.cat([self.decode(message, index) for index, message in enumerate(messages)])

    def mean(self, messages: Tensor, index: int) -> Tensor:
        """Return the mean of decoded messages about the slice ``index``: float32 ``[slice]``."""
        total = torch.zeros(self.slice, dtype=torch.float32, device=messages.device)
        for message in messages:
            total += self.decode(message, index)
        return total.div_(len(messages))

    def _by_row(self, scales: Tensor, index: int) -> Tensor:
        """Return the scale of each row of 64 values in the slice ``index``, ``[rows, 1]``."""
        rows = scales.repeat_interleave(self._rows[index], output_size=self.slice // ROW)
        return rows.unsqueeze(1)

    def _reduce(self, rows: Tensor, index: int, how: str) -> Tensor:
        """Reduce one number of each row to one of each piece, ``[scales]``."""
        return torch.segment_reduce(rows, how, lengths=self._rows[index], unsafe=True, initial=0)


class ScaledSigns(ScaledCodec):
    """Signs, and the mean size of each piece; the sign of 0 is +1, as one bit has no zero."""

    kind = ScaledSign

    def encode(
        self, values: Tensor, index: int, message: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Write a message about the slice ``index``, and return its decoded value.

        Args:
            values: float32 ``[slice]``, 0 in padding.
            message: uint8, to be written.
            out: where to put what it says, float32 ``[slice]``; None: a new tensor.
        """
        sums = self._reduce(sums_of_rows(values.view(-1, ROW)), index, "sum")
        scales, signs = (sums / self._sizes[index]).to(torch.float32), values >= 0
        message.copy_(self.wire.encode((scales, signs)))
        return self._expand(scales, signs, index, torch.empty_like(values) if out is None else out)

    def decode(self, message: Tensor, index: int) -> Tensor:
        scales, signs = self.wire.decode(message, self.slice)
        return self._expand(scales, signs, index, torch.empty_like(signs, dtype=torch.float32))

    def _expand(self, scales: Tensor, signs: Tensor, index: int, out: Tensor) -> Tensor:
        out.copy_(signs).mul_(2).sub_(1)
        out.view(-1, ROW).mul_(self._by_row(scales, index))
        return out.index_fill_(0, self._padding[index], 0)


class ScaledBytes(ScaledCodec):
    """Whole multiples, -127 to 127, of a scale: ``max|v| / 127`` of each piece.

    ``v / scale`` is rounded to nearest, halves to even.
    """

    kind = ScaledInt8

    def encode(self, values: Tensor, index: int, message: Tensor) -> None:
        """Write a message about the slice ``index``: float32 ``[slice]``, 0 in padding."""
        rows = values.view(-1, ROW)
        scales = self._reduce(rows.abs().amax(1), index, "max") / 127
        by_row = self._by_row(scales, index)
        numbers = (rows / by_row).where(by_row > 0, 0).round_()
        message.copy_(self.wire.encode((scales, numbers.to(torch.int8).flatten())))

    def decode(self, message: Tensor, index: int) -> Tensor:
        scales, numbers = self.wire.decode(message, self.slice)
        return (numbers.view(-1, ROW) * self._by_row(scales, index)).flatten()


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
