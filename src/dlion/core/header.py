"""Header of every message: its step, a bit a parameter, and what extensions add.

All processes read the headers of all senders before they apply an answer.
"""

import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlion.transfer import index_of

_STEP = 4  # bytes


class Headers(NamedTuple):
    """The headers of all senders, m of them.

    Attributes:
        steps: of each sender the step that it is in; see :attr:`vetoed`.
        extra: what extensions have added, uint8 ``[m, bytes]``, in main memory.
        present: which parameters some sender has a gradient of.
        flag: whether any sender has its flag set.
        same: whether all are the same and none is vetoed, so that nobody needs to look closer.
    """

    steps: list[int]
    extra: np.ndarray
    present: list[bool]
    flag: bool
    same: bool

    @property
    def vetoed(self) -> list[int | None]:
        """Of each sender the first parameter whose gradient cannot be used, None without one."""
        past_all = 2**32 - len(self.present)
        return [step - past_all if step >= 2**31 else None for step in self.steps]


class Header:
    """The header of messages about T parameters: ``nbytes`` bytes, whole 64-bit words.

    The step as 32 bits, ``extra`` bytes of extensions, one bit a parameter (whether the sender has
    a gradient of it) and one for a flag of the training loop's own.
    """

    def __init__(self, parameters: int, extra: int):
        self.parameters, self._bits = parameters, _STEP + extra
        self.nbytes = 8 * -(-(self._bits + -(-(parameters + 1) // 8)) // 8)

    def encode(self, step: int, extra: bytes, present: list[bool], flag: bool = False) -> Tensor:
        """Return the header, uint8 ``[nbytes]``."""
        bits = np.packbits([*present, flag], bitorder="little").tobytes()
        header = b"".join((struct.pack("<I", step), extra, bits))
        return torch.frombuffer(bytearray(header.ljust(self.nbytes, b"\0")), dtype=torch.uint8)

    def veto(self, header: Tensor, usable: Tensor) -> None:
        """Put the first of T parameters that is not usable, i, in place of the step, as i - T.

        Args:
            header: uint8 ``[nbytes]``, on any device.
            usable: bool ``[T]``, on the same.
        """
        step = header[:_STEP].view(torch.int32)
        places = index_of(tuple(range(-self.parameters, 0)), header.device)
        step.copy_(torch.where(usable, step, places).amin())

    def decode(self, headers: Tensor) -> Headers:
        """Read the headers of all senders, uint8 ``[m, nbytes]``, on any device."""
        rows = headers.cpu().numpy()
        first = rows[0].tobytes()
        steps = np.ascontiguousarray(rows[:, :_STEP]).view("<u4").ravel().tolist()
        same = rows.tobytes() == first * len(rows) and steps[0] < 2**31
        bits = rows[0, self._bits :] if same else np.bitwise_or.reduce(rows[:, self._bits :])
        flags = np.unpackbits(bits, bitorder="little", count=self.parameters + 1)
        *present, flag = flags.astype(bool).tolist()
        return Headers(steps, rows[:, _STEP : self._bits], present, flag, same)
