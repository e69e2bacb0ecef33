"""The specification of the passes of :mod:`dlion.kernels`, in plain torch for any device."""

import torch
from torch import Tensor

from dlion.kernels.rounding import random_bits
from dlion.kernels.steps import step_size
from dlion.wire import packing


def lion_direction(momentum: Tensor, grad: Tensor, beta1: float, beta2: float) -> Tensor:
    """Return ``u = b1 m + (1 - b1) g``, and update ``m <- b2 m + (1 - b2) g`` in place.

    This is Lion before the sign. With ``beta1 = beta2`` u is the new momentum, as in Signum.
    Source: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2; u uses the old momentum.
    """
    grad = grad.to(torch.float32)
    direction = momentum * beta1 + grad * (1 - beta1)
    momentum.mul_(beta2).add_(grad * (1 - beta2))
    return direction


def one_bit_sign(values: Tensor, positive: bool) -> Tensor:
    """Return signs as booleans; there is no zero: 0, -0.0 and NaN give ``positive``."""
    return ~(values < 0) if positive else values > 0


def encode_signs(message, momentum, gradients, beta1, beta2, positive):
    for start, part, grad in gradients.parts(momentum):
        signs = one_bit_sign(lion_direction(part, grad, beta1, beta2), positive)
        _write(message, start, signs.to(torch.uint8))


def measure(momentum, gradients, beta1, scale):
    parts = gradients.parts(momentum)
    return torch.stack([_scale(part, grad, beta1, scale) for _, part, grad in parts])


def _scale(momentum: Tensor, grad: Tensor, beta1: float, scale: str) -> Tensor:
    size = (momentum * beta1 + grad.to(torch.float32) * (1 - beta1)).abs()
    if size.numel() == 0:
        return size.new_zeros(())
    if scale == "l1":
        return size.mean(dtype=torch.float64).to(torch.float32)
    if scale == "max":
        return size.max()
    logarithms = size.double().log().where(size != 0, 0.0)
    return (logarithms.sum() / (size != 0).sum().clamp(min=1)).exp().to(torch.float32)


def encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest):
    parts = zip(gradients.parts(momentum), multipliers, strict=True)
    for (start, part, grad), multiplier in parts:
        direction = lion_direction(part, grad, beta1, beta2)
        levels = (direction * multiplier).nan_to_num(0.0, torch.inf, -torch.inf)
        levels = levels.clamp(-largest, largest).round_().add_(largest)
        _write(message, start, levels.to(torch.int32))


def sum_planes(rows, largest, out):
    out.copy_(packing.sum_planes(rows, largest))


def compare_sum(rows, largest, constant, greater, equal):
    masks = packing.compare_planes(packing.sum_planes(rows, largest), constant)
    greater.copy_(masks[0])
    equal.copy_(masks[1])


def pack_votes(greater, equal, out):
    length = 64 * greater.numel()
    more, same = (packing.unpack_bits(mask.view(torch.uint8), length) for mask in (greater, equal))
    out.copy_(packing.pack_trits(2 * more.to(torch.int8) + same.to(torch.int8) - 1))


def encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise):
    for start, part, grad in gradients.parts(momentum):
        direction = lion_direction(part, grad, beta1, beta2)
        direction = torch.nn.functional.pad(direction, (0, -len(direction) % 64))
        stop = start + len(direction)
        estimate, level = coder.estimate[start:stop], coder.level[start:stop]
        bits = direction >= estimate
        estimate += delta_steps(bits, level, coder.history[:, start // 64 : stop // 64], rise)
        _write(message, start, bits.to(torch.uint8))


def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    total, ahead = coders.estimate.new_zeros(2, coders.level.shape[-1])
    if weights is None:
        total = coders.estimate[0]
    for worker, row in enumerate(rows.tolist()):
        steps = torch.zeros_like(total)
        if row >= 0:
            bits = _read(messages[row : row + 1], len(total)) == 1
            steps = delta_steps(bits, coders.level[worker], coders.history[worker], rise)
        if weights is None:
            total += steps
            ahead += steps
        else:
            coders.estimate[worker] += steps
            total += weights[worker] * coders.estimate[worker]
            ahead += weights[worker] * steps
    # estimates lag behind what they follow by about a step; the latest steps say in which direction
    value = total + ahead * lookahead
    for mask, flags in ((positive, value > 0), (tied, value == 0)):
        _pack_into(mask, flags)


def delta_steps(bits: Tensor, level: Tensor, history: Tensor, rise: int) -> Tensor:
    """Adapt levels, uint8 ``[m]``, and history, int64 ``[2, m / 64]``, to new bits, bool ``[m]``.

    Returns the steps with their signs, float32 ``[m]``.
    """
    last, repeated = packing.unpack_bits(history.view(torch.uint8), len(bits))
    same = bits == last
    change = torch.where(same, torch.where(repeated, rise, 0), -1)
    level.copy_((level.to(torch.int32) + change).clamp(0, 255))
    _pack_into(history[0], bits)
    _pack_into(history[1], same)
    size = step_size(level)
    return torch.where(bits, size, -size)


def descend(params, answer, lr, weight_decay):
    change = answer * -lr  # torch's add_(alpha=) would round product and sum at once
    if params.dtype.itemsize < 4:
        params.copy_(params.to(torch.float32).mul_(1 - lr * weight_decay).add_(change))
    else:
        params.mul_(1 - lr * weight_decay).add_(change)


def apply_signs(params, answers, lr, weight_decay):
    votes = _read(answers.unsqueeze(1), params.numel())
    descend(params, votes.to(torch.float32) * 2 - 1, lr, weight_decay)


def apply_levels(params, answers, largest, lr, weight_decay):
    sums = _read(answers, params.numel())
    descend(params, sums.to(torch.float32) * (2 / largest) - 1, lr, weight_decay)


def apply_trits(params, answers, length, lr, weight_decay):
    trits = packing.unpack_trits(answers, length).flatten()[: params.numel()]
    descend(params, trits.to(torch.float32), lr, weight_decay)


def lion(params, momentum, grad, beta1, beta2, lr, weight_decay):
    direction = lion_direction(momentum, grad, beta1, beta2)
    descend(params, direction.sign_(), lr, weight_decay)


def round_at_random(params, values, key):
    bits = values.view(torch.int32)
    cut = (bits + random_bits(len(values), key, values.device)) & -0x10000
    params.copy_(cut.view(torch.float32).where(~values.isnan(), values))


def _pack_into(words: Tensor, flags: Tensor) -> None:
    words.copy_(packing.pack_bits(flags).view(torch.int64))


def _write(message: Tensor, start: int, values: Tensor) -> None:
    """Write unsigned integers ``[m]`` into a message from element ``start`` on."""
    _, planes, words = message.shape
    values = torch.nn.functional.pad(values, (0, -len(values) % 64))
    packed = packing.pack_planes(values, planes).view(torch.int64)
    word = start // 64 + torch.arange(packed.shape[1], device=packed.device)
    message[word // words, :, word % words] = packed.t()


def _read(message: Tensor, numel: int) -> Tensor:
    """Read the first ``numel`` unsigned integers of a message: int32 ``[numel]``."""
    planes = message.contiguous().view(torch.uint8)
    return packing.unpack_planes(planes, 8 * planes.shape[-1]).flatten()[:numel]
