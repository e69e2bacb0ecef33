"""TernGrad: stochastic ternary gradients with a shared scale."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dlion.exchange import TernarySum
from dlion.flat import Bucket
from dlion.optim.base import DistributedOptimizer
from dlion.optim.rules import clip_by_deviation, ternarise
from dlion.optim.updates import momentum_descent
from dlion.streams import stream
from dlion.workers import Workers


class TernGrad(DistributedOptimizer):
    """TernGrad with momentum SGD.

    Worker i clips its gradient at ``clip`` standard deviations (per parameter tensor) and says
    ``sign(g) * b`` with ``P(b = 1) = |g| / s``; the scale s of each tensor is the largest of all
    workers' ``max |g|``, agreed on first (4 bytes per tensor and worker). Everyone takes the mean
    times s: unbiased, and integers of ``ceil(log2(2 n + 1))`` bits on the way back.
    Source: Wen et al. 2017 (arXiv 1705.07878), Algorithm 1 with layer-wise ternarising, gradient
    clipping and scaler sharing. NaN says 0.

    Args:
        lr, momentum, weight_decay: of SGD; the decay is decoupled.
        clip: in standard deviations; 0 does not clip.
        seed: of the coins; each worker has its own stream.
    """

    shared_state = ["momentum_buffer"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        clip: float = 2.5,
        *,
        workers: Workers | None = None,
        seed: int = 0,
    ):
        self.clip = clip
        self._clipped: list[Tensor] = []
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, workers, seed)

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 1.5, math.log2(2 * self.workers.count + 1)

    def make_exchange(self, bucket: Bucket) -> TernarySum:
        return TernarySum(self.channel, bucket.numel, bucket.header_bytes)

    def prepare(self, bucket: Bucket, step: int) -> None:
        pairs = [clip_by_deviation(grad, bucket.spans, self.clip) for grad in bucket.grads]
        self._clipped = [clipped for clipped, _ in pairs]
        local = torch.stack([scales for _, scales in pairs])
        everyone = self.channel.gather(local.view(torch.uint8)).view(torch.float32)
        sizes = torch.tensor([stop - start for start, stop in bucket.spans], device=local.device)
        scales = everyone.nan_to_num(0.0).amax(0).repeat_interleave(sizes)
        padding = len(bucket.params) - len(scales)
        self._scales = torch.nn.functional.pad(scales, (0, padding))

    def speak(self, bucket: Bucket, i: int, step: int) -> tuple[Tensor, ...]:
        worker, place = self.workers.ids[i], self.buckets.index(bucket)
        coins = stream(self.seed, "terngrad", worker, place, step, device=self._scales.device)
        return (ternarise(self._clipped[i], self._scales, coins),)

    def update(self, bucket: Bucket, answer: Tensor, step: int) -> None:
        group = bucket.group
        momentum_descent(
            bucket.params,
            bucket.shared["momentum_buffer"],
            answer.mul_(self._scales),
            group["lr"],
            group["momentum"],
            group["weight_decay"],
        )
