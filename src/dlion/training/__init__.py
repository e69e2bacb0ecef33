"""Training on n workers: the loop, and what it needs besides a model, data and an optimizer."""

from dlion.training.job import Job
from dlion.training.loop import train

__all__ = ["Job", "train"]
