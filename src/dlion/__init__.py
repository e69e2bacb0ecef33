"""Distributed Lion, Lion Cub and their baselines over really packed messages."""

__version__ = "0.1.0"
