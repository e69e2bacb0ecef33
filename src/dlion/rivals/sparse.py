"""Methods whose workers send only their largest entries: Gradient Dropping and DGC."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.exchange import Spans
from dlion.extensions.shards import ShardedBucket
from dlion.kernels import descend
from dlion.methods.updates import descent, warm_up
from dlion.rivals import kernels
from dlion.rivals.exchange.sparse import SparseMean
from dlion.rivals.updates import momentum_descent
from dlion.values import NotNegative, Positive, PositiveShare, Probability, Whole


class SparseOptimizer(DistributedOptimizer):
    """Entries (index, value) up; their mean, sparse or dense, down; the rest is kept for later."""

    skips_missing = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        density: PositiveShare,
        **common: Unpack[Common],
    ):
        self.density = density
        super().__init__(params, defaults, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        """Values without their places up, and float32 for every entry down.

        So the caption of table 1 of arXiv 2404.00438 lets one count; its cells could not be read.
        """
        return 32 * self.density, 32

    def make_exchange(self, bucket: Bucket) -> SparseMean:
        return SparseMean(self.channel, bucket.numel, **bucket.buffers)

    def prepare(self) -> None:
        warm_up(self)


class GradDrop(SparseOptimizer):
    """Gradient Dropping with momentum SGD.

    Worker i: ``r_i <- r_i + g_i``; the ``density`` largest ``|r_i|`` of each parameter tensor are
    sent and removed from r_i. Everyone: SGD with momentum on the mean.
    Source: Aji and Heafield 2017 (arXiv 1704.05021), with exact instead of sampled thresholds and
    without a residual on the way back.

    When not to use it: with many workers, as the answer is the union of all entries: at 4 % and
    n = 32 it is nearly dense. :class:`DGC` corrects the momentum of late entries, this does not.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        weight_decay: decoupled.
        density: share of entries sent (the paper drops 99 %, arXiv 2404.00438 drops 96 %).
    """

    own_state = ["residual"]
    shared_state = ["momentum_buffer"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-2,
        momentum: Probability = 0.9,
        weight_decay: NotNegative = 0.0,
        density: PositiveShare = 0.04,
        **common: Unpack[Common],
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, **common)

    def encode(self, bucket: Bucket, local: int) -> None:
        residual = bucket.own["residual"][local]
        for _, part, grad in parts(bucket, "residual", local):
            part.add_(grad.to(torch.float32))
        indices = largest_entries(residual, bucket.spans, self.density)
        values = residual[indices]
        residual.index_fill_(0, indices, 0)  # a number that is assigned waits for a GPU
        bucket.exchange.encode(local, indices, values)

    def update(self, bucket: Bucket) -> None:
        momentum_descent(bucket, bucket.exchange.decode())


class DGC(SparseOptimizer):
    """Deep Gradient Compression.

    Worker i: clip g_i to norm ``clip_norm / sqrt(n)``; ``u_i <- mu u_i + g_i`` (momentum
    correction); ``v_i <- v_i + u_i``; the largest ``|v_i|`` of each parameter tensor are sent, and
    removed from v_i and u_i (momentum factor masking). Everyone: plain SGD on the mean.
    Source: Lin et al. 2018 (arXiv 1712.01887), Algorithms 1 and 2, with exact instead of sampled
    thresholds; vectors are sparsified like matrices.

    When not to use it: with many workers (see :class:`GradDrop`), or where two vectors of state a
    worker are too much memory. At a density of 0.1 % it sends less than one bit a parameter.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        weight_decay: decoupled.
        density: share of entries sent after the warm-up.
        warmup_steps: the density falls from 1 exponentially over so many steps.
        clip_norm: largest norm of the gradient over all workers; None: no limit. It needs the
            whole gradient, so one bucket and no shards.
    """

    own_state = ["velocity", "accumulated"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-1,
        momentum: Probability = 0.9,
        weight_decay: NotNegative = 0.0,
        density: PositiveShare = 0.04,
        warmup_steps: Whole = 0,
        clip_norm: Positive | None = None,
        **common: Unpack[Common],
    ):
        self.warmup_steps, self.clip_norm = warmup_steps, clip_norm
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, **common)

    def make_exchange(self, bucket: Bucket) -> SparseMean:
        if self.clip_norm is not None and isinstance(bucket, ShardedBucket):
            raise ValueError(
                f"clip_norm={self.clip_norm} needs the whole gradient, which FSDP has sharded here:"
                " give clip_norm=null (None)"
            )
        if self.clip_norm is not None and bucket.index > 0:
            raise ValueError(
                f"clip_norm={self.clip_norm} needs the whole gradient, which is in several buckets"
                " here: give bucket_cap_mb=null (None), parameters of one dtype, add no group, and"
                " unfreeze none"
            )
        return super().make_exchange(bucket)

    def encode(self, bucket: Bucket, local: int) -> None:
        velocity, accumulated = (bucket.own[name][local] for name in self.own_state)
        segments = bucket.segments("momentum")
        if self.clip_norm is None and bucket.device.type != "cuda":
            for segment in segments:
                for start, part, grad in bucket.grads(segment.slots).parts(velocity):
                    sums = accumulated[start : start + len(part)]
                    kernels.accumulate(part, sums, grad, *segment.values)
        else:
            grad = bucket.gradients()
            if self.clip_norm is not None:
                bound = self.clip_norm / math.sqrt(self.workers.count)
                grad.mul_((bound / grad.norm().clamp(min=1e-12)).clamp(max=1))
            for segment in segments:
                kernels.accumulate(*segment.of(velocity, accumulated, grad), *segment.values)
        indices = largest_entries(accumulated, bucket.spans, self._density(bucket.step))
        values = accumulated[indices]
        for vector in (accumulated, velocity):
            vector.index_fill_(0, indices, 0)
        bucket.exchange.encode(local, indices, values)

    def update(self, bucket: Bucket) -> None:
        segments = bucket.segments("lr", "weight_decay")
        if len(segments) > 1:
            descent(bucket, bucket.exchange.decode())
            return
        for part, answer in bucket.exchange.answers():
            apply = descend if answer.dtype == torch.float32 else kernels.descend_at
            apply(bucket.params[part], answer, *segments[0].values)

    def _density(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.density
        return self.density ** ((step + 1) / (self.warmup_steps + 1))


def largest_entries(values: Tensor, spans: Spans, density: float) -> Tensor:
    """Indices, ascending, of the ``ceil(density * size)`` largest magnitudes of each parameter.

    Exact, so that the size of a message is known; NaN counts as larger than everything (it is
    sent, not hidden), and of equal magnitudes the first are taken.
    """
    chosen = [
        kernels.largest(values[start:stop], math.ceil(density * (stop - start))).add_(start)
        for start, stop in spans
        if stop > start
    ]
    return torch.cat(chosen)


def parts(bucket: Bucket, name: str, local: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a start, a part of a worker's state from there on, and its gradients or zeros.

    That is each parameter by itself, and on a GPU, where a launch costs more than a copy, all of
    the bucket.
    """
    if bucket.device.type == "cuda":
        yield 0, bucket.own[name][local], bucket.gradients()
    else:
        yield from bucket.grads().parts(bucket.own[name][local])
