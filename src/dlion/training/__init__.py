"""The training loop and what it needs."""

from dlion.training.loop import train

__all__ = ["train"]
