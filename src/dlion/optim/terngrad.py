"""TernGrad: stochastic ternary gradients with a shared scale."""

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from dlion.exchange import TernarySum
from dlion.optim.base import Common, DistributedOptimizer
from dlion.optim.bucket import Bucket
from dlion.optim.rules import clip_by_deviation, ternarise
from dlion.optim.updates import momentum_descent
from dlion.streams import stream


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
        **common: Unpack[Common],
    ):
        self.clip = clip
        self._clipped: dict[tuple[Bucket, int], tuple[Tensor, Tensor]] = {}
        self._scales: dict[Bucket, Tensor] = {}
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        return 1.5, math.log2(2 * self.workers.count + 1)

    def make_exchange(self, bucket: Bucket) -> TernarySum:
        return TernarySum(self.channel, bucket.numel, bucket.header_bytes, bucket.device)

    def speak(self, bucket: Bucket, exchange: TernarySum, i: int, step: int) -> None:
        self._clipped[bucket, i] = clip_by_deviation(bucket.gradients(), bucket.spans, self.clip)

    def agree(self, bucket: Bucket, exchange: TernarySum, step: int) -> None:
        workers, place = self.workers, self.buckets.index(bucket)
        pairs = {i: self._clipped.pop((bucket, i)) for i in self.channel.local_participants}
        local = torch.zeros(workers.local, len(bucket.spans), device=bucket.device)
        for i, (_, scales) in pairs.items():
            local[i] = scales
        everyone = self.channel.gather(local.view(torch.uint8)).view(torch.float32)
        scales = bucket.spread(everyone.nan_to_num(0.0).amax(0))
        for i, (clipped, _) in pairs.items():
            if clipped.is_cuda:  # it was made on the stream of the backward pass
                clipped.record_stream(torch.cuda.current_stream())
            worker = workers.ids[i]
            coins = stream(self.seed, "terngrad", worker, place, step, device=scales.device)
            exchange.post(i, ternarise(clipped, scales, coins))
        self._scales[bucket] = scales

    def update(
        self, bucket: Bucket, exchange: TernarySum, answers: list[Tensor], step: int
    ) -> None:
        group = bucket.group
        momentum_descent(
            bucket.params,
            bucket.shared["momentum_buffer"],
            exchange.read(answers).mul_(self._scales[bucket]),
            group["lr"],
            group["momentum"],
            group["weight_decay"],
        )
