"""TernGrad: stochastic ternary gradients with a shared scale."""

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import Spans
from dlion.rivals.exchange.ternary import ScaledTernaryMean
from dlion.rivals.updates import momentum_descent
from dlion.values import NotNegative, Probability


class TernGrad(DistributedOptimizer):
    """TernGrad with momentum SGD.

    Worker i clips its gradient at ``clip`` standard deviations (per parameter tensor) and sends
    ``sign(g) * b`` with ``P(b = 1) = |g| / s``; the scale s of each tensor is the largest of all
    workers' ``max |g|``, agreed on first (4 bytes per tensor and worker). Everyone takes the mean
    times s: unbiased, and integers of ``ceil(log2(2 n + 1))`` bits on the way back.
    Source: Wen et al. 2017 (arXiv 1705.07878), Algorithm 1 with layer-wise ternarising, gradient
    clipping and scaler sharing. A worker with NaN in a tensor sends 0 for all of it.

    When not to use it: with few workers, as the noise of n coins is large beside the gradient, and
    where a step waits for latency, as the scales take another round.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        weight_decay: decoupled.
        clip: in standard deviations; 0 does not clip.
        seed: of the coins; each worker has its own stream.
    """

    shared_state = ["momentum_buffer"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.9,
        weight_decay: NotNegative = 0.0,
        clip: NotNegative = 2.5,
        **common: Unpack[Common],
    ):
        self.clip = clip
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """1.5 bits up, as often quoted (log2(3) is 1.58), and the count of the sum down."""
        return 1.5, math.log2(2 * self.workers.count + 1)

    def make_exchange(self, bucket: Bucket) -> ScaledTernaryMean:
        coins = self.seed, bucket.index
        sizes = bucket.sizes
        return ScaledTernaryMean(self.channel, bucket.numel, sizes, *coins, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        clipped, scales = clip_by_deviation(bucket.gradients(), bucket.spans, self.clip)
        bucket.exchange.encode(local, (clipped, scales))

    def update(self, bucket: Bucket) -> None:
        momentum_descent(bucket, bucket.exchange.decode())


def clip_by_deviation(grad: Tensor, spans: Spans, factor: float) -> tuple[Tensor, Tensor]:
    """TernGrad's clipping and scale: entries beyond ``factor`` standard deviations are cut.

    Returns the clipped gradient and ``max |g|`` of each parameter after clipping, ``[T]``; with
    NaN in a parameter, zeros and NaN for it.
    Source: Wen et al. 2017 (arXiv 1705.07878), sections 3.1 and 4; the deviation is the
    population's and a factor of 0 does not clip.
    """
    clipped = grad.clone()
    scales = []
    for start, stop in spans:
        part = clipped[start:stop]
        if factor and part.numel() > 1:
            bound = factor * part.std(correction=0)
            bound = bound.where(bound.isfinite(), torch.inf)
            torch.clamp(part, -bound, bound, out=part)
        extremes = torch.stack(part.aminmax()) if part.numel() else part.new_zeros(1)
        scale = extremes.abs().max()
        part.masked_fill_(scale.isnan(), 0)
        scales.append(scale)
    return clipped, torch.stack(scales)
