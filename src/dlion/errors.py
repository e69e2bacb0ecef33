"""The exceptions that are written for the user."""

from typing import Any


class UserError(ValueError):
    """A wrong value that the user can correct.

    The message is one sentence: what was wrong, what is allowed, what to type. ``train.py`` and
    ``dlion`` print it without a traceback and exit with code 2.
    """


class RunFailed(RuntimeError):
    """Failure of a run or command that had begun, exit code 1; the message names the cause."""

    def __init__(self, reason: str, leaving: bool = False):
        """With ``leaving`` a signal had asked the run to end, and it must not be restarted."""
        self.leaving = leaving
        super().__init__(reason)


class TrainingFailed(RunFailed):
    """Training must stop; the message is enough, and no traceback is shown."""


class Stopped(RuntimeError):
    """A run ended with a checkpoint before its last step; ``resume=auto`` continues it.

    Attributes:
        command: what to type to resume, where that is known.
    """

    def __init__(self, step: int | None, signal: int | None = None):
        """The run ended after ``step`` (None: before the first), because of ``signal`` if any."""
        self.step, self.signal = step, signal
        self.command: str | None = None
        super().__init__(step, signal)

    def __str__(self) -> str:
        return f"stopped {self._when()}{f'; to resume: {self.command}' if self.command else ''}"

    def _when(self) -> str:
        return "before its first step" if self.step is None else f"after step {self.step}"


class Finished(Stopped):
    """A run has taken its last step, though a signal asked it to end: no other may follow it."""

    def __init__(self, result: Any, signal: int):
        """The run returned ``result``; ``signal`` came too late for it."""
        super().__init__(None, signal)
        self.result = result

    def _when(self) -> str:
        return "as this run has finished"
