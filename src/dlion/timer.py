"""Measures where a step's time goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timer:
    """Adds up the host's seconds by phase; does nothing while not ``enabled``.

    The time of a phase inside another, on the main thread, counts for the inner one alone.

    Attributes:
        enabled: whether to measure.
        seconds: the sum for each phase.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._ended = 0.0  # seconds of the main thread's ended phases, without overlap

    def __call__(self, phase: str, beside: bool = False) -> AbstractContextManager[None]:
        """Time a phase; one ``beside`` runs on another thread, at the same time as the rest."""
        return self._timed(phase, beside) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, phase: str, beside: bool) -> Iterator[None]:
        ended_before, start = self._ended, time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if beside:
            self.seconds[phase] += seconds
        else:
            self.seconds[phase] += seconds - (self._ended - ended_before)  # less the inner phases
            self._ended = ended_before + seconds
