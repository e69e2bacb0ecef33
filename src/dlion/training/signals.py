"""The signals by which a scheduler announces that it takes the machine away."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

# SLURM sends SIGTERM, or what --signal names; submitit asks it for SIGUSR2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SignalNotice:
    """While entered, :data:`SIGNALS` are noted instead of ending this process.

    They may come more than once: from the scheduler to all processes, and from the launcher.

    Args:
        on_signal: called with the number of each signal, from its handler.

    Attributes:
        first: the first signal that came, or None.
    """

    def __init__(self, on_signal: Callable[[int], Any] | None = None) -> None:
        self.first: int | None = None
        self._on_signal = on_signal

    def __enter__(self) -> "SignalNotice":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        if self._on_signal is not None:
            self._on_signal(number)
