"""What an optimizer, or anything else, says to wrong input."""

from collections.abc import Callable
from typing import Any


def refused(make: Callable[[], Any]) -> str:
    """Return what an error says, or "accepted"."""
    try:
        make()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "accepted"
