"""The specification of every wire format, in plain torch on any device.

Bits are packed little-endian: element ``8 i + j`` is bit ``j`` of byte ``i``. An unsigned integer
of p bits is written as p *planes*, plane b holding bit b of every element, so that whole messages
are added and compared with word-wide logic (bit slicing) and never unpacked on the way.
"""

from functools import cache

import torch
from torch import Tensor

# Multiplying eight 0/1 bytes, read as one little-endian word, by GATHER moves them into its top
# byte. SPREAD copies a byte into all eight, where SELECT keeps one bit of it in each.
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
_SELECT = 0x8040201008040201 - (1 << 64)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans ``[..., m]`` into bytes ``[..., ceil(m / 8)]``; the last byte ends in zeros."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).contiguous()
    words = bits.flatten().view(torch.int64).view(*bits.shape[:-1], bits.shape[-1] // 8)
    return (words * _GATHER >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Unpack bytes ``[..., ceil(numel / 8)]`` into booleans ``[..., numel]``."""
    words = packed.to(torch.int64) * _SPREAD & _SELECT
    bits = words.flatten().view(torch.uint8).view(*packed.shape[:-1], 8 * packed.shape[-1])
    return (bits != 0)[..., :numel]


def pack_planes(values: Tensor, bits: int) -> Tensor:
    """Write integers ``[..., m]`` below ``2**bits`` as planes ``[..., bits, ceil(m / 8)]``."""
    octets = torch.stack([(values >> b).to(torch.uint8) for b in range(0, bits, 8)], dim=-2)
    places = torch.arange(min(bits, 8), dtype=torch.uint8, device=values.device).unsqueeze(-1)
    planes = (octets.unsqueeze(-2) >> places & 1).flatten(-3, -2)
    return pack_bits(planes[..., :bits, :].bool())


def unpack_planes(planes: Tensor, numel: int) -> Tensor:
    """Read planes ``[..., bits, ceil(numel / 8)]`` as int32 ``[..., numel]``."""
    words, *rest = _look_up(_bits_of_bytes(planes.device), planes[..., :8, :]).unbind(-2)
    for b, more in enumerate(rest, 1):  # in the bytes of a word, one for each value
        words = words | more << b
    values = words.contiguous().view(torch.uint8)[..., :numel].to(torch.int32)
    if planes.shape[-2] > 8:
        values |= unpack_planes(planes[..., 8:, :], numel) << 8
    return values


def sum_planes(rows: Tensor, largest: int) -> Tensor:
    """Add n messages of p-bit integers without unpacking them.

    A ripple-carry adder over planes: each logical operation handles as many elements as the words
    have bits. Sums cannot overflow, as the result has as many planes as the largest sum needs.

    Args:
        rows: ``[n, ..., p, m]``, planes in words of any integer type.
        largest: the largest value of one message, at most ``2**p - 1``.

    Returns:
        ``[..., q, m]`` with ``q = (n * largest).bit_length()``.
    """
    n, p = rows.shape[0], rows.shape[-2]
    planes = list(rows[0].unbind(-2))
    for i in range(1, n):
        carry = None
        needed = ((i + 1) * largest).bit_length()
        for b in range(needed):
            addends = planes[b : b + 1] + ([rows[i, ..., b, :]] if b < p else [])
            total, carry = _add_bits(addends if carry is None else [*addends, carry])
            planes[b : b + 1] = [total]
    q = (n * largest).bit_length()
    return torch.stack(planes[:q], dim=-2)


def _add_bits(addends: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Sum and carry of one to three bit planes (half and full adder)."""
    if len(addends) == 1:
        return addends[0], None
    a, b = addends[0], addends[1]
    half = a ^ b
    if len(addends) == 2:
        return half, a & b
    c = addends[2]
    return half ^ c, a & b | half & c


def compare_planes(planes: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Compare integers in planes ``[..., q, m]`` with a constant: bit masks (greater, equal)."""
    greater = torch.zeros_like(planes[..., 0, :])
    equal = ~greater
    for b in reversed(range(planes.shape[-2])):
        plane = planes[..., b, :]
        if constant >> b & 1:
            equal = equal & plane
        else:
            greater = greater | equal & plane
            equal = equal & ~plane
    if constant >> planes.shape[-2]:
        return torch.zeros_like(greater), torch.zeros_like(equal)
    return greater, equal


def pack_trits(values: Tensor) -> Tensor:
    """Pack ``{-1, 0, 1}``, five base-3 digits a byte: ``[..., m]`` -> ``[..., ceil(m / 5)]``."""
    padded = torch.nn.functional.pad(values.to(torch.int8), (0, -values.shape[-1] % 5))
    digits = (padded + 1).view(torch.uint8).unflatten(-1, (-1, 5)).unbind(-1)
    packed = digits[4]
    for digit in digits[3::-1]:
        packed = packed * 3 + digit
    return packed


def unpack_trits(packed: Tensor, numel: int) -> Tensor:
    """Inverse of :func:`pack_trits`: int8 ``[..., numel]``. Bytes above 242 never occur."""
    return _look_up(_trits_of_bytes(packed.device), packed).flatten(-2)[..., :numel]


def _look_up(table: Tensor, packed: Tensor) -> Tensor:
    """Return the row of the table for each byte."""
    rows = table.index_select(0, packed.flatten().to(torch.int32))
    return rows.view(*packed.shape, *table.shape[1:])


@cache
def _trits_of_bytes(device: torch.device) -> Tensor:
    """The five digits of each byte: int8 ``[256, 5]``."""
    weights = torch.tensor([1, 3, 9, 27, 81], device=device)
    return (torch.arange(256, device=device).unsqueeze(1) // weights % 3 - 1).to(torch.int8)


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """The bits of each byte, as the bytes of a word: int64 ``[256]``."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    return unpack_bits(every, 8 * 256).view(torch.int64)
