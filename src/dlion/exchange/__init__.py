"""Exchanges carry messages between workers and combine them. They know nothing of optimizers."""

from dlion.exchange.channel import Channel, Traffic, is_broken, sum_in_order
from dlion.exchange.delta import DeltaVote, PolarDeltaVote
from dlion.exchange.direct_send import (
    Buffers,
    DenseMean,
    DirectSend,
    Exchange,
    Stages,
    run_together,
)
from dlion.exchange.grid import Shape, Topology, make_sum
from dlion.exchange.rounded import MEAN_WIRES, MeanWire, RoundedMean, make_mean
from dlion.exchange.scaled import Spans
from dlion.exchange.scaled_sign import ScaledSignMean
from dlion.exchange.vote import LevelMean, Ties, Vote, WeightedVote

__all__ = [
    "MEAN_WIRES",
    "Buffers",
    "Channel",
    "DeltaVote",
    "DenseMean",
    "DirectSend",
    "Exchange",
    "LevelMean",
    "MeanWire",
    "PolarDeltaVote",
    "RoundedMean",
    "ScaledSignMean",
    "Shape",
    "Spans",
    "Stages",
    "Ties",
    "Topology",
    "Traffic",
    "Vote",
    "WeightedVote",
    "is_broken",
    "make_mean",
    "make_sum",
    "run_together",
    "sum_in_order",
]
