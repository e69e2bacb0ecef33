"""Exchanges carry messages between workers and combine them. They know nothing of optimizers."""

from dlion.exchange.channel import Channel, Traffic, sum_in_order
from dlion.exchange.direct_send import DenseMean, DirectSend, Exchange
from dlion.exchange.sparse import SparseMean
from dlion.exchange.ternary import ScaledTernaryMean, TernaryMean
from dlion.exchange.vote import TIES, LevelExchange, LevelMean, Vote, WeightedVote

__all__ = [
    "TIES",
    "Channel",
    "DenseMean",
    "DirectSend",
    "Exchange",
    "LevelExchange",
    "LevelMean",
    "ScaledTernaryMean",
    "SparseMean",
    "TernaryMean",
    "Traffic",
    "Vote",
    "WeightedVote",
    "sum_in_order",
]
