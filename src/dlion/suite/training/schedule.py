"""Learning rate schedules."""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def make_schedule(node: Any, optimizer: Optimizer, steps: int, done: int = 0) -> LambdaLR:
    """Warm up linearly, then follow half a cosine down to a share of the learning rate.

    Args:
        node: settings ``warmup_steps``, and ``final``, the share that is left at the end.
        optimizer: whose learning rates are those at the top of the schedule.
        steps: number of all steps.
        done: steps that were taken before, in the run that is resumed.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # LambdaLR asks for it in the middle of a run
    return LambdaLR(optimizer, share_of_rate(node, steps), last_epoch=done - 1)


def share_of_rate(node: Any, steps: int) -> Callable[[int], float]:
    """Return the function from a step to the share of the learning rate that it is taken with."""
    warmup, final = node.warmup_steps, node.final

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return share
