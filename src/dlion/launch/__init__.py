"""Checks a configuration and starts its processes, or joins those of torchrun or SLURM."""

from dlion.launch import cli
from dlion.launch.runner import launch

__all__ = ["cli", "launch"]
