"""Learning rate schedules."""

import math
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
    warmup, final = node.warmup_steps, node.final

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # LambdaLR asks for it in the middle of a run
    return LambdaLR(optimizer, factor, last_epoch=done - 1)
