"""The exceptions that are written for the user."""


class UserError(ValueError):
    """A wrong value that the user can correct.

    The message is one sentence: what was wrong, what is allowed, what to type. ``train.py`` and
    ``dlion`` print it without a traceback and exit with code 2.
    """


class RunFailed(RuntimeError):
    """Something failed that had begun, with exit code 1; the message says what, and why."""

    def __init__(self, reason: str, leaving: bool = False):
        """With ``leaving`` a signal had asked the run to end, and it must not be restarted."""
        self.leaving = leaving
        super().__init__(reason)


class TrainingFailed(RunFailed):
    """Training must stop; the message is enough, and no traceback is shown."""


class Stopped(RuntimeError):
    """A run ended with a checkpoint before its last step; ``resume=auto`` continues it.

    Attributes:
        command: what to type to go on, where that is known.
    """

    def __init__(self, step: int | None, signal: int | None = None):
        """The run ended after ``step`` (None: before the first), because of ``signal`` if any."""
        self.step, self.signal = step, signal
        self.command: str | None = None
        super().__init__(step, signal)

    def __str__(self) -> str:
        when = "before its first step" if self.step is None else f"after step {self.step}"
        return f"stopped {when}{f'; to go on: {self.command}' if self.command else ''}"
