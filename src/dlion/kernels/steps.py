"""The step sizes of delta modulation: a byte each, eight to an octave."""

from typing import NamedTuple

import torch
from torch import Tensor

SHIFT = 20  # of a level in a float32: three bits of its mantissa, and five of its exponent
BASE = (127 - 32) << 23  # the float32 of level 0, 2**-32


class Coder(NamedTuple):
    """The state of a delta modulator, equal at both ends.

    Attributes:
        estimate: of what is coded, float32 ``[..., d]``.
        level: of the step size, uint8 ``[..., d]``.
        history: the last bits, and whether they were those before them: int64 ``[..., 2, d / 64]``.
    """

    estimate: Tensor
    level: Tensor
    history: Tensor


def step_size(level: Tensor) -> Tensor:
    """Return ``2**(l // 8 - 32) * (1 + l % 8 / 8)`` of levels l, uint8, as float32.

    From 2.3e-10 to 0.94; one level is a factor of 16/15 to 9/8, eight are 2. Each has four
    significant bits, so sums of steps are exact until they are a million times the smallest.
    """
    return ((level.to(torch.int32) << SHIFT) + BASE).view(torch.float32)


def nearest_level(size: Tensor) -> Tensor:
    """Return the level of the largest step size that is not above ``size``, float32.

    It is 0 if there is none, as for NaN and for what is not positive.
    """
    levels = ((size.view(torch.int32) - BASE) >> SHIFT).clamp(0, 255)
    return levels.where(size > 0, 0).to(torch.uint8)  # below 0, the difference may overflow
