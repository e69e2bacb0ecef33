"""The passes of :mod:`dlion.kernels` on a CPU, compiled by Numba at first use and cached on disk.

Each works through memory once, 64 values (one word of a message) at a time, a fixed length that
LLVM turns into straight vector code. The bits are those of the reference: there is no fast-math, so
nothing is contracted or reordered. Long vectors are cut over as many threads as torch uses, and no
bit depends on how many they are.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlion.kernels import rounding, steps
from dlion.kernels.gradients import Gradients
from dlion.kernels.numba_tools import (
    BLOCK,
    ONES,
    SIZE,
    as_array,
    as_in,
    compiled,
    decay_and_rate,
    inlined,
    keep_rest,
    mask_of,
    on_threads,
    plane_of,
    split_words,
    to_float,
)

_ZERO = np.uint64(0)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer
_ONE, _SIGN = np.uint32(1), np.uint32(31)
_INF = np.uint32(0x7F800000)
_PLACE, _MIX = np.uint32(rounding.PLACE), tuple(map(np.uint32, rounding.MIX))
_SHIFT, _BASE = np.uint32(steps.SHIFT), np.uint32(steps.BASE)


def encode_signs(message, momentum, gradients, beta1, beta2, positive):
    target, factors = message.numpy(), (float(beta1), float(beta2), positive)
    for first, part, grad in _pieces(gradients, momentum):
        on_threads(_encode_signs, (target, first, part, grad, *factors), len(part))


def measure(momentum, gradients, beta1, scale):
    pieces = _pieces(gradients, momentum)
    scales = [_scale(part, grad, beta1, scale) for _, part, grad in pieces]
    return torch.tensor(scales, dtype=torch.float32)


def _scale(momentum: NDArray, grad: NDArray, beta1: float, scale: str) -> float:
    if not len(momentum):
        return 0.0
    kind = ("l1", "max", "geometric").index(scale)
    parts = np.empty((-(-len(momentum) // (64 * BLOCK)), 2))
    on_threads(_measure, (momentum, grad, float(beta1), kind, parts), len(momentum))
    total, count = parts.sum(0)
    value = parts[:, 0].max() if scale == "max" else total / max(count, 1)
    return float(np.exp(value) if scale == "geometric" else value)


def encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest):
    target, factors = message.numpy(), (float(beta1), float(beta2))
    pieces = zip(_pieces(gradients, momentum), multipliers.tolist(), strict=True)
    for (first, part, grad), multiplier in pieces:
        args = (target, first, part, grad, *factors, multiplier, float(largest))
        on_threads(_encode_levels, args, len(part))


def sum_planes(rows, largest, out):
    args = (*_layout(rows), largest, as_array(out))
    on_threads(_sum_planes, args, 64 * out.shape[-1], len(rows))


def compare_sum(rows, largest, constant, greater, equal):
    args = (*_layout(rows), largest, constant, as_array(greater), as_array(equal))
    on_threads(_compare_sum, args, 64 * len(greater), len(rows))


def pack_votes(greater, equal, out):
    on_threads(_pack_votes, (as_array(greater), as_array(equal), out.numpy()), out.numel(), 5)


def encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise):
    target, state = message.numpy(), [*map(as_array, coder)]
    factors = (float(beta1), float(beta2), rise)
    for first, part, grad in _pieces(gradients, momentum):
        on_threads(_encode_deltas, (target, first, part, grad, *state, *factors), len(part))


def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    weighted = weights is not None
    weights = weights.numpy() if weighted else np.ones(len(rows), np.float32)
    received = (_layout(messages)[0], messages.stride(0), rows.numpy())
    args = (*received, *map(as_array, coders), weighted, weights, rise, np.float32(lookahead))
    masks = (as_array(positive), as_array(tied))
    on_threads(_decode_deltas, (*args, *masks), 64 * len(positive), len(rows))


def apply_signs(params, answers, lr, weight_decay):
    args = (as_array(params), as_array(answers), float(lr), float(weight_decay))
    on_threads(_apply_signs, args, len(params))


def apply_signs_by_run(params, answers, edges, rates):
    args = (as_array(params), as_array(answers), np.array(edges), np.array(rates, np.float64))
    on_threads(_apply_signs_by_run, args, len(params))


def apply_levels(params, answers, largest, lr, weight_decay):
    args = (as_array(params), as_array(answers), largest, float(lr), float(weight_decay))
    on_threads(_apply_levels, args, len(params))


def apply_trits(params, answers, length, lr, weight_decay):
    args = (as_array(params), answers.numpy(), length, float(lr), float(weight_decay))
    on_threads(_apply_trits, args, len(params))


def lion(params, momentum, grad, beta1, beta2, lr, weight_decay):
    factors = (float(beta1), float(beta2), float(lr), float(weight_decay))
    args = (as_array(params), momentum.numpy(), as_array(grad), *factors)
    on_threads(_lion, args, len(params))


def round_at_random(params, values, key):
    args = (as_array(params), values.numpy().view(np.uint32), *map(np.uint32, key))
    on_threads(_round_at_random, args, len(params))


def _pieces(gradients: Gradients, flat: Tensor) -> list[tuple[int, NDArray, NDArray]]:
    """Return each parameter's first word, its part of a flat vector, and its gradient or zeros."""
    values, pieces = flat.numpy(), []
    for (start, stop), grad in zip(gradients.places.spans, gradients.tensors, strict=True):
        part = values[start:stop]
        pieces.append((start // 64, part, np.zeros_like(part) if grad is None else as_array(grad)))
    return pieces


def _layout(rows: Tensor) -> tuple[NDArray, int, int, int, int]:
    """Return messages ``[n, planes, words]`` as one dense array, its strides, n, and planes.

    Numba does not know of a view that its last dimension is dense, and would not vectorise.
    """
    n, planes, words = rows.shape
    row, plane, _ = rows.stride()
    span = (n - 1) * row + (planes - 1) * plane + words
    return as_array(rows.as_strided((span,), (1,))), row, plane, n, planes


@inlined
def _weights(beta):
    return np.float32(beta), np.float32(1 - beta)


@compiled
def _encode_signs(message, first, momentum, grad, beta1, beta2, positive, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    signs, neutral = np.empty(64, np.uint8), np.uint8(positive)
    momenta, grads = split_words(momentum, start, stop), split_words(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], to_float(g[j])
                u = b1 * old + a1 * new
                signs[j] = np.uint8(u > np.float32(0)) | (neutral & ~np.uint8(u < np.float32(0)))
                m[j] = b2 * old + a2 * new
            element = start + i * momenta[0].size + s
            owner, word = divmod(first + element // 64, message.shape[2])
            message[owner, 0, word] = plane_of(signs, 0) & mask_of(stop - element)
    keep_rest(momentum, stop, momenta[1])


@compiled
def _encode_levels(message, first, momentum, grad, beta1, beta2, multiplier, largest, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    factor, bound = np.float32(multiplier), np.float32(largest)
    levels = np.empty(64, np.uint8)
    momenta, grads = split_words(momentum, start, stop), split_words(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], to_float(g[j])
                value = (b1 * old + a1 * new) * factor
                value = value if value == value else np.float32(0)
                value = min(max(value, -bound), bound)
                levels[j] = np.uint8((value + _ROUND) - _ROUND + bound)
                m[j] = b2 * old + a2 * new
            element = start + i * momenta[0].size + s
            owner, word = divmod(first + element // 64, message.shape[2])
            for b in range(message.shape[1]):
                message[owner, b, word] = plane_of(levels, b) & mask_of(stop - element)
    keep_rest(momentum, stop, momenta[1])


@compiled
def _measure(momentum, grad, beta1, kind, parts, start, stop):
    """Write each block's sum (kind 0; of logarithms, kind 2), or its maximum (1), and its count.

    ``parts`` is ``[blocks, 2]``. Blocks are as long for any number of threads. The count is of all
    values, or of those that are not zero (2).
    """
    b1, a1 = _weights(beta1)
    lanes = np.empty(64, np.float64)
    for first in range(start, stop, 64 * BLOCK):
        lanes[:] = 0.0
        last = min(first + 64 * BLOCK, stop)
        count = 0 if kind == 2 else last - first
        momenta, grads = split_words(momentum, first, last), split_words(grad, first, last)
        for i in range(2):
            for s in range(0, momenta[i].size, 64):
                m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
                if kind == 0:
                    for j in range(64):
                        lanes[j] += np.float64(abs(b1 * m[j] + a1 * to_float(g[j])))
                elif kind == 1:
                    for j in range(64):
                        value = np.float64(abs(b1 * m[j] + a1 * to_float(g[j])))
                        lanes[j] = value if value > lanes[j] or value != value else lanes[j]
                else:
                    for j in range(64):
                        value = abs(b1 * m[j] + a1 * to_float(g[j]))
                        if value != np.float32(0):
                            lanes[j] += np.log(np.float64(value))
                            count += 1
        block = first // (64 * BLOCK)
        parts[block, 0] = lanes.max() if kind == 1 else lanes.sum()
        parts[block, 1] = count


@inlined
def _add_rows(sums, carry, rows, row, plane, n, planes, largest, start, count):
    """Add n messages of some planes each, bit-sliced, into ``sums`` ``[q, BLOCK]``."""
    sums[:] = _ZERO
    for i in range(n):
        needed = 0
        while ((i + 1) * largest) >> needed:
            needed += 1
        carry[:count] = _ZERO
        for b in range(needed):
            total = sums[b]
            if b < planes:
                addend = rows[i * row + b * plane + start :]
                for j in range(count):
                    a, c, x = total[j], carry[j], addend[j]
                    half = a ^ x
                    total[j] = half ^ c
                    carry[j] = (a & x) | (half & c)
            else:
                for j in range(count):
                    a, c = total[j], carry[j]
                    total[j] = a ^ c
                    carry[j] = a & c


@compiled
def _sum_planes(rows, row, plane, n, planes, largest, out, start, stop):
    q = out.shape[0]
    sums, carry = np.empty((q, BLOCK), np.uint64), np.empty(BLOCK, np.uint64)
    for s in range(start // 64, stop // 64, BLOCK):
        count = min(BLOCK, stop // 64 - s)
        _add_rows(sums, carry, rows, row, plane, n, planes, largest, s, count)
        for b in range(q):
            out[b, s : s + count] = sums[b, :count]


@compiled
def _compare_sum(rows, row, plane, n, planes, largest, constant, greater, equal, start, stop):
    q = 0
    while (n * largest) >> q:
        q += 1
    sums, carry = np.empty((q, BLOCK), np.uint64), np.empty(BLOCK, np.uint64)
    for s in range(start // 64, stop // 64, BLOCK):
        count = min(BLOCK, stop // 64 - s)
        _add_rows(sums, carry, rows, row, plane, n, planes, largest, s, count)
        more, same = greater[s : s + count], equal[s : s + count]
        more[:] = _ZERO
        same[:] = ONES
        for b in range(q - 1, -1, -1):
            total = sums[b]
            if constant >> b & 1:
                for j in range(count):
                    same[j] &= total[j]
            else:
                for j in range(count):
                    more[j] |= same[j] & total[j]
                    same[j] &= ~total[j]


@compiled
def _pack_votes(greater, equal, out, start, stop):
    digits = np.ones(5, np.int64)
    for byte in range(start, stop):
        for j in range(5):
            word, bit = divmod(5 * byte + j, 64)
            digits[j] = 1
            if word < greater.size:
                more = greater[word] >> np.uint64(bit) & np.uint64(1)
                same = equal[word] >> np.uint64(bit) & np.uint64(1)
                digits[j] = np.int64(more + more + same)
        value = digits[4]
        for j in range(3, -1, -1):
            value = 3 * value + digits[j]
        out[byte] = value


@inlined
def _delta_steps(bits, last, repeated, level, rise, sizes):
    """Adapt 64 levels to a word of bits; ``sizes`` gets the signed steps, as bits of float32.

    Returns which bits equal the last ones.
    """
    same = ~(bits ^ last)
    rises = same & repeated
    for half in range(0, 64, 32):
        up, kept, risen = _half(bits, half), _half(same, half), _half(rises, half)
        for j in range(32):
            lane = np.uint32(j)
            change = (-np.int32(risen >> lane & _ONE) & rise) - np.int32(~kept >> lane & _ONE)
            changed = min(max(np.int32(level[half + j]) + change, np.int32(0)), np.int32(255))
            level[half + j] = np.uint8(changed)
            negative = (~up >> lane & _ONE) << _SIGN
            sizes[half + j] = ((np.uint32(changed) << _SHIFT) + _BASE) | negative
    return same


@inlined
def _half(word, first):
    """Return 32 bits of a word: vectors of 32-bit lanes are twice as long."""
    return np.uint32(word >> np.uint64(first) & np.uint64(0xFFFFFFFF))


@compiled
def _encode_deltas(
    message, first, momentum, grad, estimate, level, history, beta1, beta2, rise, start, stop
):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    sizes, flags, rise = np.empty(64, np.uint32), np.empty(64, np.uint8), np.int32(rise)
    steps = sizes.view(np.float32)
    momenta, grads = split_words(momentum, start, stop), split_words(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            word = first + (start + i * momenta[0].size + s) // 64
            h, lanes = estimate[64 * word : 64 * word + 64], level[64 * word : 64 * word + 64]
            for j in range(64):
                old, new = m[j], to_float(g[j])
                flags[j] = np.uint8(b1 * old + a1 * new >= h[j])
                m[j] = b2 * old + a2 * new
            bits = plane_of(flags, 0)
            same = _delta_steps(bits, history[0, word], history[1, word], lanes, rise, sizes)
            for j in range(64):
                h[j] += steps[j]
            history[0, word], history[1, word] = bits, same
            owner, column = divmod(word, message.shape[2])
            message[owner, 0, column] = bits
    keep_rest(momentum, stop, momenta[1])


@compiled
def _decode_deltas(
    messages,
    row,
    rows,
    estimate,
    level,
    history,
    weighted,
    weights,
    rise,
    lookahead,
    positive,
    tied,
    start,
    stop,
):
    sizes, rise = np.empty(64, np.uint32), np.int32(rise)
    steps = sizes.view(np.float32)
    total, ahead = np.empty(64, np.float32), np.empty(64, np.float32)
    above, equal = np.empty(64, np.uint8), np.empty(64, np.uint8)
    for word in range(start // 64, stop // 64):
        s = 64 * word
        total[:] = np.float32(0)
        if not weighted:
            total[:] = estimate[0, s : s + 64]
        ahead[:] = np.float32(0)
        for i in range(len(rows)):
            if rows[i] < 0:
                steps[:] = np.float32(0)
            else:
                bits, last = messages[rows[i] * row + word], history[i, 0, word]
                lanes, repeated = level[i, s : s + 64], history[i, 1, word]
                same = _delta_steps(bits, last, repeated, lanes, rise, sizes)
                history[i, 0, word], history[i, 1, word] = bits, same
            if weighted:
                h, weight = estimate[i, s : s + 64], weights[i]
                for j in range(64):
                    h[j] += steps[j]
                    total[j] += weight * h[j]
                    ahead[j] += weight * steps[j]
            else:
                for j in range(64):
                    total[j] += steps[j]
                    ahead[j] += steps[j]
        if not weighted:
            estimate[0, s : s + 64] = total
        for j in range(64):
            value = total[j] + ahead[j] * lookahead
            above[j] = np.uint8(value > np.float32(0))
            equal[j] = np.uint8(value == np.float32(0))
        positive[word] = plane_of(above, 0)
        tied[word] = plane_of(equal, 0)


@compiled
def _apply_signs(params, answers, lr, weight_decay, start, stop):
    decay, rate = decay_and_rate(lr, weight_decay)
    words = answers.shape[1]
    for s in range(start, stop, 64):
        owner, word = divmod(s // 64, words)
        votes = answers[owner, word]
        for half in range(0, 64, 32):
            x, bits = params[s + half : s + half + 32], _half(votes, half)
            for j in range(32):
                change = rate if bits >> np.uint32(j) & _ONE else -rate
                x[j] = as_in(x, to_float(x[j]) * decay + change)


@compiled
def _apply_signs_by_run(params, answers, edges, rates, start, stop):
    for run in range(len(rates)):
        first, last = max(start, edges[run]), min(stop, edges[run + 1])
        if first < last:
            _apply_signs(params, answers, rates[run, 0], rates[run, 1], first, last)


@compiled
def _apply_levels(params, answers, largest, lr, weight_decay, start, stop):
    unit = np.float32(2 / largest)
    decay, rate = decay_and_rate(lr, weight_decay)
    _, planes, words = answers.shape
    levels = np.empty(64, np.float32)
    for s in range(start, stop, 64):
        x = params[s : s + 64]
        owner, word = divmod(s // 64, words)
        levels[:] = np.float32(0)
        for b in range(planes):
            bits, weight = answers[owner, b, word], np.float32(1 << b)
            for j in range(64):
                levels[j] += weight if bits >> np.uint64(j) & np.uint64(1) else np.float32(0)
        for j in range(64):
            change = (levels[j] * unit - np.float32(1)) * rate
            x[j] = as_in(x, to_float(x[j]) * decay + change)


@compiled
def _apply_trits(params, answers, length, lr, weight_decay, start, stop):
    decay, rate = decay_and_rate(lr, weight_decay)
    table = np.zeros((256, 5), np.float32)  # the changes that a byte stands for
    for byte in range(243):
        rest = byte
        for j in range(5):
            table[byte, j] = np.float32(rest % 3 - 1) * rate
            rest //= 3
    changes = np.empty(320, np.float32)
    for owner in range(start // length, -(-stop // length)):
        row = owner * length
        begin, end = max(start - row, 0), min(stop - row, length)
        for block in range(begin - begin % 320, end, 320):  # the values of 64 bytes
            first = block // 5
            for i in range(min(64, answers.shape[1] - first)):
                for j in range(5):
                    changes[5 * i + j] = table[answers[owner, first + i], j]
            for s in range(max(block, begin), min(block + 320, end), 64):
                x, change = params[row + s : row + s + 64], changes[s - block : s - block + 64]
                for j in range(64):
                    x[j] = as_in(x, to_float(x[j]) * decay + change[j])


@compiled
def _lion(params, momentum, grad, beta1, beta2, lr, weight_decay, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    decay, rate = decay_and_rate(lr, weight_decay)
    xs, momenta = split_words(params, start, stop), split_words(momentum, start, stop)
    grads = split_words(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            x, m, g = xs[i][s : s + 64], momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], to_float(g[j])
                u = b1 * old + a1 * new
                sign = np.float32(u > np.float32(0)) - np.float32(u < np.float32(0))
                x[j] = as_in(x, to_float(x[j]) * decay + sign * rate)
                m[j] = b2 * old + a2 * new
    keep_rest(params, stop, xs[1])
    keep_rest(momentum, stop, momenta[1])


@compiled
def _round_at_random(params, values, first, second, start, stop):
    for s in range(start, stop):
        h = np.uint32(np.uint32(s) * _PLACE + first)
        h = np.uint32((h ^ h >> np.uint32(16)) * _MIX[0])
        h = np.uint32((h ^ h >> np.uint32(13)) + second)
        h = np.uint32(h * _MIX[1])
        bits = values[s]
        cut = np.uint32(bits + (h >> np.uint32(16))) >> np.uint32(16)
        nan = bits & SIZE > _INF
        params[s] = np.uint16(0x7FC0) if nan else np.uint16(cut)
