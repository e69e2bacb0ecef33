"""The exceptions a user is meant to read."""


class UserError(ValueError):
    """A wrong value the person at the keyboard can mend.

    The message is one sentence: what was wrong, what is allowed, what to type. ``train.py`` prints
    it without a traceback and exits with code 2.
    """


class RunFailed(RuntimeError):
    """A run that started and did not finish; the message names the process and its error."""
