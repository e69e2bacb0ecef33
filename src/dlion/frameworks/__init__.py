"""Integrations: frameworks' checkpoints hold process 0's optimizer, these every worker's.

``accelerate``, ``transformers`` and ``lightning`` here import the framework of that name, and
nothing else of the library imports them. Other loops use :class:`WorkerFiles`.
"""

from collections.abc import Iterable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from dlion.checks import wrappers
from dlion.core.optimizer import DistributedOptimizer
from dlion.frameworks.worker_files import WorkerFiles as WorkerFiles


def ours(optimizers: Iterable[Any]) -> list[DistributedOptimizer]:
    """Return the optimizers of this library among those of a framework, which wraps them."""
    found = []
    for optimizer in optimizers:
        while not isinstance(optimizer, DistributedOptimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            found.append(optimizer)
    return found


def silence(optimizer: DistributedOptimizer) -> None:
    """Let DistributedDataParallel around an optimizer's model send no gradients."""
    for wrapper in wrappers(optimizer.params):
        wrapper.register_comm_hook(None, noop_hook)
