"""Training on n workers: the loop and its parts besides model, data and optimizer.

``Job`` and ``train`` are imported on first use: they need the packages of ``dlion[suite]``, which
other modules of this package do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.suite.training.job import Job
    from dlion.suite.training.loop import train

__all__ = ["Job", "train"]
_HOMES = {"Job": "dlion.suite.training.job", "train": "dlion.suite.training.loop"}


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` from its module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
