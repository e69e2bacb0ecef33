"""The passes of :mod:`dlion.kernels` on a GPU, in Triton.

A program handles some words of a message, 64 values each, in registers as ``[_WORDS, 64]``:
messages are packed in memory and on the wire only. Nothing here waits for the device. Without a GPU
the same code runs under Triton's interpreter (TRITON_INTERPRET=1), which is how it is tested.
"""

from collections.abc import Callable
from functools import wraps

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlion.kernels import reference
from dlion.kernels.steps import BASE, SHIFT

_WORDS = tl.constexpr(16)  # of a program
_BYTES = tl.constexpr(256)  # of a program, where it packs trits
_SHIFT, _BASE = tl.constexpr(SHIFT), tl.constexpr(BASE)
_EXACT = {"enable_fp_fusion": False}  # products and sums are rounded one by one
# where a message lies differs from parameter to parameter, and none of it is worth a compilation
_PLACE = ["row", "plane", "words", "first", "n", "length"]


def _on_device(function: Callable) -> Callable:
    """Make the device of the first argument the current one for a call."""

    @wraps(function)
    def run(first: Tensor, *args):
        with torch.cuda.device_of(first):
            return function(first, *args)

    return run


@_on_device
def encode_signs(message, start, momentum, grad, beta1, beta2, positive):
    target, size = (*_layout(message), start // 64), momentum.numel()
    vectors = (momentum, grad, size, *_betas(beta1, beta2))
    _encode_signs[_grid(size)](*target, *vectors, positive, **_EXACT)


@_on_device
def measure(momentum, grad, beta1, scale):
    if scale == "geometric":
        return reference.measure(momentum, grad, beta1, scale)
    size, largest = momentum.numel(), scale == "max"
    parts = torch.empty(_grid(size), dtype=torch.float64, device=momentum.device)
    _measure[_grid(size)](parts, momentum, grad, size, beta1, 1 - beta1, largest, **_EXACT)
    return (parts.max() if largest else parts.sum() / size).to(torch.float32)


@_on_device
def encode_levels(message, start, momentum, grad, beta1, beta2, multiplier, largest):
    target, size = (*_layout(message), start // 64), momentum.numel()
    vectors = (momentum, grad, size, *_betas(beta1, beta2))
    planes = message.shape[1]
    _encode_levels[_grid(size)](*target, *vectors, multiplier, largest, planes, **_EXACT)


@_on_device
def sum_planes(rows, largest, out):
    n, planes, words = rows.shape
    _sum_planes[_grid(64 * words)](*_layout(rows), n, planes, out, out.shape[0])


@_on_device
def compare_sum(rows, largest, constant, greater, equal):
    n, planes, words = rows.shape
    _compare_sum[_grid(64 * words)](*_layout(rows), n, planes, constant, greater, equal)


@_on_device
def pack_votes(greater, equal, out):
    grid = (triton.cdiv(out.numel(), _BYTES.value),)
    _pack_votes[grid](greater, equal, 64 * greater.numel(), out, out.numel())


@_on_device
def encode_deltas(message, start, momentum, grad, coder, beta1, beta2, rise):
    target, size = (*_layout(message), start // 64), momentum.numel()
    vectors = (momentum, grad, size, *_betas(beta1, beta2))
    state = (*coder, coder.history.stride(0))
    _encode_deltas[_grid(size)](*target, *vectors, *state, rise, **_EXACT)


@_on_device
def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    received, weighted = (*_layout(messages), rows, len(rows)), weights is not None
    state = (*coders, *(s for t in coders for s in t.stride()[:-1]))
    sums = (weights if weighted else coders.estimate, weighted, lookahead, positive, tied)
    _decode_deltas[_grid(64 * len(positive))](*received, *state, rise, *sums, **_EXACT)


@_on_device
def apply_signs(params, answers, lr, weight_decay):
    size, answers = params.numel(), _layout(answers.unsqueeze(1))
    _apply_signs[_grid(size)](params, size, *answers, *_rates(lr, weight_decay), **_EXACT)


@_on_device
def apply_levels(params, answers, largest, lr, weight_decay):
    size, planes = params.numel(), answers.shape[1]
    factors = (2 / largest, *_rates(lr, weight_decay))
    _apply_levels[_grid(size)](params, size, *_layout(answers), planes, *factors, **_EXACT)


@_on_device
def apply_trits(params, answers, length, lr, weight_decay):
    size, row = params.numel(), answers.stride(0)
    factors = _rates(lr, weight_decay)
    _apply_trits[_grid(size)](params, size, answers, row, length // 64, *factors, **_EXACT)


@_on_device
def lion(params, momentum, grad, beta1, beta2, lr, weight_decay):
    size = params.numel()
    factors = (*_betas(beta1, beta2), *_rates(lr, weight_decay))
    _lion[_grid(size)](params, momentum, grad, size, *factors, **_EXACT)


@_on_device
def momentum_descent(params, buffer, answer, momentum, lr, weight_decay):
    size, factors = params.numel(), (momentum, *_rates(lr, weight_decay))
    _momentum_descent[_grid(size)](params, buffer, answer, size, *factors, **_EXACT)


@_on_device
def accumulate(velocity, accumulated, grad, momentum):
    size = velocity.numel()
    _accumulate[_grid(size)](velocity, accumulated, grad, size, momentum, **_EXACT)


ternarise = reference.ternarise
# what selects, or touches a few places only, is left to torch
largest, descend_at = reference.largest, reference.descend_at
add_entries, take_mean = reference.add_entries, reference.take_mean


def _grid(size: int) -> tuple[int]:
    return (triton.cdiv(size, 64 * _WORDS.value),)


def _layout(message: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a message, its strides of rows and of planes, and the words of a plane."""
    return message, message.stride(0), message.stride(1), message.shape[2]


def _betas(beta1: float, beta2: float) -> tuple[float, ...]:
    return beta1, 1 - beta1, beta2, 1 - beta2


def _rates(lr: float, weight_decay: float) -> tuple[float, float]:
    return 1 - lr * weight_decay, -lr


@triton.jit
def _indices():
    """Return the words of this program ``[_WORDS]`` and their values ``[_WORDS, 64]``."""
    word = tl.program_id(0).to(tl.int64) * _WORDS + tl.arange(0, _WORDS)
    return word, word[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit
def _pack(flags):
    """Pack booleans ``[_WORDS, 64]`` into words."""
    lanes = tl.arange(0, 64).to(tl.int64)
    return tl.sum(flags.to(tl.int64) << lanes[None, :], axis=1)


@triton.jit
def _unpack(words):
    """Unpack the bits of words ``[_WORDS]``: int32 ``[_WORDS, 64]``."""
    lanes = tl.arange(0, 64).to(tl.int64)
    return (words[:, None] >> lanes[None, :] & 1).to(tl.int32)


@triton.jit
def _offset(word, row, words):
    """Find a word of the bucket in a message whose rows of ``words`` start ``row`` apart."""
    return word // words * row + word % words


@triton.jit
def _direction(momentum, grad, index, inside, b1, a1, b2, a2):
    """Update the momentum and return the direction before it."""
    m = tl.load(momentum + index, mask=inside, other=0.0)
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(momentum + index, m * b2 + g * a2, mask=inside)
    return m * b1 + g * a1


@triton.jit(do_not_specialize=_PLACE)
def _encode_signs(
    message, row, plane, words, first, momentum, grad, size, b1, a1, b2, a2, POSITIVE: tl.constexpr
):
    word, index = _indices()
    inside = index < size
    u = _direction(momentum, grad, index, inside, b1, a1, b2, a2)
    flags = (u < 0) == 0 if POSITIVE else u > 0
    start = message + _offset(first + word, row, words)
    tl.store(start, _pack(flags & inside), mask=word * 64 < size)


@triton.jit(do_not_specialize=_PLACE)
def _encode_levels(
    message,
    row,
    plane,
    words,
    first,
    momentum,
    grad,
    size,
    b1,
    a1,
    b2,
    a2,
    multiplier,
    LARGEST: tl.constexpr,
    PLANES: tl.constexpr,
):
    word, index = _indices()
    inside = index < size
    value = _direction(momentum, grad, index, inside, b1, a1, b2, a2) * tl.load(multiplier)
    value = tl.where(value == value, value, 0.0)
    value = tl.minimum(tl.maximum(value, -1.0 * LARGEST), 1.0 * LARGEST)
    value = (value + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to an even integer
    level = (value + LARGEST).to(tl.int32)
    start = message + _offset(first + word, row, words)
    for b in tl.static_range(PLANES):
        packed = _pack(((level >> b & 1) == 1) & inside)
        tl.store(start + b * plane, packed, mask=word * 64 < size)


@triton.jit
def _measure(parts, momentum, grad, size, b1, a1, LARGEST: tl.constexpr):
    _, index = _indices()
    inside = index < size
    m = tl.load(momentum + index, mask=inside, other=0.0)
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    values = tl.ravel(tl.abs(m * b1 + g * a1).to(tl.float64))
    if LARGEST:
        bad = tl.sum((values != values).to(tl.int32), axis=0)
        part = tl.where(bad > 0, float("nan"), tl.max(values, axis=0))
    else:
        part = tl.sum(values, axis=0)
    tl.store(parts + tl.program_id(0), part)


@triton.jit
def _integers(message, plane, inside, PLANES: tl.constexpr):
    """Read integers, int32 ``[_WORDS, 64]``; their lowest bits are the words at ``message``."""
    total = tl.zeros((_WORDS, 64), dtype=tl.int32)
    for b in tl.static_range(PLANES):
        total += _unpack(tl.load(message + b * plane, mask=inside, other=0)) << b
    return total


@triton.jit
def _sum(rows, row, plane, words, n, word, PLANES: tl.constexpr):
    """Add n messages: int32 ``[_WORDS, 64]``."""
    total = tl.zeros((_WORDS, 64), dtype=tl.int32)
    message = rows + word
    for _ in range(n):
        total += _integers(message, plane, word < words, PLANES)
        message += row
    return total


@triton.jit(do_not_specialize=_PLACE)
def _sum_planes(rows, row, plane, words, n, PLANES: tl.constexpr, out, Q: tl.constexpr):
    word, _ = _indices()
    total = _sum(rows, row, plane, words, n, word, PLANES)
    for b in tl.static_range(Q):
        tl.store(out + b * words + word, _pack(total >> b & 1), mask=word < words)


@triton.jit(do_not_specialize=_PLACE)
def _compare_sum(rows, row, plane, words, n, PLANES: tl.constexpr, constant, greater, equal):
    word, _ = _indices()
    total = _sum(rows, row, plane, words, n, word, PLANES)
    tl.store(greater + word, _pack(total > constant), mask=word < words)
    tl.store(equal + word, _pack(total == constant), mask=word < words)


@triton.jit(do_not_specialize=_PLACE)
def _pack_votes(greater, equal, length, out, size):
    byte = tl.program_id(0).to(tl.int64) * _BYTES + tl.arange(0, _BYTES)
    value = tl.zeros((_BYTES,), dtype=tl.int32)
    for back in tl.static_range(5):
        index = 5 * byte + 4 - back
        inside = (byte < size) & (index < length)
        more = tl.load(greater + index // 64, mask=inside, other=0) >> (index % 64) & 1
        same = tl.load(equal + index // 64, mask=inside, other=0) >> (index % 64) & 1
        value = 3 * value + tl.where(inside, 2 * more + same, 1).to(tl.int32)
    tl.store(out + byte, value.to(tl.uint8), mask=byte < size)


@triton.jit
def _delta_steps(bits, level, history, plane, used, rise):
    """Adapt the levels and the history at two pointers to words of bits ``[_WORDS]``.

    Returns the steps with their signs: float32 ``[_WORDS, 64]``.
    """
    same = ~(bits ^ tl.load(history, mask=used, other=0))
    rises = same & tl.load(history + plane, mask=used, other=0)
    tl.debug_barrier()  # several warps may have loaded a word that one of them stores
    tl.store(history, bits, mask=used)
    tl.store(history + plane, same, mask=used)
    change = _unpack(rises) * rise + _unpack(same) - 1
    levels = tl.load(level, mask=used[:, None], other=0).to(tl.int32) + change
    levels = tl.minimum(tl.maximum(levels, 0), 255)
    tl.store(level, levels.to(tl.uint8), mask=used[:, None])
    negative = _unpack(~bits) << 31
    return (((levels << _SHIFT) + _BASE) | negative).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_PLACE)
def _encode_deltas(
    message,
    row,
    plane,
    words,
    first,
    momentum,
    grad,
    size,
    b1,
    a1,
    b2,
    a2,
    estimate,
    level,
    history,
    history_plane,
    rise,
):
    word, index = _indices()
    u = _direction(momentum, grad, index, index < size, b1, a1, b2, a2)
    used = word * 64 < size
    word += first
    element = word[:, None] * 64 + tl.arange(0, 64)[None, :]
    h = tl.load(estimate + element, mask=used[:, None], other=0.0)
    bits = _pack(u >= h)
    steps = _delta_steps(bits, level + element, history + word, history_plane, used, rise)
    tl.store(estimate + element, h + steps, mask=used[:, None])
    tl.store(message + _offset(word, row, words), bits, mask=used)


@triton.jit(do_not_specialize=_PLACE)
def _decode_deltas(
    messages,
    row,
    plane,
    words,
    rows,
    n,
    estimate,
    level,
    history,
    estimate_row,
    level_row,
    history_row,
    history_plane,
    rise,
    weights,
    WEIGHTED: tl.constexpr,
    lookahead,
    positive,
    tied,
):
    word, index = _indices()
    used = word < words
    total = tl.zeros((_WORDS, 64), dtype=tl.float32)
    ahead = tl.zeros((_WORDS, 64), dtype=tl.float32)
    estimate, level, history = estimate + index, level + index, history + word
    if not WEIGHTED:
        total = tl.load(estimate, mask=used[:, None], other=0.0)
    for i in range(n):
        sender = tl.load(rows + i)
        steps = tl.zeros((_WORDS, 64), dtype=tl.float32)
        if sender >= 0:
            bits = tl.load(messages + sender * row + word, mask=used, other=0)
            steps = _delta_steps(bits, level, history, history_plane, used, rise)
        if WEIGHTED:
            h = tl.load(estimate, mask=used[:, None], other=0.0) + steps
            tl.store(estimate, h, mask=used[:, None])
            weight = tl.load(weights + i)
            total += h * weight
            ahead += steps * weight
            estimate += estimate_row
        else:
            total += steps
            ahead += steps
        level += level_row
        history += history_row
    if not WEIGHTED:
        tl.store(estimate, total, mask=used[:, None])
    value = total + ahead * lookahead
    tl.store(positive + word, _pack(value > 0), mask=used)
    tl.store(tied + word, _pack(value == 0), mask=used)


@triton.jit
def _descend(params, index, inside, change, decay):
    x = tl.load(params + index, mask=inside, other=0.0)
    moved = x.to(tl.float32) * decay + change
    tl.store(params + index, moved.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=_PLACE)
def _apply_signs(params, size, answers, row, plane, words, decay, rate):
    word, index = _indices()
    votes = tl.load(answers + _offset(word, row, words), mask=word * 64 < size, other=0)
    change = tl.where(_unpack(votes) == 1, rate, -rate)
    _descend(params, index, index < size, change, decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_levels(
    params, size, answers, row, plane, words, PLANES: tl.constexpr, unit, decay, rate
):
    word, index = _indices()
    level = _integers(answers + _offset(word, row, words), plane, word * 64 < size, PLANES)
    change = (level.to(tl.float32) * unit - 1.0) * rate
    _descend(params, index, index < size, change, decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_trits(params, size, answers, row, words, decay, rate):
    word, index = _indices()
    inside, first = index < size, word % words * 64  # 64-bit divisions are slow: one a word
    start = answers + word // words * row + first // 5
    trit = (first % 5).to(tl.int32)[:, None] + tl.arange(0, 64)[None, :]
    byte = tl.load(start[:, None] + trit // 5, mask=inside, other=121)
    trits, digit = byte.to(tl.int32), trit % 5
    for j in tl.static_range(4):
        trits = tl.where(digit > j, trits // 3, trits)
    change = (trits % 3 - 1).to(tl.float32) * rate
    _descend(params, index, inside, change, decay)


@triton.jit
def _lion(params, momentum, grad, size, b1, a1, b2, a2, decay, rate):
    _, index = _indices()
    inside = index < size
    u = _direction(momentum, grad, index, inside, b1, a1, b2, a2)
    sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    _descend(params, index, inside, sign * rate, decay)


@triton.jit
def _momentum_descent(params, buffer, answer, size, momentum, decay, rate):
    _, index = _indices()
    inside = index < size
    b = _moved(buffer, answer, index, inside, momentum)
    _descend(params, index, inside, b * rate, decay)


@triton.jit
def _accumulate(velocity, accumulated, grad, size, momentum):
    _, index = _indices()
    inside = index < size
    u = _moved(velocity, grad, index, inside, momentum)
    v = tl.load(accumulated + index, mask=inside, other=0.0)
    tl.store(accumulated + index, v + u, mask=inside)


@triton.jit
def _moved(buffer, values, index, inside, momentum):
    """Update ``b <- mu b + v``, and return b."""
    b = tl.load(buffer + index, mask=inside, other=0.0)
    b = b * momentum + tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffer + index, b, mask=inside)
    return b
