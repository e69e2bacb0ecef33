"""The specification of every wire format, in plain torch on any device.

Bits are packed little-endian: element ``8 i + j`` is bit ``j`` of byte ``i``. An unsigned integer
of p bits is written as p *planes*, plane b holding bit b of every element, so that whole messages
are added and compared with word-wide logic (bit slicing) and never unpacked on the way.
"""

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
    return torch.stack([pack_bits((values >> b & 1).bool()) for b in range(bits)], dim=-2)


def unpack_planes(planes: Tensor, numel: int) -> Tensor:
    """Read planes ``[..., bits, ceil(numel / 8)]`` as int32 ``[..., numel]``."""
    bits = unpack_bits(planes, numel)
    values = bits[..., 0, :].to(torch.int32)
    for b in range(1, bits.shape[-2]):
        values |= bits[..., b, :].to(torch.int32) << b
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
    digits = torch.nn.functional.pad(values.to(torch.int16), (0, -values.shape[-1] % 5)) + 1
    weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int16, device=values.device)
    return (digits.unflatten(-1, (-1, 5)) * weights).sum(-1).to(torch.uint8)


def unpack_trits(packed: Tensor, numel: int) -> Tensor:
    """Inverse of :func:`pack_trits`: int8 ``[..., numel]``. Bytes above 242 never occur."""
    weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int16, device=packed.device)
    digits = packed.to(torch.int16).unsqueeze(-1) // weights % 3 - 1
    return digits.flatten(-2).to(torch.int8)[..., :numel]
