"""Random bits of stochastic rounding: a hash of the place and a key, the same on every device."""

import torch
from torch import Tensor

# MurmurHash3's mixing of 32 bits (Appleby, public domain); PLACE is 2**32 over the golden ratio
PLACE, MIX = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35)
_MASK = 0xFFFFFFFF


def random_bits(length: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """Return 16 random bits for each place: int32 ``[length]``.

    Args:
        key: two integers of 32 bits.
    """
    first, second = key
    h = torch.arange(length, device=device) * PLACE + first & _MASK
    h = (h ^ h >> 16) * MIX[0] & _MASK
    h = (h ^ h >> 13) + second & _MASK
    h = h * MIX[1] & _MASK
    return (h >> 16).to(torch.int32)
