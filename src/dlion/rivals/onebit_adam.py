"""1-bit Adam: a variance from dense gradients, then momenta as scaled signs."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Unpack

import torch

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import DenseMean, ScaledSignMean
from dlion.methods.updates import adamw, wide
from dlion.rivals.exchange.switch import Switch
from dlion.values import Betas, Count, NotNegative


class OneBitAdam(DistributedOptimizer):
    """1-bit Adam: AdamW on float32 means for a while, then its momentum alone, in one bit.

    The first ``warmup_steps``, with the mean gradient g: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v +
    (1 - b2) g^2``. Then v stays as it is. Worker i: ``m_i = b1 m + (1 - b1) g_i``,
    ``r_i <- r_i + m_i``, sends ``c_i = mean|r_i| sign(r_i)``, ``r_i <- r_i - c_i``. The owner of a
    slice: ``e <- e + mean c_i``, answers ``m = mean|e| sign(e)``, ``e <- e - m``. Everyone, in both
    phases: ``x <- (1 - lr wd) x - lr m / (sqrt(v) + eps)``. Scales are means over pieces, as in
    :class:`EFSignSGD`, so results depend on the number of workers and on the buckets.
    Source: Tang et al. 2021 (arXiv 2102.02888), Algorithm 1.

    As in the paper and in DeepSpeed's OnebitAdam nothing corrects the bias of m and v: a short
    warm-up leaves a v that is too small by ``1 - b2^warmup_steps``, and all later steps too large
    by its root. Weight decay is decoupled, as DeepSpeed has it. Its scales differ: the root of the
    mean square, for a whole tensor on a worker, where the mean of sizes leaves less behind. And
    where v is 0, as no gradient came during the warm-up, nothing moves later: one bit has no zero,
    and a scale over eps is huge. DeepSpeed asks its users for a mask of such entries.

    Parameters that join later, unfrozen or in another group, warm up by themselves.

    Memory: 12 + 4 / n bytes of state a parameter (m, v and the residual on every worker, the error
    of the answer on its owner).

    When not to use it: for short trainings, as the warm-up is to be 15 to 20 % of the steps and is
    most of the bytes. Where some gradients come rarely (rows of embeddings), their v is small,
    while the scale is of all the tensor. With ``nonfinite=None`` a NaN spoils the scale, and
    the piece's residuals for ever.

    Args:
        lr: learning rate.
        betas: of m and v.
        eps: added to the root of v.
        weight_decay: decoupled.
        warmup_steps: at first, with float32 means, 64 bits a parameter.
    """

    own_state = ["residual"]
    shared_state = ["exp_avg", "exp_avg_sq"]
    skips_missing = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 1e-2,
        warmup_steps: Count = 100,
        **common: Unpack[Common],
    ):
        self.warmup_steps = warmup_steps
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """After the warm-up."""
        return 1, 1

    def make_exchange(self, bucket: Bucket) -> Switch:
        channel, buffers = self.channel, bucket.buffers
        signs = ScaledSignMean(channel, bucket.numel, bucket.spans, **buffers)
        # the bucket's steps, saved with the exchange; in main memory, as every step asks
        runs = torch.zeros(channel.workers.local, 1, dtype=torch.int64, device="cpu")
        signs.state["runs"], warmup = runs, self.warmup_steps
        means = partial(DenseMean, channel, signs.numel, **buffers)
        return Switch(means, signs, lambda: int(runs[0]) < warmup)

    def encode(self, bucket: Bucket, local: int) -> None:
        gradient = bucket.gradients()
        warming_up = bucket.exchange.use_first()
        if warming_up:
            bucket.exchange.encode(local, gradient)
            return
        residual = bucket.own["residual"][local]
        for segment in bucket.segments("betas"):
            part, beta1 = segment.part, segment.values[0][0]
            residual[part] += beta1 * bucket.shared["exp_avg"][part] + (1 - beta1) * gradient[part]
        residual -= bucket.exchange.encode(local, residual)

    def update(self, bucket: Bucket) -> None:
        vectors = bucket.params, bucket.shared["exp_avg"], bucket.shared["exp_avg_sq"]
        answer, warming_up = bucket.exchange.decode(), bucket.exchange.use_first()
        for segment in bucket.segments("lr", "betas", "eps", "weight_decay"):
            params, m, v = segment.of(*vectors)
            if warming_up:
                adamw(params, m, v, answer[segment.part], math.inf, *segment.values)
                continue
            lr, _, eps, weight_decay = segment.values
            torch.mul(answer[segment.part], v > 0, out=m)
            with wide(params) as x:
                x.mul_(1 - lr * weight_decay)
                x.addcdiv_(m, v.sqrt().add_(eps), value=-lr)
        bucket.exchange.state["runs"] += 1
