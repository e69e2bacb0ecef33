"""The fused passes on a CPU, compiled by Numba at first use and cached on disk.

Each works through memory once, 64 values (one word of a message) at a time, a fixed length that
LLVM turns into straight vector code. The arithmetic, rounding included, is that of
:mod:`dlion.kernels.reference`: there is no fast-math, so nothing is contracted or reordered. Long
vectors are cut over as many threads as torch uses.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray

_WORDS = 512  # of a vote, per block: its planes stay in the first cache
_SMALL = 1 << 17  # elements below which threads do not pay
_LOWEST = np.uint64(0x0101010101010101)  # the lowest bit of each of eight bytes
_GATHER = np.uint64(0x0102040810204080)  # moves the bits of eight 0/1 bytes into the top byte
_TOP = np.uint64(56)
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer

_inline = numba.extending.register_jitable


def _compile(function: Callable) -> Callable:
    """Compile at first use, and keep the result on disk where there is a place for it."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither this folder nor the home directory can be written to
        return numba.njit(nogil=True)(function)


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
    args = (_words(out), at // 64, words, momentum.numpy(), _array(grad), *_betas(beta1, beta2))
    _spread(lambda start, stop: _encode_signs(*args, positive, start, stop), momentum.numel())


def measure(momentum: Tensor, grad: Tensor, beta1: float, scale: str) -> Tensor:
    kind = ("l1", "max", "geometric").index(scale)
    b1, a1 = _betas(beta1, beta1)[:2]
    args = (momentum.numpy(), _array(grad), b1, a1, kind)
    total, count = _measure(*args)
    value = total / max(count, 1)
    if scale == "geometric":
        value = np.exp(value)
    return torch.tensor(value, dtype=torch.float32)


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
    planes = (2 * largest).bit_length()
    factor = np.float32(multiplier.item())
    args = (_words(out), at // 64, words, momentum.numpy(), _array(grad), *_betas(beta1, beta2))
    _spread(
        lambda start, stop: _encode_levels(*args, factor, np.float32(largest), planes, start, stop),
        momentum.numel(),
    )


def sum_planes(rows: Tensor, at: int, words: int, planes: int, largest: int, out: Tensor) -> None:
    args = (_words(rows), at, words, planes, largest, _words(out).reshape(-1, words))
    _spread(lambda start, stop: _sum_planes(*args, start // 64, stop // 64), 64 * words, len(rows))


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
    args = (_words(rows), at, words, planes, largest, constant, _words(greater), _words(equal))
    _spread(lambda start, stop: _compare_sum(*args, start // 64, stop // 64), 64 * words, len(rows))


def pack_votes(greater: Tensor, equal: Tensor, out: Tensor) -> None:
    _pack_votes(_words(greater), _words(equal), out.numpy())


def apply_signs(params: Tensor, answers: Tensor, lr: float, weight_decay: float) -> None:
    args = (_array(params), _words(answers), np.float32(1 - lr * weight_decay), np.float32(-lr))
    _spread(lambda start, stop: _apply_signs(*args, start, stop), params.numel())


def apply_levels(
    params: Tensor, answers: Tensor, largest: int, lr: float, weight_decay: float
) -> None:
    planes = largest.bit_length()
    decay, rate = np.float32(1 - lr * weight_decay), np.float32(-lr)
    args = (_array(params), _words(answers), planes, np.float32(2 / largest), decay, rate)
    _spread(lambda start, stop: _apply_levels(*args, start, stop), params.numel())


def apply_trits(
    params: Tensor, answers: Tensor, length: int, lr: float, weight_decay: float
) -> None:
    decay, rate = np.float32(1 - lr * weight_decay), np.float32(-lr)
    _apply_trits(_array(params), answers.numpy(), length, decay, rate)


def lion(
    params: Tensor,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
) -> None:
    factors = (*_betas(beta1, beta2), np.float32(1 - lr * weight_decay), np.float32(-lr))
    args = (_array(params), momentum.numpy(), grad.numpy(), *factors)
    _spread(lambda start, stop: _lion(*args, start, stop), params.numel())


# ------------------------------------------------------------------ torch to NumPy, and threads


def _array(tensor: Tensor) -> Array:
    """float32 as it is, bfloat16 as uint16 (NumPy has no name for it)."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _words(tensor: Tensor) -> Array:
    """Any integers as 64-bit words."""
    return tensor.view(torch.int64).numpy().view(np.uint64)


def _betas(beta1: float, beta2: float) -> tuple[np.float32, ...]:
    return np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)


_pool: tuple[int, ThreadPoolExecutor] | None = None


def _spread(work: Callable[[int, int], None], length: int, weight: int = 1) -> None:
    """Run ``work(start, stop)`` over all of ``length``, cut at blocks, on torch's threads."""
    global _pool
    threads = torch.get_num_threads()
    if threads == 1 or length * weight < _SMALL:
        work(0, length)
        return
    if _pool is None or _pool[0] != threads:
        _pool = (threads, ThreadPoolExecutor(threads))
    share = -(-length // (threads * 64 * _WORDS)) * 64 * _WORDS
    starts = range(0, length, share)
    for done in [_pool[1].submit(work, s, min(s + share, length)) for s in starts]:
        done.result()


# ------------------------------------------------------------------ compiled


def _window(source, start, spare, bits):
    """64 values as float32: a view, or converted into ``spare`` (``bits`` are its bits)."""


@numba.extending.overload(_window)
def _window_overload(source, start, spare, bits):
    if source.dtype == numba.float32:

        def view(source, start, spare, bits):
            return source[start : start + 64]

        return view

    def convert(source, start, spare, bits):
        for j in range(64):
            bits[j] = np.uint32(source[start + j]) << np.uint32(16)
        return spare

    return convert


def _keep(target, start, count, values, bits):
    """Write values back that :func:`_window` or :func:`_load` gave; bfloat16 rounds to even."""


@numba.extending.overload(_keep)
def _keep_overload(target, start, count, values, bits):
    if target.dtype == numba.float32:

        def copy(target, start, count, values, bits):
            for j in range(count):
                target[start + j] = values[j]

        return copy

    def round_off(target, start, count, values, bits):
        for j in range(count):
            x = bits[j]
            odd = x >> np.uint32(16) & np.uint32(1)
            rounded = (x + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            target[start + j] = np.uint16(0x7FC0) if nan else np.uint16(rounded)

    return round_off


@_inline
def _load(source, start, count, values, bits):
    """The last values, fewer than 64, as float32, and zeros after them."""
    bits[:] = np.uint32(0)
    for j in range(count):
        if source.itemsize == 2:
            bits[j] = np.uint32(source[start + j]) << np.uint32(16)
        else:
            values[j] = source[start + j]


@_inline
def _pack(flags):
    """64 bytes that are 0 or 1, seen as 8 words, as the bits of one word."""
    result = np.uint64(0)
    for r in range(8):
        result |= ((flags[r] * _GATHER) >> _TOP) << np.uint64(8 * r)
    return result


@_inline
def _plane(levels, b):
    """Bit b of each of 64 bytes, seen as 8 words, as the bits of one word."""
    result = np.uint64(0)
    for r in range(8):
        flags = levels[r] >> np.uint64(b) & _LOWEST
        result |= ((flags * _GATHER) >> _TOP) << np.uint64(8 * r)
    return result


@_inline
def _sign_word(m, g, b1, a1, b2, a2, positive, signs, flags):
    neutral = np.uint8(positive)
    for j in range(64):
        old, new = m[j], g[j]
        u = b1 * old + a1 * new
        signs[j] = np.uint8(u > np.float32(0)) | (neutral & ~np.uint8(u < np.float32(0)))
        m[j] = b2 * old + a2 * new
    return _pack(flags)


@_compile
def _encode_signs(out, first, words, momentum, grad, b1, a1, b2, a2, positive, start, stop):
    bits, last_bits = np.empty(64, np.uint32), np.empty(64, np.uint32)
    spare, last = bits.view(np.float32), last_bits.view(np.float32)
    signs = np.zeros(64, np.uint8)
    flags = signs.view(np.uint64)
    row, place = (first + start // 64) // words, (first + start // 64) % words
    whole = stop - stop % 64
    for s in range(start, whole, 64):
        m, g = momentum[s : s + 64], _window(grad, s, spare, bits)
        out[row, place] = _sign_word(m, g, b1, a1, b2, a2, positive, signs, flags)
        place += 1
        if place == words:
            row, place = row + 1, 0
    if whole < stop:
        count = stop - whole
        _load(momentum, whole, count, last, last_bits)
        _load(grad, whole, count, spare, bits)
        word = _sign_word(last, spare, b1, a1, b2, a2, positive, signs, flags)
        out[row, place] = word & (_ONES >> np.uint64(64 - count))
        momentum[whole:stop] = last[:count]


@_inline
def _add_sizes(m, g, b1, a1, kind, lanes, limit):
    """Add 64 (or ``limit``) magnitudes of the direction, or their logarithms, to the lanes."""
    counted = limit
    if kind == 0:
        for j in range(64):
            lanes[j] += np.float64(abs(b1 * m[j] + a1 * g[j]))
    elif kind == 1:
        for j in range(64):
            value = np.float64(abs(b1 * m[j] + a1 * g[j]))
            lanes[j] = value if value > lanes[j] or value != value else lanes[j]
    else:
        counted = 0
        for j in range(limit):
            value = abs(b1 * m[j] + a1 * g[j])
            if value != np.float32(0):
                lanes[j] += np.log(np.float64(value))
                counted += 1
    return counted


@_compile
def _measure(momentum, grad, b1, a1, kind):
    bits, last_bits = np.empty(64, np.uint32), np.empty(64, np.uint32)
    spare, last = bits.view(np.float32), last_bits.view(np.float32)
    lanes = np.zeros(64, np.float64)
    length = momentum.shape[0]
    whole, counted = length - length % 64, 0
    for s in range(0, whole, 64):
        m, g = momentum[s : s + 64], _window(grad, s, spare, bits)
        counted += _add_sizes(m, g, b1, a1, kind, lanes, 64)
    if whole < length:
        _load(momentum, whole, length - whole, last, last_bits)
        _load(grad, whole, length - whole, spare, bits)
        counted += _add_sizes(last, spare, b1, a1, kind, lanes, length - whole)
    if kind != 1:
        return lanes.sum(), counted
    largest = np.float64(0)
    for value in lanes:
        largest = value if value > largest or value != value else largest
        if value != value:
            break
    return largest, 1


@_inline
def _level_word(m, g, b1, a1, b2, a2, factor, largest, levels):
    for j in range(64):
        old, new = m[j], g[j]
        value = (b1 * old + a1 * new) * factor
        value = value if value == value else np.float32(0)
        value = min(max(value, -largest), largest)
        levels[j] = np.uint8((value + _ROUND) - _ROUND + largest)
        m[j] = b2 * old + a2 * new


@_compile
def _encode_levels(
    out, first, words, momentum, grad, b1, a1, b2, a2, factor, largest, planes, start, stop
):
    bits, last_bits = np.empty(64, np.uint32), np.empty(64, np.uint32)
    spare, last = bits.view(np.float32), last_bits.view(np.float32)
    levels = np.zeros(64, np.uint8)
    bytes_ = levels.view(np.uint64)
    row, place = (first + start // 64) // words, (first + start // 64) % words
    whole = stop - stop % 64
    for s in range(start, whole, 64):
        m, g = momentum[s : s + 64], _window(grad, s, spare, bits)
        _level_word(m, g, b1, a1, b2, a2, factor, largest, levels)
        for b in range(planes):
            out[row, b * words + place] = _plane(bytes_, b)
        place += 1
        if place == words:
            row, place = row + 1, 0
    if whole < stop:
        count = stop - whole
        _load(momentum, whole, count, last, last_bits)
        _load(grad, whole, count, spare, bits)
        _level_word(last, spare, b1, a1, b2, a2, factor, largest, levels)
        for b in range(planes):
            word = _plane(bytes_, b)
            out[row, b * words + place] = word & (_ONES >> np.uint64(64 - count))
        momentum[whole:stop] = last[:count]


@_inline
def _add_rows(sums, carry, rows, at, words, planes, largest, start, count):
    """Add n messages of some planes each, bit-sliced, into ``sums`` ``[q, words]``."""
    for i in range(rows.shape[0]):
        needed = 0
        while ((i + 1) * largest) >> needed:
            needed += 1
        carry[:count] = np.uint64(0)
        for b in range(needed):
            total = sums[b]
            if b < planes:
                offset = at + b * words + start
                for j in range(count):
                    a, c, x = total[j], carry[j], rows[i, offset + j]
                    half = a ^ x
                    total[j] = half ^ c
                    carry[j] = (a & x) | (half & c)
            else:
                for j in range(count):
                    a, c = total[j], carry[j]
                    total[j] = a ^ c
                    carry[j] = a & c


@_compile
def _sum_planes(rows, at, words, planes, largest, out, start, stop):
    q = out.shape[0]
    sums, carry = np.empty((q, _WORDS), np.uint64), np.empty(_WORDS, np.uint64)
    for s in range(start, stop, _WORDS):
        count = min(_WORDS, stop - s)
        sums[:] = np.uint64(0)
        _add_rows(sums, carry, rows, at, words, planes, largest, s, count)
        for b in range(q):
            out[b, s : s + count] = sums[b, :count]


@_compile
def _compare_sum(rows, at, words, planes, largest, constant, greater, equal, start, stop):
    q = 0
    while (rows.shape[0] * largest) >> q:
        q += 1
    sums, carry = np.empty((q, _WORDS), np.uint64), np.empty(_WORDS, np.uint64)
    for s in range(start, stop, _WORDS):
        count = min(_WORDS, stop - s)
        sums[:] = np.uint64(0)
        _add_rows(sums, carry, rows, at, words, planes, largest, s, count)
        more, same = greater[s : s + count], equal[s : s + count]
        more[:] = np.uint64(0)
        same[:] = _ONES
        for b in range(q - 1, -1, -1):
            plane = sums[b]
            if constant >> b & 1:
                for j in range(count):
                    same[j] &= plane[j]
            else:
                for j in range(count):
                    more[j] |= same[j] & plane[j]
                    same[j] &= ~plane[j]


@_compile
def _pack_votes(greater, equal, out):
    length = 64 * greater.shape[0]
    digits = np.ones(5, np.int64)
    for byte in range(out.shape[0]):
        for j in range(5):
            i = 5 * byte + j
            if i < length:
                more = greater[i >> 6] >> np.uint64(i & 63) & np.uint64(1)
                same = equal[i >> 6] >> np.uint64(i & 63) & np.uint64(1)
                digits[j] = np.int64(more + more + same)
            else:
                digits[j] = 1
        value = digits[4]
        for j in range(3, -1, -1):
            value = 3 * value + digits[j]
        out[byte] = value


@_inline
def _apply_word(x, word, decay, rate):
    for j in range(64):
        x[j] = x[j] * decay + (rate if word >> np.uint64(j) & np.uint64(1) else -rate)


@_compile
def _apply_signs(params, answers, decay, rate, start, stop):
    words = answers.shape[1]
    bits = np.empty(64, np.uint32)
    spare = bits.view(np.float32)
    row, place = (start >> 6) // words, (start >> 6) % words
    whole = stop - stop % 64
    for s in range(start, whole, 64):
        x = _window(params, s, spare, bits)
        _apply_word(x, answers[row, place], decay, rate)
        if params.itemsize == 2:
            _keep(params, s, 64, x, bits)
        place += 1
        if place == words:
            row, place = row + 1, 0
    if whole < stop:
        _load(params, whole, stop - whole, spare, bits)
        _apply_word(spare, answers[row, place], decay, rate)
        _keep(params, whole, stop - whole, spare, bits)


@_inline
def _read_levels(answers, row, place, planes, words, level):
    for j in range(64):
        level[j] = np.float32(0)
    for b in range(planes):
        word, weight = answers[row, b * words + place], np.float32(1 << b)
        for j in range(64):
            level[j] += weight if word >> np.uint64(j) & np.uint64(1) else np.float32(0)


@_inline
def _apply_level_word(x, level, unit, decay, rate):
    for j in range(64):
        x[j] = x[j] * decay + (level[j] * unit - np.float32(1)) * rate


@_compile
def _apply_levels(params, answers, planes, unit, decay, rate, start, stop):
    words = answers.shape[1] // planes
    bits = np.empty(64, np.uint32)
    spare = bits.view(np.float32)
    level = np.empty(64, np.float32)
    row, place = (start >> 6) // words, (start >> 6) % words
    whole = stop - stop % 64
    for s in range(start, whole, 64):
        x = _window(params, s, spare, bits)
        _read_levels(answers, row, place, planes, words, level)
        _apply_level_word(x, level, unit, decay, rate)
        if params.itemsize == 2:
            _keep(params, s, 64, x, bits)
        place += 1
        if place == words:
            row, place = row + 1, 0
    if whole < stop:
        _load(params, whole, stop - whole, spare, bits)
        _read_levels(answers, row, place, planes, words, level)
        _apply_level_word(spare, level, unit, decay, rate)
        _keep(params, whole, stop - whole, spare, bits)


@_compile
def _apply_trits(params, answers, length, decay, rate):
    """``length``: values of a row of answers, the last row's may be fewer."""
    table = np.zeros((256, 5), np.float32)
    for byte in range(243):
        rest = byte
        for j in range(5):
            table[byte, j] = np.float32(rest % 3 - 1) * rate
            rest //= 3
    changes = np.empty(325, np.float32)
    bits = np.empty(64, np.uint32)
    spare = bits.view(np.float32)
    for row in range(answers.shape[0]):
        end = min((row + 1) * length, params.shape[0])
        for block in range(row * length, end, 320):  # 64 bytes
            first = (block - row * length) // 5
            for i in range(min(64, answers.shape[1] - first)):
                for j in range(5):
                    changes[5 * i + j] = table[answers[row, first + i], j]
            for part in range(0, min(320, end - block), 64):
                s = block + part
                count = min(64, end - s)
                if count == 64:
                    x = _window(params, s, spare, bits)
                    for j in range(64):
                        x[j] = x[j] * decay + changes[part + j]
                    if params.itemsize == 2:
                        _keep(params, s, 64, x, bits)
                else:
                    _load(params, s, count, spare, bits)
                    for j in range(64):
                        spare[j] = spare[j] * decay + changes[part + j]
                    _keep(params, s, count, spare, bits)


@_inline
def _lion_word(x, m, g, b1, a1, b2, a2, decay, rate):
    for j in range(64):
        old, new = m[j], g[j]
        u = b1 * old + a1 * new
        sign = np.float32(u > np.float32(0)) - np.float32(u < np.float32(0))
        x[j] = x[j] * decay + sign * rate
        m[j] = b2 * old + a2 * new


@_compile
def _lion(params, momentum, grad, b1, a1, b2, a2, decay, rate, start, stop):
    bits, last_m = np.empty(64, np.uint32), np.empty(64, np.uint32)
    last_g = np.empty(64, np.uint32)
    spare = bits.view(np.float32)
    whole = stop - stop % 64
    for s in range(start, whole, 64):
        x = _window(params, s, spare, bits)
        _lion_word(x, momentum[s : s + 64], grad[s : s + 64], b1, a1, b2, a2, decay, rate)
        if params.itemsize == 2:
            _keep(params, s, 64, x, bits)
    if whole < stop:
        count = stop - whole
        m, g = last_m.view(np.float32), last_g.view(np.float32)
        _load(params, whole, count, spare, bits)
        _load(momentum, whole, count, m, last_m)
        _load(grad, whole, count, g, last_g)
        _lion_word(spare, m, g, b1, a1, b2, a2, decay, rate)
        _keep(params, whole, count, spare, bits)
        momentum[whole:stop] = m[:count]
