"""Header of every message: the step it belongs to, and a bit a parameter."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlion.transfer import index_of

_NUMBERS = 8  # bytes: the step and the checksum


class Headers(NamedTuple):
    """Combined headers of all senders.

    Attributes:
        steps: the step of each sender.
        broken: of each sender the first parameter whose gradient is not finite, None without one.
        checksums: of what each sender must have in common with the others.
        saved: what each sender did with its own state, 0 to 3.
        present: which parameters some sender has a gradient for.
        flag: whether any sender has its flag set.
        slow: whether any sender's links are slow.
        agree: whether all senders are in one step, with one checksum and finite gradients.
    """

    steps: list[int]
    broken: list[int | None]
    checksums: list[int]
    saved: list[int]
    present: list[bool]
    flag: bool
    slow: bool
    agree: bool


class Header:
    """The header of messages about so many parameters: ``nbytes`` bytes, whole 64-bit words.

    The step as 32 bits, a checksum as 30, two bits about saved state, one bit a parameter (whether
    the sender has a gradient for it), one for a flag of the training loop's own, and one for slow
    links. If gradients are not finite, the first of them, i of T, is sent in place of the step, as
    i - T.
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
        saved: int = 0,
    ) -> Tensor:
        """Return the header, uint8 ``[nbytes]``."""
        header = np.zeros(self.nbytes, np.uint8)
        header[:_NUMBERS] = np.array([step, checksum | saved << 30], "<u4").view(np.uint8)
        bits = np.packbits([*present, flag, slow], bitorder="little")
        header[_NUMBERS : _NUMBERS + len(bits)] = bits
        return torch.from_numpy(header)

    def mark(self, header: Tensor, norms: Tensor) -> None:
        """Say in a header, on any device, that a gradient is not finite; the host need not know.

        Args:
            header: uint8 ``[nbytes]``.
            norms: of the gradients, float32 ``[T]``.
        """
        step = header[:4].view(torch.int32)
        places = index_of(tuple(range(-self.parameters, 0)), header.device)
        step.copy_(torch.where(norms < torch.inf, step, places).amin())

    def decode(self, headers: Tensor) -> Headers:
        """Read the headers of all senders, uint8 ``[m, nbytes]``, in main memory."""
        rows = headers.numpy()
        steps, checksums = np.ascontiguousarray(rows[:, :_NUMBERS]).view("<u4").T.tolist()
        saved = [checksum >> 30 for checksum in checksums]
        checksums = [checksum % 2**30 for checksum in checksums]
        broken = [step - 2**32 + self.parameters if step >= 2**31 else None for step in steps]
        bits = np.bitwise_or.reduce(rows[:, _NUMBERS:])
        flags = np.unpackbits(bits, bitorder="little", count=self.parameters + 2).astype(bool)
        *present, flag, slow = flags.tolist()
        agree = len({*steps}) == len({*checksums}) == 1 and broken[0] is None
        return Headers(steps, broken, checksums, saved, present, flag, slow, agree)
