"""The training loop and what it needs."""

from dlion.training.job import Job
from dlion.training.loop import train

__all__ = ["Job", "train"]
