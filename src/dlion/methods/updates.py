"""Updates: application of the combined answer, in place on flat vectors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dlion import kernels
from dlion.core.bucket import Bucket, Segment
from dlion.core.layout import Member
from dlion.wire import Sign, Ternary


def descent(bucket: Bucket, answer: Tensor, update_scale: float = 1.0) -> None:
    """``x <- (1 - lr wd) x - update_scale lr a``: SGD."""
    for segment in bucket.segments("lr", "weight_decay"):
        kernels.descend(
            bucket.params[segment.part], answer[segment.part], *_scaled(segment, update_scale)
        )


def vote_descent(bucket: Bucket, update_scale: float = 1.0) -> None:
    """``x <- (1 - lr wd) x - update_scale lr D``, the vote D unpacked in the same pass."""
    params, exchange, segments = (
        bucket.params,
        bucket.exchange,
        bucket.segments("lr", "weight_decay"),
    )
    rates = [_scaled(segment, update_scale) for segment in segments]
    if isinstance(exchange.down, Sign):
        signs = exchange.answer.view(torch.int64)
        if len(segments) == 1:
            kernels.apply_signs(params, signs, *rates[0])
        else:
            edges = [*(segment.part.start for segment in segments), len(params)]
            kernels.apply_signs_by_run(params, signs, edges, rates)
    elif len(segments) > 1:
        descent(bucket, exchange.decode(), update_scale)
    elif isinstance(exchange.down, Ternary):
        kernels.apply_trits(params, exchange.answer, exchange.slice, *rates[0])
    else:
        sums = exchange.down.view(exchange.answer)
        kernels.apply_levels(params, sums, exchange.largest, *rates[0])


def _scaled(segment: Segment, update_scale: float) -> tuple[float, float]:
    """Return rate and decay with which kernels do ``(1 - lr wd) x - update_scale lr a``.

    A kernel multiplies its rate by its decay, so the decay is over the scale. Recorded runs have
    these two roundings: ``lr wd`` itself may differ from their product in the last bit.
    """
    lr, weight_decay = segment.values
    return update_scale * lr, weight_decay / update_scale


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
    for count, slots in counts(bucket.counters["step"], bucket.anywhere):
        for segment in bucket.segments("lr", "betas", "eps", "weight_decay", within=slots):
            x, m, v, a = segment.of(*vectors)
            adamw(x, m, v, a, count, *segment.values)


def variance_descent(bucket: Bucket, answer: Tensor) -> None:
    """``v <- b2 v + (1 - b2) a a``, ``x <- (1 - lr wd) x - lr a / (sqrt(v / (1 - b2^t)) + 1e-8)``.

    AdamW on an answer that is a first moment by itself.
    """
    vectors = bucket.params, bucket.shared["exp_avg_sq"], answer
    for count, slots in counts(bucket.counters["step"], bucket.anywhere):
        for segment in bucket.segments("lr", "betas", "weight_decay", within=slots):
            (params, v, a), (lr, (_, beta2), decay) = segment.of(*vectors), segment.values
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


def counts(counter: Tensor, here: list[bool]) -> list[tuple[int, slice]]:
    """Count a step for every parameter that has a gradient ``here``.

    Args:
        counter: of a bucket, float32 ``[T]`` in main memory.

    Returns:
        the counts, each with the slots that it holds for; absent parameters are left out where
        counts differ.
    """
    present = torch.tensor(here, device="cpu")
    counter += present
    known = set(counter[present].tolist())
    if len(known) <= 1:
        return [(int(count), slice(None)) for count in known]
    return [
        (int(count), slice(index, index + 1))
        for index, (count, here) in enumerate(zip(counter.tolist(), present, strict=True))
        if here
    ]


def warm_up(optimizer: Any) -> None:
    """Take a step with a parameter of its own, which compiles the kernels of a method."""
    values = torch.nn.Parameter(torch.zeros(8, 8))
    bucket = Bucket(0, [Member(values, "", optimizer.param_groups[0])])
    bucket.allocate(optimizer.make_exchange(bucket), optimizer)
    for local in range(optimizer.workers.local):
        optimizer.encode(bucket, local)
    bucket.exchange.run(0)
    bucket.anywhere = [True]
    optimizer.update(bucket)
