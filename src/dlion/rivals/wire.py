"""Wires of entries: places and values."""

from typing import Literal

import torch
from torch import Tensor

from dlion.wire import BFloat16, Float32, Level, Wire

ValueBits = Literal[2, 16, 32]


class Sparse(Wire):
    """Entries ``(index, value)``: int32 and float32 side by side, 64 bits an entry.

    ``numel`` counts entries here, and a message is a pair: the indices and the values, ``[m]``.
    """

    bits, group = 64, 1

    def nbytes(self, numel: int) -> int:
        return 8 * numel

    def encode(self, values: tuple[Tensor, Tensor]) -> Tensor:
        indices, numbers = values
        pairs = torch.stack(
            [indices.to(torch.int32), numbers.to(torch.float32).view(torch.int32)], dim=-1
        )
        return pairs.view(torch.uint8).flatten()

    def decode(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        pairs = packed.contiguous().view(torch.int32).view(numel, 2)
        return pairs[:, 0].to(torch.int64), pairs[:, 1].contiguous().view(torch.float32)


class TopK(Wire):
    """So many entries of each chunk of values: indices in ``ceil(log2(chunk))`` bits, and values.

    ``numel`` counts chunks here, and a message is a pair: the indices, int64 and ascending, and the
    values, float32, both ``[chunks, k]``. A chunk of which all is sent has no indices. A value is
    written in 32 bits as it is, in 16 as bfloat16, or in 2: its sign, and whether it is larger than
    the mean size of its chunk's entries. What those two sizes are, the mean of the entries at or
    below and the mean of those above, goes with each chunk as two numbers in bfloat16.

    Args:
        chunk: values of a chunk.
        k: entries of each that are sent, at most ``chunk``.
        value_bits: 2, 16 or 32.
    """

    group = 1

    def __init__(self, chunk: int, k: int, value_bits: ValueBits):
        self.chunk, self.k, self.value_bits = chunk, k, value_bits
        self._indices = Level(chunk) if k < chunk else None
        self._numbers = Float32() if value_bits == 32 else BFloat16()
        self._codes = Level(4)
        self.bits = value_bits + (self._indices.bits if self._indices else 0)

    def nbytes(self, numel: int) -> int:
        return sum(self._sizes(numel))

    def encode(self, values: tuple[Tensor, Tensor]) -> Tensor:
        indices, numbers = values
        parts = []
        if self.value_bits == 2:
            numbers, codes = _in_two_sizes(numbers)
            parts.append(self._codes.encode(codes.flatten()))
        if self._indices:
            parts.append(self._indices.encode(indices.flatten()))
        return torch.cat([self._numbers.encode(numbers).flatten(), *parts])

    def decode(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head, codes, planes = packed.split(self._sizes(numel))
        indices = torch.arange(self.chunk, device=packed.device).expand(numel, -1)
        if self._indices:
            indices = self._indices.decode(planes, numel * self.k).view(numel, self.k).long()
        width = 2 if self.value_bits == 2 else self.k
        numbers = self._numbers.decode(head.clone(), numel * width).view(numel, width)  # aligned
        if self.value_bits == 2:
            code = self._codes.decode(codes, numel * self.k).view(numel, self.k).long()
            numbers = numbers.gather(1, code & 1) * (1 - (code & 2))
        return indices, numbers

    def _sizes(self, numel: int) -> list[int]:
        """Bytes of the numbers, of the codes of 2 bits, and of the indices."""
        count, codes = numel * self.k, 0
        numbers = count * self.value_bits // 8
        if self.value_bits == 2:
            numbers, codes = 4 * numel, self._codes.nbytes(count)
        return [numbers, codes, self._indices.nbytes(count) if self._indices else 0]


def _in_two_sizes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sizes of each chunk, ``[chunks, 2]``, and codes of 2 bits, ``[chunks, k]``."""
    sizes = numbers.abs().to(torch.float64)
    large = sizes > sizes.mean(1, keepdim=True)
    means = [
        (sizes * part).sum(1) / part.sum(1).clamp(min=1)  # of no entries, 0
        for part in (~large, large)
    ]
    return torch.stack(means, 1), 2 * (numbers < 0).int() + large
