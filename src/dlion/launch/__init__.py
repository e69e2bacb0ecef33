"""From a configuration to running processes: by itself, under torchrun, or under SLURM."""

from dlion.launch import cli
from dlion.launch.runner import launch

__all__ = ["cli", "launch"]
