"""What every fused pass computes, in plain torch, on any device and dtype.

This is the specification. The compiled kernels give the same bits, rounding included: each product
and each sum is rounded to float32 by itself (no fused multiply-add), bfloat16 gradients are widened
first, bfloat16 parameters are rounded once, to nearest even, at the end. Only :func:`measure` adds
in an order of its own.

Messages are 64-bit words, one row for each owner of a slice of ``64 * words`` parameters; an
integer of p bits takes p planes of ``words`` words (:mod:`dlion.wire.reference`).
"""

import torch
from torch import Tensor

from dlion.wire import packing as wire


def lion_direction(momentum: Tensor, grad: Tensor, beta1: float, beta2: float) -> Tensor:
    """Lion before the sign: ``u = b1 m + (1 - b1) g``, then ``m <- b2 m + (1 - b2) g`` in place.

    Source: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2; u uses the old momentum. With
    ``beta1 = beta2`` u is the new momentum, which is what Signum says.
    """
    grad = grad.to(torch.float32)
    direction = momentum * beta1 + grad * (1 - beta1)
    momentum.mul_(beta2).add_(grad * (1 - beta2))
    return direction


def one_bit_sign(values: Tensor, positive: bool) -> Tensor:
    """Signs as booleans. One bit has no zero: 0, -0.0 and NaN are as ``positive`` says."""
    return ~(values < 0) if positive else values > 0


def encode_signs(
    out: Tensor,
    at: int,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    positive: bool,
    words: int,
) -> None:
    """Update a worker's momentum and write the signs of its Lion direction, in one pass.

    Args:
        out: the message, int64 ``[n, at least words]``.
        at: where these parameters start in it, a multiple of 64. Bits up to the next multiple of
            64 after their end become zero.
        momentum: float32 ``[m]``, updated in place; grad: ``[m]``.
        positive: what 0, -0.0 and NaN say.
        words: of a row of ``out`` that hold signs.
    """
    direction = lion_direction(momentum, grad, beta1, beta2)
    _write(out, at, words, wire.pack_bits(_whole(one_bit_sign(direction, positive))))


def measure(momentum: Tensor, grad: Tensor, beta1: float, scale: str) -> Tensor:
    """The scale of a parameter's direction u: float32, one element.

    ``l1``: the mean of ``|u|``; ``max``: its maximum; ``geometric``: its geometric mean over the
    entries that are not zero. Sums are in float64. NaN if any entry is NaN.
    """
    size = (momentum * beta1 + grad.to(torch.float32) * (1 - beta1)).abs()
    if size.numel() == 0:
        return size.new_zeros(())
    if scale == "l1":
        return size.mean(dtype=torch.float64).to(torch.float32)
    if scale == "max":
        return size.max()
    logarithms = size.double().log().where(size != 0, 0.0)
    return (logarithms.sum() / (size != 0).sum().clamp(min=1)).exp().to(torch.float32)


def encode_levels(
    out: Tensor,
    at: int,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    multiplier: Tensor,
    largest: int,
    words: int,
) -> None:
    """Update the momentum and write ``clip(round(u * multiplier), -largest, largest) + largest``.

    Halves round to even; NaN says the middle level, which abstains. As :func:`encode_signs`
    otherwise; ``multiplier``: float32, one element, on the same device.
    """
    direction = lion_direction(momentum, grad, beta1, beta2)
    levels = (direction * multiplier).nan_to_num(0.0, torch.inf, -torch.inf)
    levels = levels.clamp(-largest, largest).round_().add_(largest).to(torch.int32)
    planes = (2 * largest).bit_length()
    for b, plane in enumerate(wire.pack_planes(_whole(levels), planes)):
        _write(out[:, b * words :], at, words, plane)


def sum_planes(rows: Tensor, at: int, words: int, planes: int, largest: int, out: Tensor) -> None:
    """Add n messages: planes at ``at`` of int64 ``[n, any]`` -> ``[q * words]``, planes of the sum.

    Args:
        rows: the messages; those to add are ``rows[:, at : at + planes * words]``.
        largest: the largest value of one message.
    """
    out.copy_(_sum(rows, at, words, planes, largest).flatten())


def compare_sum(
    rows: Tensor,
    at: int,
    words: int,
    planes: int,
    largest: int,
    constant: int,
    greater: Tensor,
    equal: Tensor,
) -> None:
    """As :func:`sum_planes`, but compare each sum with a constant: bit masks, int64 ``[words]``."""
    masks = wire.compare_planes(_sum(rows, at, words, planes, largest), constant)
    greater.copy_(masks[0])
    equal.copy_(masks[1])


def pack_votes(greater: Tensor, equal: Tensor, out: Tensor) -> None:
    """Masks ``[words]`` as trits, 1 greater, 0 equal, -1 less: uint8 ``[ceil(64 words / 5)]``."""
    length = 64 * greater.numel()
    more, same = (wire.unpack_bits(mask.view(torch.uint8), length) for mask in (greater, equal))
    out.copy_(wire.pack_trits(2 * more.to(torch.int8) + same.to(torch.int8) - 1))


def descend(params: Tensor, answer: Tensor, lr: float, weight_decay: float) -> None:
    """``x <- (1 - lr wd) x - lr a`` for a float32 answer, which is used up; decoupled decay."""
    change = answer.mul_(-lr)
    if params.dtype == torch.float32:
        params.mul_(1 - lr * weight_decay).add_(change)
    else:
        params.copy_(params.to(torch.float32).mul_(1 - lr * weight_decay).add_(change))


def lion(
    params: Tensor,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
) -> None:
    """A step of Lion itself, on a float32 gradient; the sign of 0 and of NaN is 0."""
    direction = lion_direction(momentum, grad, beta1, beta2)
    descend(params, direction.sign_(), lr, weight_decay)


def apply_signs(params: Tensor, answers: Tensor, lr: float, weight_decay: float) -> None:
    """Decode votes and apply them to ``[m]`` parameters: answers int64 ``[n, words]``."""
    votes = wire.unpack_bits(answers.contiguous().view(torch.uint8).flatten(), params.numel())
    descend(params, votes.to(torch.float32) * 2 - 1, lr, weight_decay)


def apply_levels(
    params: Tensor, answers: Tensor, largest: int, lr: float, weight_decay: float
) -> None:
    """Decode sums v, 0 to ``largest``, and apply ``2 v / largest - 1``: ``[n, planes * words]``."""
    planes = answers.contiguous().view(torch.uint8).unflatten(-1, (largest.bit_length(), -1))
    sums = wire.unpack_planes(planes, 8 * planes.shape[-1]).flatten()[: params.numel()]
    descend(params, sums.to(torch.float32) * (2 / largest) - 1, lr, weight_decay)


def apply_trits(
    params: Tensor, answers: Tensor, length: int, lr: float, weight_decay: float
) -> None:
    """Decode trits and apply them: uint8 ``[n, ceil(length / 5)]``, ``length`` values a row."""
    trits = wire.unpack_trits(answers, length).flatten()[: params.numel()]
    descend(params, trits.to(torch.float32), lr, weight_decay)


def _sum(rows: Tensor, at: int, words: int, planes: int, largest: int) -> Tensor:
    chosen = rows[:, at : at + planes * words].contiguous()
    return wire.sum_planes(chosen.unflatten(-1, (planes, words)), largest)


def _whole(values: Tensor) -> Tensor:
    """Padded with zeros to whole words."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % 64))


def _write(out: Tensor, at: int, words: int, packed: Tensor) -> None:
    """Put packed bits, whole words, where a message has them: rows of ``words`` words."""
    start, packed = at // 64, packed.view(torch.int64)
    while packed.numel():
        row, place = divmod(start, words)
        part = packed[: words - place]
        out[row, place : place + len(part)] = part
        start, packed = start + len(part), packed[len(part) :]
