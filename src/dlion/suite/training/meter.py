"""Costs of training: seconds, and bytes at the network interface."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Meter:
    """Counts seconds and sent bytes from its creation on, except while it is paused.

    Args:
        seconds: of training that went before, in the run that is resumed.
        count_bytes: whether this process has a network namespace of its own (an emulated network),
            so that all that leaves it was sent by this process.
    """

    def __init__(self, seconds: float, count_bytes: bool):
        self._count_bytes = count_bytes
        self._started = time.perf_counter() - seconds
        self._bytes_before = self._interface_bytes()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return time.perf_counter() - self._started

    @property
    def sent_bytes(self) -> int:
        """Bytes that the operating system sent; 0 where they are not counted."""
        return self._interface_bytes() - self._bytes_before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that passes and the bytes that are sent in here."""
        time_before, bytes_before = time.perf_counter(), self._interface_bytes()
        yield
        self._started += time.perf_counter() - time_before
        self._bytes_before += self._interface_bytes() - bytes_before

    def _interface_bytes(self) -> int:
        return interface_bytes() if self._count_bytes else 0


def interface_bytes() -> int:
    """Return the bytes sent so far in this process's network namespace, but not over loopback.

    It is the operating system's count (Linux), with the headers of all layers.
    """
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total
