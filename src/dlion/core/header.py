"""Header of every message: its step, a checksum of hyperparameters, and a bit a parameter.

All processes compare the headers of all senders before they apply an answer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlion.checks import plain
from dlion.errors import TrainingFailed
from dlion.transfer import index_of

_NUMBERS = 8  # bytes: the step and the checksum
_PLAIN = (int, float, str, bool, list, tuple, type(None))


class Headers(NamedTuple):
    """Combined headers of all senders.

    Attributes:
        steps: the step of each sender, see :attr:`broken`.
        numbers: of each sender its checksum and, in the two bits above, ``saved``.
        saved: what each sender did with its own state, 0 to 3.
        present: which parameters some sender has a gradient for.
        flag: whether any sender has its flag set.
        slow: whether any sender's links are slow.
        agree: whether all say the same step and number, and none has a broken gradient; if not,
            :func:`check_in_step` looks closer.
    """

    steps: list[int]
    numbers: list[int]
    saved: list[int]
    present: list[bool]
    flag: bool
    slow: bool
    agree: bool

    @property
    def checksums(self) -> list[int]:
        """Of each sender the checksum of what it must have in common with the others."""
        return [number % 2**30 for number in self.numbers]

    @property
    def broken(self) -> list[int | None]:
        """Of each sender the first parameter whose gradient is not finite, None without one."""
        past_all = 2**32 - len(self.present)
        return [step - past_all if step >= 2**31 else None for step in self.steps]


class Sender(NamedTuple):
    """Facts about a process that all headers of its messages in a step carry.

    Attributes:
        trained: parameters that are in buckets, or will be before this step is over.
        flag: a bit of the training loop's own.
        saved: what the process did with its own state, 0 to 3.
    """

    trained: int
    flag: bool
    saved: int


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
        """Read the headers of all senders, uint8 ``[m, nbytes]``, on any device."""
        rows = headers.cpu().numpy()
        steps, numbers = np.ascontiguousarray(rows[:, :_NUMBERS]).view("<u4").T.tolist()
        saved = [number >> 30 for number in numbers]
        bits = np.bitwise_or.reduce(rows[:, _NUMBERS:])
        flags = np.unpackbits(bits, bitorder="little", count=self.parameters + 2).astype(bool)
        *present, flag, slow = flags.tolist()
        agree = len({*steps}) == len({*numbers}) == 1 and steps[0] < 2**31
        return Headers(steps, numbers, saved, present, flag, slow, agree)


def plain_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return numbers, texts and lists among named values; objects are of one process alone."""
    found = {
        name: plain(value) for name, value in facts.items() if name not in ("params", "param_names")
    }
    return {name: value for name, value in found.items() if isinstance(value, _PLAIN)}


def hyperparameters(groups: Sequence[dict[str, Any]]) -> str:
    """Return the hyperparameters of groups as text, equal where they are equal."""
    apart = {"steps": None}  # headers tell them by themselves
    return repr([sorted((plain_values(group) | apart).items()) for group in groups])


def _shown(group: dict[str, Any]) -> str:
    apart = {name: value for name, value in plain_values(group).items() if name != "steps"}
    return ", ".join(f"{name}={value}" for name, value in apart.items())


def check_in_step(
    headers: Headers,
    senders: Sequence[int],
    kind: str,
    names: Sequence[str],
    step: int,
    groups: Sequence[dict[str, Any]],
) -> None:
    """Compare all senders, a ``kind`` of such numbers, with the first.

    Args:
        headers: those of the senders.
        names: of the parameters that the messages are about.
        step: of this process.
        groups: of the parameters here, for the message.

    Raises:
        TrainingFailed: if one has a gradient that is not finite, is in another step, or has other
            hyperparameters.
    """
    for sender, broken in zip(senders, headers.broken, strict=True):
        if broken is not None:
            raise not_finite(names[broken], f"{kind} {sender}", step)
    first, *others = zip(senders, headers.steps, headers.checksums, strict=True)
    for sender, their_step, their_checksum in others:
        if their_step != first[1]:
            raise TrainingFailed(
                f"{kind} {sender} is in step {their_step + 1}, {kind} {first[0]} in step"
                f" {first[1] + 1}: all processes must load the same state and call step() equally"
                " often"
            )
        if their_checksum != first[2]:
            here = "; ".join(dict.fromkeys(map(_shown, groups)))
            raise TrainingFailed(
                f"in step {first[1] + 1} {kind} {sender} has other hyperparameters or frozen"
                f" parameters than {kind} {first[0]} (here: {here}): all processes must"
                " set the same, and call step() of the optimizer and of its schedules equally often"
            )


def not_finite(name: str, whose: str, step: int) -> TrainingFailed:
    """Return the error for a gradient that is not finite."""
    return TrainingFailed(
        f"the gradient of {name} is not finite on {whose} in step {step + 1}: lower the learning"
        " rate, or leave such gradients out with nonfinite=skip"
    )
