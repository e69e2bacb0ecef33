"""What goes with every message: the step it belongs to, and a bit a parameter."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Headers(NamedTuple):
    """What the headers of all senders say together.

    Attributes:
        steps: the step of each sender.
        present: which parameters some sender has a gradient for.
        flag: whether any sender has its flag set.
    """

    steps: list[int]
    present: list[bool]
    flag: bool


class Header:
    """The header of messages about so many parameters: ``nbytes`` bytes, whole 64-bit words.

    The step as a 32-bit integer, one bit a parameter (whether the sender has a gradient for it) and
    one for a flag of the training loop's own.
    """

    def __init__(self, parameters: int):
        self.parameters = parameters
        self.nbytes = 8 * -(-(32 + parameters + 1) // 64)

    def encode(self, step: int, present: list[bool], flag: bool = False) -> Tensor:
        """Return the header, uint8 ``[nbytes]``."""
        header = np.zeros(self.nbytes, np.uint8)
        header[:4] = np.array([step], "<u4").view(np.uint8)
        bits = np.packbits([*present, flag], bitorder="little")
        header[4 : 4 + len(bits)] = bits
        return torch.from_numpy(header)

    def decode(self, headers: Tensor) -> Headers:
        """Read the headers of all senders, uint8 ``[m, nbytes]``."""
        rows = np.ascontiguousarray(headers.cpu().numpy())
        if (rows == rows[0]).all():
            steps, bits = rows[:1, :4].copy().view("<u4").repeat(len(rows)), rows[0, 4:]
        else:
            steps = rows[:, :4].copy().view("<u4").flatten()
            bits = np.bitwise_or.reduce(rows[:, 4:])
        *present, flag = np.unpackbits(bits, bitorder="little", count=self.parameters + 1)
        return Headers(steps.tolist(), [bool(bit) for bit in present], bool(flag))
