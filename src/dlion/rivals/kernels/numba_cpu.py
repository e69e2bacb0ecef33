"""The passes of :mod:`dlion.rivals.kernels` on a CPU, compiled as those of :mod:`dlion.kernels`.

Where entries are chosen they run on one thread.
"""

import math
from typing import Any

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import NDArray
from torch import Tensor

from dlion.kernels.numba_tools import (
    SIZE,
    as_array,
    as_in,
    compiled,
    decay_and_rate,
    inlined,
    mask_of,
    on_threads,
    plane_of,
    split_words,
    to_float,
)

_NAN = np.uint32(0x7F800001)  # above the bits of infinity
_SAMPLE = 4096  # entries that tell which may be among the largest
_lowest: Any = trailing_zeros  # the number of the lowest bit that is set


def momentum_descent(params, buffer, answer, momentum, lr, weight_decay):
    factors = (float(momentum), float(lr), float(weight_decay))
    args = (as_array(params), buffer.numpy(), answer.numpy(), *factors)
    on_threads(_momentum_descent, args, len(params))


def descend_at(params, entries, lr, weight_decay):
    _descend_at(as_array(params), *_pairs(entries), float(lr), float(weight_decay))


def accumulate(velocity, accumulated, grad, momentum):
    args = (velocity.numpy(), accumulated.numpy(), as_array(grad), float(momentum))
    on_threads(_accumulate, args, len(velocity))


def largest(values, count):
    rows = values.view(-1, values.shape[-1]).numpy().view(np.uint32)
    return torch.from_numpy(_largest_of_rows(rows, count)).view(*values.shape[:-1], count)


def add_entries(total, entries):
    _add_entries(total.numpy(), *_pairs(entries))


def take_mean(total, count):
    entries = torch.empty(len(total), 2, dtype=torch.int32)
    return entries, torch.tensor(_take_mean(total.numpy(), count, *_pairs(entries)))


def ternarise(values, scales, coins):
    trits = torch.empty(len(values), dtype=torch.int8)
    args = (values.numpy(), scales.numpy(), coins.numpy(), trits.numpy())
    on_threads(_ternarise, args, len(values))
    return trits


def _pairs(entries: Tensor) -> tuple[NDArray, NDArray]:
    """Return entries as integers, of which the indices matter, and as float32, the values."""
    return entries.numpy(), entries.view(torch.float32).numpy()


@compiled
def _descend_at(params, indices, values, lr, weight_decay):
    decay, rate = decay_and_rate(lr, weight_decay)
    moved = np.empty(len(indices), params.dtype)
    for i in range(len(indices)):
        x = params[indices[i, 0]]
        moved[i] = as_in(params, to_float(x) * decay + values[i, 1] * rate)
    if decay != np.float32(1):
        for j in range(params.size):
            params[j] = as_in(params, to_float(params[j]) * decay)
    for i in range(len(indices)):
        params[indices[i, 0]] = moved[i]


@compiled
def _momentum_descent(params, buffer, answer, momentum, lr, weight_decay, start, stop):
    mu, (decay, rate) = np.float32(momentum), decay_and_rate(lr, weight_decay)
    for i in range(start, stop):
        buffer[i] = mu * buffer[i] + answer[i]
        params[i] = as_in(params, to_float(params[i]) * decay + buffer[i] * rate)


@compiled
def _accumulate(velocity, accumulated, grad, momentum, start, stop):
    mu = np.float32(momentum)
    for i in range(start, stop):
        velocity[i] = mu * velocity[i] + to_float(grad[i])
        accumulated[i] += velocity[i]


@compiled
def _largest_of_rows(rows, count):
    found = np.empty((len(rows), count), np.int64)
    for i in range(len(rows)):
        found[i] = _largest(rows[i], count)
    return found


@inlined
def _largest(values, count):
    bound = np.uint32(0)
    stride = max(8, values.size // _SAMPLE) | 1  # odd, lest only a few columns are looked at
    if values.size > 1024 and 4 * count < values.size:  # exact whatever a sample tells
        sample = np.minimum(values[::stride] & SIZE, _NAN)
        expected = count / stride  # in the sample; four standard deviations more, at least 4
        bound, _ = _threshold(sample, int(expected + 4 * math.sqrt(expected)) + 4)
    indices, sizes = _at_least(values, bound)
    if sizes.size < count:
        indices, sizes = _at_least(values, np.uint32(0))
    bound, ties = _threshold(sizes, count)
    found = 0
    for i in range(sizes.size):
        indices[found] = indices[i]
        tied = sizes[i] == bound and ties > 0
        found += sizes[i] > bound or tied
        ties -= tied
    return indices[:count]


@inlined
def _at_least(values, bound):
    """Return the indices of sizes from ``bound`` on, ascending, and these sizes.

    Sizes are those of float32, given by its bits, as integers; any NaN is the largest.
    """
    indices, sizes = np.empty(values.size, np.int64), np.empty(values.size, np.uint32)
    flags, found, parts = np.empty(64, np.uint8), 0, split_words(values, 0, values.size)
    for i in range(2):
        for s in range(0, parts[i].size, 64):
            v, first = parts[i][s : s + 64], i * parts[0].size + s
            for j in range(64):
                flags[j] = np.uint8(v[j] & SIZE >= bound)
            bits = plane_of(flags, 0) & mask_of(values.size - first)
            while bits:
                j = _lowest(bits)
                bits &= bits - np.uint64(1)
                indices[found], sizes[found] = first + j, min(v[j] & SIZE, _NAN)
                found += 1
    return indices[:found], sizes[:found]


@inlined
def _threshold(sizes, count):
    """Return the ``count``-th largest size, and how many of that size there are up to it."""
    size, rest = np.uint32(0), count
    for shift, digits in ((20, 11), (10, 10), (0, 10)):
        low, high = np.uint32(shift), np.uint32(shift + digits)
        frequencies, digit = np.zeros(1 << digits, np.int64), (1 << digits) - 1
        for other in sizes:
            if other >> high == size >> high:
                frequencies[other >> low & np.uint32(digit)] += 1
        while frequencies[digit] < rest:
            rest -= frequencies[digit]
            digit -= 1
        size |= np.uint32(digit) << low
    return size, rest


@compiled
def _add_entries(total, indices, values):
    for i in range(len(indices)):
        total[indices[i, 0]] += values[i, 1]


@compiled
def _take_mean(total, count, indices, values):
    found = 0
    for i in _at_least(total.view(np.uint32), np.uint32(1))[0]:
        value = total[i] / np.float32(count)
        total[i] = np.float32(0)
        indices[found, 0], values[found, 1] = i, value
        found += value != np.float32(0)
    return found


@compiled
def _ternarise(values, scales, coins, trits, start, stop):
    for i in range(start, stop):
        bound = coins[i] * scales[i]
        trits[i] = np.int8(values[i] > bound) - np.int8(-values[i] > bound)
