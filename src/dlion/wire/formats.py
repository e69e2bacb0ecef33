"""Wires: how a message is written as bytes, and how many bytes that is.

Every wire writes any number of values, of any leading shape, and reads back exactly what was
written. ``nbytes`` is a promise that the tests hold ``encode`` to.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dlion.wire import packing


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
