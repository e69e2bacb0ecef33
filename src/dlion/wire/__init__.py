"""Wires turn messages into bytes and back. They know nothing of workers."""

from dlion.wire.formats import Float32, Level, ScaledSign, Sign, Sparse, Ternary, TopK, Wire
from dlion.wire.header import Header, Headers

__all__ = [
    "Float32",
    "Header",
    "Headers",
    "Level",
    "ScaledSign",
    "Sign",
    "Sparse",
    "Ternary",
    "TopK",
    "Wire",
]
