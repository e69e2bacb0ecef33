"""Where a step's time goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timer:
    """Adds up the host's seconds by phase; does nothing while not ``enabled``.

    A phase inside another, on the same thread, is taken out of the outer one.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of phases that ended on the main thread

    def __call__(self, phase: str, beside: bool = False) -> AbstractContextManager[None]:
        """Time what runs in here; ``beside``: on another thread, at the same time as the rest."""
        return self._timed(phase, beside) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, phase: str, beside: bool) -> Iterator[None]:
        before, start = self._inner, time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if beside:
            self.seconds[phase] += seconds
        else:
            self.seconds[phase] += seconds - (self._inner - before)
            self._inner = before + seconds
