"""The lighthouse of an elastic run, and what its processes share."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from dlion.errors import RunFailed
from dlion.suite.lighthouse import HOST, start
from dlion.suite.machine import die_with
from dlion.suite.training.signals import SIGNALS

_STARTING = 60.0  # seconds
_LOOK = 0.05  # seconds between two looks at who is there
_SILENCE = 1.0  # seconds, of workers of this machine: no link is between


@contextmanager
def serving(wait: float = _SILENCE) -> Iterator[str]:
    """Run a lighthouse for this machine in a process of its own; give its address.

    Args:
        wait: seconds that workers wait for others that are alive.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid(), wait), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_STARTING):
            raise RunFailed(f"the lighthouse has not started within {_STARTING:.0f} s")
        try:
            yield ours.recv()
        except EOFError:
            raise RunFailed("the lighthouse could not be started") from None
    finally:
        process.kill()
        process.join()


def _serve(ready: Connection, parent: int, wait: float) -> None:
    for number in SIGNALS:  # the launcher ends it, last of all
        signal.signal(number, signal.SIG_IGN)
    die_with(parent)
    lighthouse = start(f"{HOST}:0", silence=_SILENCE, wait=wait)
    ready.send(f"{HOST}:{lighthouse.address().rpartition(':')[2]}")
    signal.pause()


class Meeting:
    """Lets processes that start together wait for one another, so that all take the first step."""

    def __init__(self, processes: int, patience: float = 60.0):
        """``patience``: seconds, after which those that are there begin."""
        # a Barrier waits for ever for one that has died, or stopped, as it waited itself
        self._there = multiprocessing.get_context("fork").RawArray("b", processes)
        self._patience = patience

    def wait(self, number: int) -> None:
        """Say that process ``number`` is there, and wait for the others."""
        self._there[number] = 1
        end = time.monotonic() + self._patience
        while not all(self._there) and time.monotonic() < end:
            time.sleep(_LOOK)
