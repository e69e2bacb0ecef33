"""Kills processes at random moments: ``faults.deaths``."""

import math
import random
import time
from collections.abc import Mapping, MutableSequence
from multiprocessing.process import BaseProcess

from dlion.streams import stream_seed

_OFTEN = 3600.0  # seconds, at most, between two looks


class ProcessKiller:
    """Kills processes at random, each after an exponential time, and says when they return.

    Attributes:
        away: by number, when the processes that were killed are started again.
        begun: whether each process has the state of the run; one that has it is spared. None: all
            are killed alike.
    """

    def __init__(self, a_minute: float, away: float, seed: int):
        """Kill each process so often; it is away for so many seconds."""
        self.away: dict[int, float] = {}
        self.begun: MutableSequence[int] | None = None
        self._rate, self._seconds = a_minute / 60, away
        self._rng = random.Random(stream_seed(seed, "deaths"))
        self._due: dict[int | None, float] = {}  # by process id

    def kill_due(self, processes: Mapping[int, BaseProcess]) -> float | None:
        """Kill those whose time has come; return the seconds until something is due, if ever."""
        if not self._rate:
            return None
        now = time.monotonic()
        for number, process in processes.items():
            if process.pid not in self._due:
                self._due[process.pid] = now + self._draw()
            if number in self.away or now < self._due[process.pid]:
                continue
            others = processes.keys() - self.away - {number}
            if self.begun is not None and not any(self.begun[other] for other in others):
                self._due[process.pid] = now + self._draw()
                continue
            if self.begun is not None:
                self.begun[number] = 0
            process.kill()
            self.away[number] = now + self._seconds
        here = [self._due[process.pid] for n, process in processes.items() if n not in self.away]
        return max(0.0, min(_OFTEN, min([*here, *self.away.values()], default=math.inf) - now))

    def _draw(self) -> float:
        """Return the seconds until a process dies."""
        return self._rng.expovariate(self._rate)

    def returning(self) -> list[int]:
        """Return who is to be started again by now."""
        now = time.monotonic()
        return [number for number, when in self.away.items() if when <= now]

    def end(self) -> None:
        """Kill and bring back nobody from here on."""
        self._rate = 0.0
        self.away.clear()
