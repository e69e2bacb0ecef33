"""Learning rate schedules."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def make_schedule(node: Any, optimizer: Optimizer, steps: int) -> LambdaLR:
    """Linear warm-up, then half a cosine down to ``node.final`` of the learning rate."""
    warmup, final = node.warmup_steps, node.final

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


def set_step(schedule: LambdaLR, step: int) -> None:
    """Put a schedule where it is after ``step`` steps."""
    schedule.last_epoch = step
    pairs = zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True)
    for (group, base), factor in zip(pairs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)
