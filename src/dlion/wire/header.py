"""What goes with every message: the step it belongs to, and a bit a parameter."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NUMBERS = 8  # bytes: the step and the checksum


class Headers(NamedTuple):
    """What the headers of all senders say together.

    Attributes:
        steps: the step of each sender.
        checksums: of what each sender must have in common with the others.
        present: which parameters some sender has a gradient for.
        flag: whether any sender has its flag set.
        slow: whether any sender's links are slow.
    """

    steps: list[int]
    checksums: list[int]
    present: list[bool]
    flag: bool
    slow: bool


class Header:
    """The header of messages about so many parameters: ``nbytes`` bytes, whole 64-bit words.

    The step and a checksum as 32-bit integers, one bit a parameter (whether the sender has a
    gradient for it), one for a flag of the training loop's own, and one for slow links.
    """

    def __init__(self, parameters: int):
        self.parameters = parameters
        self.nbytes = _NUMBERS + 8 * -(-(parameters + 2) // 64)

    def encode(
        self,
        step: int,
        checksum: int,
        present: list[bool],
        flag: bool = False,
        slow: bool = False,
    ) -> Tensor:
        """Return the header, uint8 ``[nbytes]``."""
        header = np.zeros(self.nbytes, np.uint8)
        header[:_NUMBERS] = np.array([step, checksum], "<u4").view(np.uint8)
        bits = np.packbits([*present, flag, slow], bitorder="little")
        header[_NUMBERS : _NUMBERS + len(bits)] = bits
        return torch.from_numpy(header)

    def decode(self, headers: Tensor) -> Headers:
        """Read the headers of all senders, uint8 ``[m, nbytes]``."""
        rows = headers.cpu().numpy()
        steps, checksums = np.ascontiguousarray(rows[:, :_NUMBERS]).view("<u4").T.tolist()
        bits = np.bitwise_or.reduce(rows[:, _NUMBERS:])
        flags = np.unpackbits(bits, bitorder="little", count=self.parameters + 2).astype(bool)
        *present, flag, slow = flags.tolist()
        return Headers(steps, checksums, present, flag, slow)
