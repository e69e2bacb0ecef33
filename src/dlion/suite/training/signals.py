"""The signals that ask a run to end: a scheduler's, a terminal's that goes away, and Ctrl-C."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# SLURM sends SIGTERM, or what --signal names; submitit asks it for SIGUSR2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


class SignalNotice:
    """While entered, :data:`SIGNALS` are noted instead of ending this process.

    Those that the process ignores (SIGHUP under nohup, SIGINT in a shell's background) stay
    ignored. Others may come more than once: from the scheduler to all processes, and from the
    launcher.

    Args:
        on_signal: called with the number of each signal, from its handler.

    Attributes:
        first: the first signal that came, or None.
    """

    def __init__(self, on_signal: Callable[[int], Any] | None = None) -> None:
        self.first: int | None = None
        self._on_signal = on_signal

    def __enter__(self) -> "SignalNotice":
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {n: handler for n, handler in handlers.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        if self._on_signal is not None:
            self._on_signal(number)


@contextmanager
def woken_by_signals() -> Iterator[socket.socket]:
    """Yield a descriptor that is readable once a signal has come.

    Python's handlers run between two steps of the main thread. A signal that another thread takes,
    or that comes as the wait is about to begin, does not interrupt it.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before)
