"""The passes of :mod:`dlion.kernels` on a CPU, compiled by Numba at first use and cached on disk.

Each works through memory once, 64 values (one word of a message) at a time, a fixed length that
LLVM turns into straight vector code. The bits are those of the reference: there is no fast-math, so
nothing is contracted or reordered. Long vectors are cut over as many threads as torch uses, but
where entries are chosen, and no bit depends on how many they are.
"""

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core.caching import FunctionCache
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.np.arrayobj import make_array
from numpy.typing import NDArray
from torch import Tensor

from dlion.kernels import rounding, steps
from dlion.kernels.gradients import Gradients

_BLOCK = 512  # words of a vote at a time: its planes stay in the first cache
_SMALL = 1 << 17  # elements below which threads do not pay
_ZERO, _ONES = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer
_ONE, _SIGN = np.uint32(1), np.uint32(31)
_SIZE, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800001)  # of the bits of float32
_INF = np.uint32(0x7F800000)
_PLACE, _MIX = np.uint32(rounding.PLACE), tuple(map(np.uint32, rounding.MIX))
_SAMPLE = 4096  # entries that tell which may be among the largest
_SHIFT, _BASE = np.uint32(steps.SHIFT), np.uint32(steps.BASE)
_UNSIGNED = {torch.int64: torch.uint64, torch.bfloat16: torch.uint16}  # NumPy has no bfloat16

_inline = numba.extending.register_jitable


class _Cache(FunctionCache):
    """Compiled code on disk: damaged files are replaced, and a full disk is done without."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling a file that was cut or emptied may raise
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig, data):
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


def _compile(function: Callable) -> Callable:
    """Compile at first use, and keep the result on disk where there is a place for it."""
    dispatcher = numba.njit(nogil=True)(function)
    # neither this folder nor the home directory can be written to
    with contextlib.suppress(RuntimeError):
        # as dispatcher.enable_caching() sets Numba's own
        dispatcher._cache = _Cache(function)  # pyrefly: ignore[missing-attribute]
    return dispatcher


def encode_signs(message, momentum, gradients, beta1, beta2, positive):
    target, factors = message.numpy(), (float(beta1), float(beta2), positive)
    for first, part, grad in _pieces(gradients, momentum):
        _on_threads(_encode_signs, (target, first, part, grad, *factors), len(part))


def measure(momentum, gradients, beta1, scale):
    pieces = _pieces(gradients, momentum)
    scales = [_scale(part, grad, beta1, scale) for _, part, grad in pieces]
    return torch.tensor(scales, dtype=torch.float32)


def _scale(momentum: NDArray, grad: NDArray, beta1: float, scale: str) -> float:
    if not len(momentum):
        return 0.0
    kind = ("l1", "max", "geometric").index(scale)
    parts = np.empty((-(-len(momentum) // (64 * _BLOCK)), 2))
    _on_threads(_measure, (momentum, grad, float(beta1), kind, parts), len(momentum))
    total, count = parts.sum(0)
    value = parts[:, 0].max() if scale == "max" else total / max(count, 1)
    return float(np.exp(value) if scale == "geometric" else value)


def encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest):
    target, factors = message.numpy(), (float(beta1), float(beta2))
    pieces = zip(_pieces(gradients, momentum), multipliers.tolist(), strict=True)
    for (first, part, grad), multiplier in pieces:
        args = (target, first, part, grad, *factors, multiplier, float(largest))
        _on_threads(_encode_levels, args, len(part))


def sum_planes(rows, largest, out):
    args = (*_layout(rows), largest, _array(out))
    _on_threads(_sum_planes, args, 64 * out.shape[-1], len(rows))


def compare_sum(rows, largest, constant, greater, equal):
    args = (*_layout(rows), largest, constant, _array(greater), _array(equal))
    _on_threads(_compare_sum, args, 64 * len(greater), len(rows))


def pack_votes(greater, equal, out):
    _on_threads(_pack_votes, (_array(greater), _array(equal), out.numpy()), out.numel(), 5)


def encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise):
    target, state = message.numpy(), [*map(_array, coder)]
    factors = (float(beta1), float(beta2), rise)
    for first, part, grad in _pieces(gradients, momentum):
        _on_threads(_encode_deltas, (target, first, part, grad, *state, *factors), len(part))


def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    weighted = weights is not None
    weights = weights.numpy() if weighted else np.ones(len(rows), np.float32)
    received = (_layout(messages)[0], messages.stride(0), rows.numpy())
    args = (*received, *map(_array, coders), weighted, weights, rise, np.float32(lookahead))
    masks = (_array(positive), _array(tied))
    _on_threads(_decode_deltas, (*args, *masks), 64 * len(positive), len(rows))


def apply_signs(params, answers, lr, weight_decay):
    args = (_array(params), _array(answers), float(lr), float(weight_decay))
    _on_threads(_apply_signs, args, len(params))


def apply_signs_by_run(params, answers, edges, rates):
    args = (_array(params), _array(answers), np.array(edges), np.array(rates, np.float64))
    _on_threads(_apply_signs_by_run, args, len(params))


def apply_levels(params, answers, largest, lr, weight_decay):
    args = (_array(params), _array(answers), largest, float(lr), float(weight_decay))
    _on_threads(_apply_levels, args, len(params))


def apply_trits(params, answers, length, lr, weight_decay):
    args = (_array(params), answers.numpy(), length, float(lr), float(weight_decay))
    _on_threads(_apply_trits, args, len(params))


def lion(params, momentum, grad, beta1, beta2, lr, weight_decay):
    factors = (float(beta1), float(beta2), float(lr), float(weight_decay))
    args = (_array(params), momentum.numpy(), _array(grad), *factors)
    _on_threads(_lion, args, len(params))


def round_at_random(params, values, key):
    args = (_array(params), values.numpy().view(np.uint32), *map(np.uint32, key))
    _on_threads(_round_at_random, args, len(params))


def momentum_descent(params, buffer, answer, momentum, lr, weight_decay):
    factors = (float(momentum), float(lr), float(weight_decay))
    args = (_array(params), buffer.numpy(), answer.numpy(), *factors)
    _on_threads(_momentum_descent, args, len(params))


def descend_at(params, entries, lr, weight_decay):
    _descend_at(_array(params), *_pairs(entries), float(lr), float(weight_decay))


def accumulate(velocity, accumulated, grad, momentum):
    args = (velocity.numpy(), accumulated.numpy(), _array(grad), float(momentum))
    _on_threads(_accumulate, args, len(velocity))


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
    _on_threads(_ternarise, args, len(values))
    return trits


def _array(tensor: Tensor) -> NDArray:
    """Return a tensor as an array; words are unsigned, and bfloat16 is given by its bits."""
    unsigned = _UNSIGNED.get(tensor.dtype)
    return (tensor if unsigned is None else tensor.view(unsigned)).numpy()


def _pieces(gradients: Gradients, flat: Tensor) -> list[tuple[int, NDArray, NDArray]]:
    """Return each parameter's first word, its part of a flat vector, and its gradient or zeros."""
    values, pieces = flat.numpy(), []
    for (start, stop), grad in zip(gradients.places.spans, gradients.tensors, strict=True):
        part = values[start:stop]
        pieces.append((start // 64, part, np.zeros_like(part) if grad is None else _array(grad)))
    return pieces


def _pairs(entries: Tensor) -> tuple[NDArray, NDArray]:
    """Return entries as integers, of which the indices matter, and as float32, the values."""
    return entries.numpy(), entries.view(torch.float32).numpy()


def _layout(rows: Tensor) -> tuple[NDArray, int, int, int, int]:
    """Return messages ``[n, planes, words]`` as one dense array, its strides, n, and planes.

    Numba does not know of a view that its last dimension is dense, and would not vectorise.
    """
    n, planes, words = rows.shape
    row, plane, _ = rows.stride()
    span = (n - 1) * row + (planes - 1) * plane + words
    return _array(rows.as_strided((span,), (1,))), row, plane, n, planes


_pool: tuple[int, ThreadPoolExecutor] | None = None


def _on_threads(kernel: Callable[..., None], args: tuple, length: int, weight: int = 1) -> None:
    """Call ``kernel(*args, start, stop)`` over all of ``length``, in parts on torch's threads."""
    global _pool
    threads = torch.get_num_threads()
    if threads == 1 or length * weight < _SMALL:
        kernel(*args, 0, length)
        return
    if _pool is None or _pool[0] != threads:
        _pool = (threads, ThreadPoolExecutor(threads - 1))
    share = -(-length // (threads * 64 * _BLOCK)) * 64 * _BLOCK
    others = range(share, length, share)
    parts = [_pool[1].submit(kernel, *args, s, min(s + share, length)) for s in others]
    kernel(*args, 0, min(share, length))  # on this thread, which need not be woken up
    for part in parts:
        part.result()


@_inline
def _weights(beta):
    return np.float32(beta), np.float32(1 - beta)


@_inline
def _rates(lr, weight_decay):
    return np.float32(1 - lr * weight_decay), np.float32(-lr)


@_inline
def _parts(vector, start, stop):
    """Split a share of a vector into its whole words and a copy of the rest, filled with zeros."""
    whole = stop - stop % 64
    rest = np.zeros(64 if whole < stop else 0, vector.dtype)
    rest[: stop - whole] = vector[whole:stop]
    return vector[start:whole], rest


@_inline
def _keep(vector, stop, rest):
    """Write back the copy that :func:`_parts` made."""
    vector[stop - stop % 64 : stop] = rest[: stop % 64]


def _float(value) -> Any:
    """Return a value as float32; bfloat16 is given by its bits."""


@numba.extending.overload(_float)
def _float_overload(value):
    if value == numba.float32:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _as(array, value) -> Any:
    """Return float32 as the array has it: as bfloat16, rounded to nearest, halves to even."""


@numba.extending.overload(_as)
def _as_overload(array, value):
    if array.dtype == numba.float32:
        return lambda array, value: value

    def narrow(array, value):
        bits = np.float32(value).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.uint16(0x7FC0) if nan else np.uint16(rounded)

    return narrow


def _generate_plane(typing_context, levels, b):
    """Gather bit b of each of 64 bytes in one word, in few vector instructions.

    A comparison of all bytes is a mask; LLVM does not see by itself that one is wanted.
    """
    wide = ir.VectorType(ir.IntType(8), 64)

    def generate(context, builder, signature, arguments):
        array = make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(array.data, wide.as_pointer())
        values = builder.load(address, align=1)
        flag = builder.shl(ir.IntType(8)(1), arguments[1])
        first = builder.insert_element(wide(ir.Undefined), flag, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 64), None)
        flags = builder.shuffle_vector(first, wide(ir.Undefined), lanes)
        bits = builder.icmp_unsigned("!=", builder.and_(values, flags), wide(None))
        return builder.bitcast(bits, ir.IntType(64))

    return numba.uint64(levels, numba.uint8), generate


_plane: Any = numba.extending.intrinsic(_generate_plane)
_lowest: Any = trailing_zeros  # the number of the lowest bit that is set


@_inline
def _mask(count):
    """Return the bits of a word that ``count`` values fill, at most all."""
    return _ONES >> np.uint64(max(64 - count, 0))


@_compile
def _encode_signs(message, first, momentum, grad, beta1, beta2, positive, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    signs, neutral = np.empty(64, np.uint8), np.uint8(positive)
    momenta, grads = _parts(momentum, start, stop), _parts(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], _float(g[j])
                u = b1 * old + a1 * new
                signs[j] = np.uint8(u > np.float32(0)) | (neutral & ~np.uint8(u < np.float32(0)))
                m[j] = b2 * old + a2 * new
            element = start + i * momenta[0].size + s
            owner, word = divmod(first + element // 64, message.shape[2])
            message[owner, 0, word] = _plane(signs, 0) & _mask(stop - element)
    _keep(momentum, stop, momenta[1])


@_compile
def _encode_levels(message, first, momentum, grad, beta1, beta2, multiplier, largest, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    factor, bound = np.float32(multiplier), np.float32(largest)
    levels = np.empty(64, np.uint8)
    momenta, grads = _parts(momentum, start, stop), _parts(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], _float(g[j])
                value = (b1 * old + a1 * new) * factor
                value = value if value == value else np.float32(0)
                value = min(max(value, -bound), bound)
                levels[j] = np.uint8((value + _ROUND) - _ROUND + bound)
                m[j] = b2 * old + a2 * new
            element = start + i * momenta[0].size + s
            owner, word = divmod(first + element // 64, message.shape[2])
            for b in range(message.shape[1]):
                message[owner, b, word] = _plane(levels, b) & _mask(stop - element)
    _keep(momentum, stop, momenta[1])


@_compile
def _measure(momentum, grad, beta1, kind, parts, start, stop):
    """Write each block's sum (kind 0; of logarithms, kind 2), or its maximum (1), and its count.

    ``parts`` is ``[blocks, 2]``. Blocks are as long for any number of threads. The count is of all
    values, or of those that are not zero (2).
    """
    b1, a1 = _weights(beta1)
    lanes = np.empty(64, np.float64)
    for first in range(start, stop, 64 * _BLOCK):
        lanes[:] = 0.0
        last = min(first + 64 * _BLOCK, stop)
        count = 0 if kind == 2 else last - first
        momenta, grads = _parts(momentum, first, last), _parts(grad, first, last)
        for i in range(2):
            for s in range(0, momenta[i].size, 64):
                m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
                if kind == 0:
                    for j in range(64):
                        lanes[j] += np.float64(abs(b1 * m[j] + a1 * _float(g[j])))
                elif kind == 1:
                    for j in range(64):
                        value = np.float64(abs(b1 * m[j] + a1 * _float(g[j])))
                        lanes[j] = value if value > lanes[j] or value != value else lanes[j]
                else:
                    for j in range(64):
                        value = abs(b1 * m[j] + a1 * _float(g[j]))
                        if value != np.float32(0):
                            lanes[j] += np.log(np.float64(value))
                            count += 1
        block = first // (64 * _BLOCK)
        parts[block, 0] = lanes.max() if kind == 1 else lanes.sum()
        parts[block, 1] = count


@_inline
def _add_rows(sums, carry, rows, row, plane, n, planes, largest, start, count):
    """Add n messages of some planes each, bit-sliced, into ``sums`` ``[q, _BLOCK]``."""
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


@_compile
def _sum_planes(rows, row, plane, n, planes, largest, out, start, stop):
    q = out.shape[0]
    sums, carry = np.empty((q, _BLOCK), np.uint64), np.empty(_BLOCK, np.uint64)
    for s in range(start // 64, stop // 64, _BLOCK):
        count = min(_BLOCK, stop // 64 - s)
        _add_rows(sums, carry, rows, row, plane, n, planes, largest, s, count)
        for b in range(q):
            out[b, s : s + count] = sums[b, :count]


@_compile
def _compare_sum(rows, row, plane, n, planes, largest, constant, greater, equal, start, stop):
    q = 0
    while (n * largest) >> q:
        q += 1
    sums, carry = np.empty((q, _BLOCK), np.uint64), np.empty(_BLOCK, np.uint64)
    for s in range(start // 64, stop // 64, _BLOCK):
        count = min(_BLOCK, stop // 64 - s)
        _add_rows(sums, carry, rows, row, plane, n, planes, largest, s, count)
        more, same = greater[s : s + count], equal[s : s + count]
        more[:] = _ZERO
        same[:] = _ONES
        for b in range(q - 1, -1, -1):
            total = sums[b]
            if constant >> b & 1:
                for j in range(count):
                    same[j] &= total[j]
            else:
                for j in range(count):
                    more[j] |= same[j] & total[j]
                    same[j] &= ~total[j]


@_compile
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


@_inline
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


@_inline
def _half(word, first):
    """Return 32 bits of a word: vectors of 32-bit lanes are twice as long."""
    return np.uint32(word >> np.uint64(first) & np.uint64(0xFFFFFFFF))


@_compile
def _encode_deltas(
    message, first, momentum, grad, estimate, level, history, beta1, beta2, rise, start, stop
):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    sizes, flags, rise = np.empty(64, np.uint32), np.empty(64, np.uint8), np.int32(rise)
    steps = sizes.view(np.float32)
    momenta, grads = _parts(momentum, start, stop), _parts(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            m, g = momenta[i][s : s + 64], grads[i][s : s + 64]
            word = first + (start + i * momenta[0].size + s) // 64
            h, lanes = estimate[64 * word : 64 * word + 64], level[64 * word : 64 * word + 64]
            for j in range(64):
                old, new = m[j], _float(g[j])
                flags[j] = np.uint8(b1 * old + a1 * new >= h[j])
                m[j] = b2 * old + a2 * new
            bits = _plane(flags, 0)
            same = _delta_steps(bits, history[0, word], history[1, word], lanes, rise, sizes)
            for j in range(64):
                h[j] += steps[j]
            history[0, word], history[1, word] = bits, same
            owner, column = divmod(word, message.shape[2])
            message[owner, 0, column] = bits
    _keep(momentum, stop, momenta[1])


@_compile
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
        positive[word] = _plane(above, 0)
        tied[word] = _plane(equal, 0)


@_compile
def _apply_signs(params, answers, lr, weight_decay, start, stop):
    decay, rate = _rates(lr, weight_decay)
    words = answers.shape[1]
    for s in range(start, stop, 64):
        owner, word = divmod(s // 64, words)
        votes = answers[owner, word]
        for half in range(0, 64, 32):
            x, bits = params[s + half : s + half + 32], _half(votes, half)
            for j in range(32):
                change = rate if bits >> np.uint32(j) & _ONE else -rate
                x[j] = _as(x, _float(x[j]) * decay + change)


@_compile
def _apply_signs_by_run(params, answers, edges, rates, start, stop):
    for run in range(len(rates)):
        first, last = max(start, edges[run]), min(stop, edges[run + 1])
        if first < last:
            _apply_signs(params, answers, rates[run, 0], rates[run, 1], first, last)


@_compile
def _apply_levels(params, answers, largest, lr, weight_decay, start, stop):
    unit = np.float32(2 / largest)
    decay, rate = _rates(lr, weight_decay)
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
            x[j] = _as(x, _float(x[j]) * decay + change)


@_compile
def _apply_trits(params, answers, length, lr, weight_decay, start, stop):
    decay, rate = _rates(lr, weight_decay)
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
                    x[j] = _as(x, _float(x[j]) * decay + change[j])


@_compile
def _lion(params, momentum, grad, beta1, beta2, lr, weight_decay, start, stop):
    (b1, a1), (b2, a2) = _weights(beta1), _weights(beta2)
    decay, rate = _rates(lr, weight_decay)
    xs, momenta = _parts(params, start, stop), _parts(momentum, start, stop)
    grads = _parts(grad, start, stop)
    for i in range(2):
        for s in range(0, momenta[i].size, 64):
            x, m, g = xs[i][s : s + 64], momenta[i][s : s + 64], grads[i][s : s + 64]
            for j in range(64):
                old, new = m[j], _float(g[j])
                u = b1 * old + a1 * new
                sign = np.float32(u > np.float32(0)) - np.float32(u < np.float32(0))
                x[j] = _as(x, _float(x[j]) * decay + sign * rate)
                m[j] = b2 * old + a2 * new
    _keep(params, stop, xs[1])
    _keep(momentum, stop, momenta[1])


@_compile
def _round_at_random(params, values, first, second, start, stop):
    for s in range(start, stop):
        h = np.uint32(np.uint32(s) * _PLACE + first)
        h = np.uint32((h ^ h >> np.uint32(16)) * _MIX[0])
        h = np.uint32((h ^ h >> np.uint32(13)) + second)
        h = np.uint32(h * _MIX[1])
        bits = values[s]
        cut = np.uint32(bits + (h >> np.uint32(16))) >> np.uint32(16)
        nan = bits & _SIZE > _INF
        params[s] = np.uint16(0x7FC0) if nan else np.uint16(cut)


@_compile
def _descend_at(params, indices, values, lr, weight_decay):
    decay, rate = _rates(lr, weight_decay)
    moved = np.empty(len(indices), params.dtype)
    for i in range(len(indices)):
        x = params[indices[i, 0]]
        moved[i] = _as(params, _float(x) * decay + values[i, 1] * rate)
    if decay != np.float32(1):
        for j in range(params.size):
            params[j] = _as(params, _float(params[j]) * decay)
    for i in range(len(indices)):
        params[indices[i, 0]] = moved[i]


@_compile
def _momentum_descent(params, buffer, answer, momentum, lr, weight_decay, start, stop):
    mu, (decay, rate) = np.float32(momentum), _rates(lr, weight_decay)
    for i in range(start, stop):
        buffer[i] = mu * buffer[i] + answer[i]
        params[i] = _as(params, _float(params[i]) * decay + buffer[i] * rate)


@_compile
def _accumulate(velocity, accumulated, grad, momentum, start, stop):
    mu = np.float32(momentum)
    for i in range(start, stop):
        velocity[i] = mu * velocity[i] + _float(grad[i])
        accumulated[i] += velocity[i]


@_compile
def _largest_of_rows(rows, count):
    found = np.empty((len(rows), count), np.int64)
    for i in range(len(rows)):
        found[i] = _largest(rows[i], count)
    return found


@_inline
def _largest(values, count):
    bound = np.uint32(0)
    stride = max(8, values.size // _SAMPLE) | 1  # odd, lest only a few columns are looked at
    if values.size > 1024 and 4 * count < values.size:  # exact whatever a sample tells
        sample = np.minimum(values[::stride] & _SIZE, _NAN)
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


@_inline
def _at_least(values, bound):
    """Return the indices of sizes from ``bound`` on, ascending, and these sizes.

    Sizes are those of float32, given by its bits, as integers; any NaN is the largest.
    """
    indices, sizes = np.empty(values.size, np.int64), np.empty(values.size, np.uint32)
    flags, found, parts = np.empty(64, np.uint8), 0, _parts(values, 0, values.size)
    for i in range(2):
        for s in range(0, parts[i].size, 64):
            v, first = parts[i][s : s + 64], i * parts[0].size + s
            for j in range(64):
                flags[j] = np.uint8(v[j] & _SIZE >= bound)
            bits = _plane(flags, 0) & _mask(values.size - first)
            while bits:
                j = _lowest(bits)
                bits &= bits - np.uint64(1)
                indices[found], sizes[found] = first + j, min(v[j] & _SIZE, _NAN)
                found += 1
    return indices[:found], sizes[:found]


@_inline
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


@_compile
def _add_entries(total, indices, values):
    for i in range(len(indices)):
        total[indices[i, 0]] += values[i, 1]


@_compile
def _take_mean(total, count, indices, values):
    found = 0
    for i in _at_least(total.view(np.uint32), _ONE)[0]:
        value = total[i] / np.float32(count)
        total[i] = np.float32(0)
        indices[found, 0], values[found, 1] = i, value
        found += value != np.float32(0)
    return found


@_compile
def _ternarise(values, scales, coins, trits, start, stop):
    for i in range(start, stop):
        bound = coins[i] * scales[i]
        trits[i] = np.int8(values[i] > bound) - np.int8(-values[i] > bound)
