"""How long a run has trained."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """Seconds of training, without evaluations and checkpoints."""

    before: float
    _started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._started

    def paused(self) -> "_Pause":
        return _Pause(self)


class _Pause:
    def __init__(self, clock: Clock):
        self._clock = clock

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._clock._started += time.perf_counter() - self._began
