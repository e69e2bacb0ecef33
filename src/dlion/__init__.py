"""Distributed Lion, Lion Cub and their baselines over really packed messages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.training.weights import load_model

__version__ = "0.1.0"
__all__ = ["load_model"]


def __getattr__(name: str) -> Any:
    """Import what takes seconds to import when it is asked for."""
    if name == "load_model":
        from dlion.training.weights import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
