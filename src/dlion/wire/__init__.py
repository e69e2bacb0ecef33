"""Wires turn messages into bytes and back. They know nothing of workers."""

from dlion.wire.formats import Float32, Level, Sign, Sparse, Ternary, Wire

__all__ = ["Float32", "Level", "Sign", "Sparse", "Ternary", "Wire"]
