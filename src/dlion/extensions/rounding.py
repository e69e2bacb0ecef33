"""Rounding of updated parameters to bfloat16, and a warning where it loses the updates."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket
from dlion.extensions.protocol import Extension
from dlion.streams import stream_seed


class Rounding(Extension):
    """Rounds the bfloat16 parameters that an update has moved.

    Args:
        stochastic: round up or down at random, the same on all workers; else to the nearest.
    """

    def __init__(self, stochastic: bool) -> None:
        self._stochastic = stochastic
        self._looked = stochastic  # whether rounding is known to lose nothing, or too much
        self._moved: list[Tensor] = []  # entries that updates of this step have moved, by bucket
        self._lost: list[Tensor] = []  # those of them that rounding puts back

    def around_update(self, bucket: Bucket) -> AbstractContextManager[Any]:
        return self._round(bucket) if bucket.dtype == torch.bfloat16 else nullcontext()

    @contextmanager
    def _round(self, bucket: Bucket) -> Iterator[None]:
        """Let an update in here move parameters in float32, then round them.

        Updates round to the nearest by themselves. This is looked at after 1, 2, 4, 8 ... steps.
        """
        step, params = bucket.step, bucket.params
        looks = not self._looked and step & (step + 1) == 0
        if not (self._stochastic or looks):
            yield
            return
        values = bucket.params = params.float()
        try:
            yield
        finally:
            bucket.params = params
        if self._stochastic:
            seed = stream_seed(self.optimizer.seed, "rounding", bucket.index, step)
            kernels.round_at_random(params, values, (seed & 0xFFFFFFFF, seed >> 32))
            return
        moved, rounded = values != params, values.to(params.dtype)
        moved = moved[: bucket.numel] & bucket.mask  # gaps between parameters do not count
        self._moved.append(moved.sum())
        self._lost.append((moved & (rounded == params)[: bucket.numel]).sum())
        params.copy_(rounded)

    def after_step(self, counts: bool) -> None:
        """Warn, once, if rounding has put back most of what the updates of this step moved."""
        if not self._moved:
            return
        moved, lost = (int(sum(map(int, counts))) for counts in (self._moved, self._lost))
        self._moved.clear(), self._lost.clear()
        if 2 * lost > moved:
            self._looked = True
            warnings.warn(
                f"rounding to bfloat16 loses {lost / moved:.0%} of the updates: most are below half"
                " a unit in the last place of their parameter, which so stays as it is: give"
                " stochastic_rounding=True (precision=bf16_stochastic of train.py), or keep"
                " parameters in float32 and use torch.autocast",
                RuntimeWarning,
                stacklevel=2,
            )
