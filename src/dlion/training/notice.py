"""Told to leave: the signals that a scheduler sends before it takes the machine away."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

# SLURM sends SIGTERM, or what --signal names; submitit asks it for SIGUSR2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Notice:
    """While entered, the first of :data:`SIGNALS` is noted instead of ending this process.

    The second is KeyboardInterrupt: whoever sends it does not want to wait.

    Args:
        tell: called with the first.

    Attributes:
        came: the signal, or None.
    """

    def __init__(self, tell: Callable[[int], Any] = lambda _: None):
        self.tell = tell
        self.came: int | None = None

    def __enter__(self) -> "Notice":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.came is not None:
            if number == self.came:
                raise KeyboardInterrupt
            return
        self.came = number
        self.tell(number)
