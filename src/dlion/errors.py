"""The exceptions a user is meant to read."""


class UserError(ValueError):
    """A wrong value the person at the keyboard can mend.

    The message is one sentence: what was wrong, what is allowed, what to type. ``train.py`` prints
    it without a traceback and exits with code 2.
    """


class RunFailed(RuntimeError):
    """A run that started and did not finish; the message names the process and its error."""

    def __init__(self, reason: str, leaving: bool = False):
        """``leaving``: it had been told to leave, and is not to be started again."""
        self.leaving = leaving
        super().__init__(reason)


class TrainingFailed(RunFailed):
    """Training that must not go on; one sentence says why, the place in the code says nothing."""


class Stopped(RuntimeError):
    """A run that saved what it had and ended before its last step; ``resume=auto`` goes on."""

    def __init__(self, step: int | None, signal: int | None = None):
        """``signal``: the one that asked for it, None if none did."""
        self.step, self.signal = step, signal
        when = "before its first step" if step is None else f"after step {step}"
        super().__init__(f"stopped {when}; the same command with resume=auto goes on")
