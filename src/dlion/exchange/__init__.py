"""Exchanges carry messages between workers and combine them. They know nothing of optimizers."""

from dlion.exchange.channel import Channel, Traffic, sum_in_order
from dlion.exchange.direct_send import (
    TIES,
    DenseMean,
    DirectSend,
    Exchange,
    LevelSum,
    SparseMean,
    TernarySum,
)

__all__ = [
    "TIES",
    "Channel",
    "DenseMean",
    "DirectSend",
    "Exchange",
    "LevelSum",
    "SparseMean",
    "TernarySum",
    "Traffic",
    "sum_in_order",
]
