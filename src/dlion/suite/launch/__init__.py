"""Checks a configuration and starts its processes, or joins those of torchrun or SLURM."""
