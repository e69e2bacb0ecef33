"""Updates: application of the combined answer, in place on flat vectors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket


def momentum_descent(bucket: Bucket, answer: Tensor) -> None:
    """``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``: SGD with momentum."""
    buffer = bucket.shared["momentum_buffer"]
    for run in bucket.runs("momentum", "lr", "weight_decay"):
        kernels.momentum_descent(*run.of(bucket.params, buffer, answer), *run.values)


def descent(bucket: Bucket, answer: Tensor, scale: float = 1.0) -> None:
    """``x <- (1 - lr wd) x - scale lr a``: SGD."""
    for run in bucket.runs("lr", "weight_decay"):
        lr, decay = run.values
        kernels.descend(bucket.params[run.part], answer[run.part], scale * lr, decay / scale)


def nesterov(x: Tensor, buffer: Tensor, answer: Tensor, lr: float, momentum: float) -> None:
    """``b <- mu b + a``, ``x <- x - lr (a + mu b)``, as torch.optim.SGD with ``nesterov``."""
    buffer.mul_(momentum).add_(answer)
    x.sub_(lr * (answer + momentum * buffer))


def adamw(
    params: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    answer: Tensor,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW; steps count from 1.

    With ``step=math.inf`` there is no bias correction.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(answer, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(answer, answer, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    with wide(params) as x:
        x.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def adamw_descent(bucket: Bucket, answer: Tensor) -> None:
    """:func:`adamw` on an answer, with the steps of each parameter."""
    vectors = bucket.params, bucket.shared["exp_avg"], bucket.shared["exp_avg_sq"], answer
    for count, slots in bucket.count("step"):
        for run in bucket.runs("lr", "betas", "eps", "weight_decay", within=slots):
            x, m, v, a = run.of(*vectors)
            adamw(x, m, v, a, count, *run.values)


def variance_descent(bucket: Bucket, answer: Tensor) -> None:
    """``v <- b2 v + (1 - b2) a a``, ``x <- (1 - lr wd) x - lr a / (sqrt(v / (1 - b2^t)) + 1e-8)``.

    AdamW on an answer that is a first moment by itself.
    """
    vectors = bucket.params, bucket.shared["exp_avg_sq"], answer
    for count, slots in bucket.count("step"):
        for run in bucket.runs("lr", "betas", "weight_decay", within=slots):
            (params, v, a), (lr, (_, beta2), decay) = run.of(*vectors), run.values
            v.mul_(beta2).addcmul_(a, a, value=1 - beta2)
            denominator = v.sqrt().div_(math.sqrt(1 - beta2**count)).add_(1e-8)
            with wide(params) as x:
                x.mul_(1 - lr * decay).addcdiv_(a, denominator, value=-lr)


@contextmanager
def wide(params: Tensor) -> Iterator[Tensor]:
    """Give parameters in float32 or better, to be changed: in bfloat16, 1 - lr wd would be 1."""
    x = params if params.dtype in (torch.float32, torch.float64) else params.float()
    yield x
    if x is not params:
        params.copy_(x)
