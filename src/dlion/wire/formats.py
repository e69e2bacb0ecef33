"""Wires: how a message is written as bytes, and how many bytes that is.

Every wire writes any number of values, of any leading shape, and reads back exactly what was
written. ``nbytes`` is a promise that the tests hold ``encode`` to.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dlion.wire import packing

ValueBits = Literal[2, 16, 32]
VALUE_BITS = get_args(ValueBits)


class Wire(ABC):
    """One format of messages, usually of a tensor of values.

    Attributes:
        bits: bits per value.
        group: this many values fill a whole number of 64-bit words; exchanges cut messages at
            multiples of it, so that slices stay aligned.
    """

    bits: float
    group: int

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes that ``numel`` values take."""

    @abstractmethod
    def encode(self, values: Any) -> Tensor:
        """Values ``[..., m]`` -> uint8 ``[..., nbytes(m)]``."""

    @abstractmethod
    def decode(self, packed: Tensor, numel: int) -> Any:
        """uint8 ``[..., nbytes(numel)]`` -> values ``[..., numel]``."""

    def view(self, packed: Tensor) -> Tensor:
        """Return the words that kernels read and write, in the memory of a packed message."""
        return packed


class Float32(Wire):
    """IEEE single precision as it is: NaN payloads, infinities and -0.0 survive."""

    bits, group = 32, 2

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.float32).contiguous().view(torch.uint8)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packed.contiguous().view(torch.float32)

    def view(self, packed: Tensor) -> Tensor:
        """uint8 ``[..., 4 m]`` -> float32 ``[..., m]``."""
        return packed.view(torch.float32)


class BFloat16(Wire):
    """The upper half of IEEE single precision, rounded to nearest even."""

    bits, group = 16, 4

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packed.contiguous().view(torch.bfloat16).to(torch.float32)


class Level(Wire):
    """Integers ``0 .. levels - 1`` in ``ceil(log2(levels))`` bits each, as bit planes."""

    bits: int
    group = 64

    def __init__(self, levels: int):
        if levels < 2:
            raise ValueError(f"a level wire needs at least 2 levels, not {levels}")
        self.levels = levels
        self.bits = (levels - 1).bit_length()

    def nbytes(self, numel: int) -> int:
        return self.bits * -(-numel // 8)

    def encode(self, values: Tensor) -> Tensor:
        return packing.pack_planes(values, self.bits).flatten(-2)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packing.unpack_planes(packed.unflatten(-1, (self.bits, -1)), numel)

    def view(self, packed: Tensor) -> Tensor:
        """uint8 ``[..., bits * 8 * words]`` -> planes, int64 ``[..., bits, words]``."""
        return packed.view(torch.int64).unflatten(-1, (self.bits, -1))


class Sign(Level):
    """One bit: a level wire of two levels. Values are booleans, True for +1; there is no zero."""

    def __init__(self) -> None:
        super().__init__(levels=2)

    def encode(self, values: Tensor) -> Tensor:
        return packing.pack_bits(values)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packing.unpack_bits(packed, numel)


class Ternary(Wire):
    """``{-1, 0, 1}`` in 1.6 bits: five base-3 digits a byte."""

    bits, group = 1.6, 40

    def nbytes(self, numel: int) -> int:
        return -(-numel // 5)

    def encode(self, values: Tensor) -> Tensor:
        return packing.pack_trits(values)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packing.unpack_trits(packed, numel)


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


class ScaledSign(Wire):
    """So many scales, float32, then one bit a value; which values a scale is of is not written.

    Values are a pair: the scales, ``[..., scales]``, and the signs as booleans, ``[..., m]``, True
    for +1; what they stand for, ``+scale`` and ``-scale``, has no zero.
    """

    bits, group = 1, 64

    def __init__(self, scales: int):
        self.scales = scales

    def nbytes(self, numel: int) -> int:
        return 4 * self.scales + -(-numel // 8)

    def encode(self, values: tuple[Tensor, Tensor]) -> Tensor:
        scales, signs = values
        numbers = scales.to(torch.float32).contiguous().view(torch.uint8)
        return torch.cat([numbers, packing.pack_bits(signs)], dim=-1)

    def decode(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        numbers, signs = packed.split([4 * self.scales, -(-numel // 8)], dim=-1)
        return numbers.contiguous().view(torch.float32), packing.unpack_bits(signs, numel)


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


class ScaledInt8(Wire):
    """So many scales, float32, then a signed byte a value; see :class:`ScaledSign`.

    Values are a pair: the scales, ``[..., scales]``, and the bytes, int8 ``[..., m]``.
    """

    bits, group = 8, 64

    def __init__(self, scales: int):
        self.scales = scales

    def nbytes(self, numel: int) -> int:
        return 4 * self.scales + numel

    def encode(self, values: tuple[Tensor, Tensor]) -> Tensor:
        scales, numbers = values
        head = scales.to(torch.float32).contiguous().view(torch.uint8)
        return torch.cat([head, numbers.view(torch.uint8)], dim=-1)

    def decode(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head, numbers = packed.split([4 * self.scales, numel], dim=-1)
        return head.contiguous().view(torch.float32), numbers.view(torch.int8)


def _in_two_sizes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sizes of each chunk, ``[chunks, 2]``, and codes of 2 bits, ``[chunks, k]``."""
    sizes = numbers.abs().to(torch.float64)
    large = sizes > sizes.mean(1, keepdim=True)
    means = [
        (sizes * part).sum(1) / part.sum(1).clamp(min=1)  # of no entries, 0
        for part in (~large, large)
    ]
    return torch.stack(means, 1), 2 * (numbers < 0).int() + large
