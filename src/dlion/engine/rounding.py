"""Updates of bfloat16 parameters: float32 inside an update, rounded behind it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from dlion import kernels
from dlion.engine.bucket import Bucket
from dlion.streams import stream_seed

Rounding = Literal["nearest", "stochastic", "compensated", "kahan"]


class Rounder:
    """Rounds updated parameters, and warns where rounding loses most of an update."""

    def __init__(self, rounding: Rounding, seed: int) -> None:
        self._rounding, self._seed = rounding, seed
        self._warned = False

    @contextmanager
    def __call__(self, bucket: Bucket) -> Iterator[None]:
        """Let an update in here see the parameters of a bucket in float32, then round them."""
        step, params = bucket.step, bucket.params
        looks = not self._warned and step & (step + 1) == 0  # after 1, 2, 4, 8 ... steps
        if params.dtype != torch.bfloat16 or (self._rounding == "nearest" and not looks):
            yield
            return
        before = params.float()
        if self._rounding == "kahan":
            low = bucket.shared.setdefault("low", torch.zeros_like(params))
            before += low
        if self._rounding == "compensated":
            low = bucket.shared.setdefault("low", torch.zeros_like(params, dtype=torch.int16))
            before = (before.view(torch.int32) + low).view(torch.float32)
        values = bucket.params = before.clone()
        try:
            yield
        finally:
            bucket.params = params
        if self._rounding == "stochastic":
            seed = stream_seed(self._seed, "rounding", bucket.index, step)
            kernels.round_at_random(params, values, (seed & 0xFFFFFFFF, seed >> 32))
        elif self._rounding == "kahan":
            params.copy_(values)
            low.copy_(values - params)
        elif self._rounding == "compensated":
            params.copy_(values)
            low.copy_(values.view(torch.int32) - params.float().view(torch.int32))
        else:
            params.copy_(values)
            moved = values != before
            lost = moved & (params == before)
            if lost.sum() > moved.sum() / 2:
                self._warned = True
                warnings.warn(
                    f"step {step + 1} leaves {lost.sum() / moved.sum():.0%} of the bfloat16"
                    " parameters where they were", RuntimeWarning, stacklevel=2,
                )
