"""The optimizers, under the name that users of torch look for: those of :mod:`dlion.methods`."""

from typing import TYPE_CHECKING, Any

from dlion import methods

if TYPE_CHECKING:
    from dlion.methods import *  # noqa: F403

__all__ = [*methods.__all__]


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    return getattr(methods, name)
