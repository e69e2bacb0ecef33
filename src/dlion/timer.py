"""Measures where a step's time goes."""

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

PHASES = ("forward", "backward", "encode", "wait", "apply")
BESIDE = ("vote", "travel")  # of the exchanges, which may have a thread of their own


class Timer:
    """Adds up the host's seconds by phase; does nothing before :meth:`enable`.

    A phase is a context manager: ``with timer.encode: ...``. The time of a phase inside another
    counts for the inner one alone, except for BESIDE: these may be at the same time as the rest.

    Attributes:
        enabled: whether it measures.
        seconds: the sum for each phase.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.ended = 0.0  # seconds of phases on the main thread that are over
        idle: AbstractContextManager[None] = nullcontext()
        self.forward = self.backward = self.encode = self.wait = self.apply = idle
        self.vote = self.travel = idle

    def enable(self) -> None:
        """Measure from now on."""
        self.enabled = True
        for phase in PHASES:
            setattr(self, phase, _Phase(self, phase))
        for phase in BESIDE:
            setattr(self, phase, _Phase(self, phase, beside=True))


class _Phase(AbstractContextManager[None]):
    """A phase of a step; one ``beside`` the others has a thread of its own."""

    def __init__(self, timer: Timer, name: str, beside: bool = False) -> None:
        self._timer, self._name, self._beside = timer, name, beside
        self._begun: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._begun.append((self._timer.ended, time.perf_counter()))

    def __exit__(self, *_: object) -> None:
        ended_before, start = self._begun.pop()
        seconds = time.perf_counter() - start
        if self._beside:
            self._timer.seconds[self._name] += seconds
        else:
            inner = self._timer.ended - ended_before
            self._timer.seconds[self._name] += seconds - inner
            self._timer.ended = ended_before + seconds
