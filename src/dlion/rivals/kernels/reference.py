"""The specification of the passes of :mod:`dlion.rivals.kernels`, in plain torch for any device."""

import math

import torch
from torch import Tensor

from dlion.kernels.reference import descend
from dlion.rivals.wire import Sparse


def descend_at(params, entries, lr, weight_decay):
    indices, values = _unzip(entries)
    moved = params[indices]
    descend(moved, values, lr, weight_decay)
    if weight_decay:
        params.mul_(1 - lr * weight_decay)  # adding -lr * 0.0, which is -0.0, changes nothing
    params[indices] = moved


def momentum_descent(params, buffer, answer, momentum, lr, weight_decay):
    buffer.mul_(momentum).add_(answer)
    descend(params, buffer, lr, weight_decay)


def accumulate(velocity, accumulated, grad, momentum):
    velocity.mul_(momentum).add_(grad.to(torch.float32))
    accumulated.add_(velocity)


def largest(values, count):
    sizes = (values.view(torch.int32) & 0x7FFFFFFF).clamp_(max=0x7F800001)  # any NaN is the largest
    bound = sizes.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, tied = sizes > bound, sizes == bound
    chosen = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    shape = *values.shape[:-1], count
    found = torch.nonzero_static(chosen, size=math.prod(shape))  # a GPU's host need not count them
    return found[:, -1].view(shape)


def add_entries(total, entries):
    indices, values = _unzip(entries)
    total[indices] += values


def take_mean(total, count):
    mean = total / count
    total.zero_()
    found = mean.count_nonzero()
    indices = torch.nonzero_static(mean, size=len(mean), fill_value=0).squeeze(-1)
    values = mean[indices].where(torch.arange(len(mean), device=mean.device) < found, 0.0)
    return Sparse().encode((indices, values)).view(torch.int32).view(-1, 2), found


def ternarise(values, scales, coins):
    return (values.sign() * (coins * scales < values.abs())).nan_to_num_(0.0).to(torch.int8)


def _unzip(entries: Tensor) -> tuple[Tensor, Tensor]:
    return Sparse().decode(entries.view(torch.uint8), len(entries))
