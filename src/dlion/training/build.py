"""From config nodes to objects."""

from typing import Any

import hydra
from torch import nn

from dlion.optim import DistributedOptimizer
from dlion.workers import Workers


def make_optimizer(
    node: Any, model: nn.Module, workers: Workers, seed: int
) -> DistributedOptimizer:
    """The optimizer of a config node (``name`` is for the records) for a model."""
    options = {key: value for key, value in node.items() if key != "name"}
    make = hydra.utils.instantiate(options, _partial_=True)
    return make(model.named_parameters(), workers=workers, seed=seed)
