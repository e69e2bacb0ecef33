"""Told to leave: the signals that a scheduler sends before it takes the machine away."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

# SLURM sends SIGTERM, or what --signal names; submitit asks it for SIGUSR2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SignalNotice:
    """While entered, :data:`SIGNALS` are noted instead of ending this process.

    They may come more than once: from the scheduler to all processes, and from the launcher.

    Attributes:
        tell: called with each; does nothing until it is set.
        came: the first, or None.
    """

    def __init__(self) -> None:
        self.tell: Callable[[int], Any] = lambda _: None
        self.came: int | None = None

    def __enter__(self) -> "SignalNotice":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came = self.came or number
        self.tell(number)
