"""Lets the processes of an elastic run begin together."""

import multiprocessing
import time

_LOOK = 0.05  # seconds between two looks at who is there


class StartBarrier:
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
