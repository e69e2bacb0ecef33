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
from dlion.exchange.grid import Costs, Shape, Topology, grid_shape, measure_costs
from dlion.exchange.low_rank import LowRankMean, Matrix
from dlion.exchange.rounded import MEAN_WIRES, MeanWire, RoundedMean, make_mean
from dlion.exchange.scaled import Spans
from dlion.exchange.scaled_sign import ScaledSignMean, TrackingVote
from dlion.exchange.sparse import SparseMean
from dlion.exchange.switch import Switch
from dlion.exchange.ternary import ScaledTernaryMean, TernaryMean
from dlion.exchange.topk import CosineTopKMean, TopKMean
from dlion.exchange.vote import LevelMean, Ties, Vote, WeightedVote
from dlion.exchange.waits import Waits

__all__ = [
    "MEAN_WIRES",
    "Buffers",
    "Channel",
    "CosineTopKMean",
    "Costs",
    "DeltaVote",
    "DenseMean",
    "DirectSend",
    "Exchange",
    "LevelMean",
    "LowRankMean",
    "Matrix",
    "MeanWire",
    "PolarDeltaVote",
    "RoundedMean",
    "ScaledSignMean",
    "ScaledTernaryMean",
    "Shape",
    "Spans",
    "SparseMean",
    "Stages",
    "Switch",
    "TernaryMean",
    "Ties",
    "TopKMean",
    "Topology",
    "TrackingVote",
    "Traffic",
    "Vote",
    "Waits",
    "WeightedVote",
    "grid_shape",
    "is_broken",
    "make_mean",
    "measure_costs",
    "run_together",
    "sum_in_order",
]
