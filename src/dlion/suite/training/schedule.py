"""Learning rate schedules."""

import math
from collections.abc import Callable
from typing import Any


def share_of_rate(node: Any, steps: int) -> Callable[[int], float]:
    """Return the function from a step to the share of the learning rate that it is taken with.

    It rises linearly, then follows half a cosine down to what is left at the end.

    Args:
        node: settings ``warmup_steps``, and ``final``, the share that is left at the end.
        steps: number of all steps.
    """
    warmup, final = node.warmup_steps, node.final

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return share
