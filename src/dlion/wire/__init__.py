"""Wires turn messages into bytes and back. They know nothing of workers."""

from dlion.wire.formats import (
    BFloat16,
    Float32,
    Level,
    ScaledInt8,
    ScaledSign,
    Sign,
    Ternary,
    Wire,
)

__all__ = [
    "BFloat16",
    "Float32",
    "Level",
    "ScaledInt8",
    "ScaledSign",
    "Sign",
    "Ternary",
    "Wire",
]
