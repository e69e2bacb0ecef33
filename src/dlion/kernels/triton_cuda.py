"""The fused passes on a GPU, in Triton; the bits are those of :mod:`dlion.kernels.reference`.

A program handles some words of a message, 64 values each, in registers as ``[words, 64]``:
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

_WORDS = 16  # of a program
_EXACT = {"enable_fp_fusion": False}  # products and sums are rounded one by one


def _there(function: Callable) -> Callable:
    """Run on the device of the first argument, whichever is the current one."""

    @wraps(function)
    def on_device(first: Tensor, *args):
        with torch.cuda.device_of(first):
            return function(first, *args)

    return on_device


@_there
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
    size = momentum.numel()
    betas = (beta1, 1 - beta1, beta2, 1 - beta2)
    _encode_signs[_grid(size)](
        out,
        out.stride(0),
        at // 64,
        words,
        momentum,
        grad,
        size,
        *betas,
        positive,
        _WORDS,
        **_EXACT,
    )


@_there
def measure(momentum: Tensor, grad: Tensor, beta1: float, scale: str) -> Tensor:
    size = momentum.numel()
    if scale == "geometric" or size == 0:
        return reference.measure(momentum, grad, beta1, scale)
    parts = torch.empty(_grid(size)[0], dtype=torch.float64, device=momentum.device)
    largest = scale == "max"
    _measure[_grid(size)](parts, momentum, grad, size, beta1, 1 - beta1, largest, _WORDS, **_EXACT)
    value = parts.max() if largest else parts.sum() / size
    return value.to(torch.float32)


@_there
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
    size, planes = momentum.numel(), (2 * largest).bit_length()
    betas = (beta1, 1 - beta1, beta2, 1 - beta2)
    _encode_levels[_grid(size)](
        out,
        out.stride(0),
        at // 64,
        words,
        momentum,
        grad,
        size,
        *betas,
        multiplier,
        largest,
        planes,
        _WORDS,
        **_EXACT,
    )


@_there
def sum_planes(rows: Tensor, at: int, words: int, planes: int, largest: int, out: Tensor) -> None:
    n = rows.shape[0]
    q = (n * largest).bit_length()
    _sum_planes[_grid(64 * words)](rows, rows.stride(0), at, words, n, planes, q, out, _WORDS)


@_there
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
    _compare_sum[_grid(64 * words)](
        rows, rows.stride(0), at, words, rows.shape[0], planes, constant, greater, equal, _WORDS
    )


@_there
def pack_votes(greater: Tensor, equal: Tensor, out: Tensor) -> None:
    block = 256
    grid = (triton.cdiv(out.numel(), block),)
    _pack_votes[grid](greater, equal, 64 * greater.numel(), out, out.numel(), block)


@_there
def apply_signs(params: Tensor, answers: Tensor, lr: float, weight_decay: float) -> None:
    size = params.numel()
    _apply_signs[_grid(size)](
        params, answers, answers.shape[1], size, 1 - lr * weight_decay, -lr, _WORDS, **_EXACT
    )


@_there
def apply_levels(
    params: Tensor, answers: Tensor, largest: int, lr: float, weight_decay: float
) -> None:
    size, planes = params.numel(), largest.bit_length()
    _apply_levels[_grid(size)](
        params,
        answers,
        answers.shape[1] // planes,
        size,
        planes,
        2 / largest,
        1 - lr * weight_decay,
        -lr,
        _WORDS,
        **_EXACT,
    )


@_there
def apply_trits(
    params: Tensor, answers: Tensor, length: int, lr: float, weight_decay: float
) -> None:
    size = params.numel()
    _apply_trits[_grid(size)](
        params,
        answers,
        length,
        answers.shape[1],
        size,
        1 - lr * weight_decay,
        -lr,
        _WORDS,
        **_EXACT,
    )


@_there
def lion(
    params: Tensor,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
) -> None:
    size = params.numel()
    factors = (beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay, -lr)
    _lion[_grid(size)](params, momentum, grad, size, *factors, _WORDS, **_EXACT)


def _grid(size: int) -> tuple[int]:
    return (triton.cdiv(size, 64 * _WORDS),)


# ------------------------------------------------------------------ compiled


@triton.jit
def _places(WORDS: tl.constexpr):
    """The words of this program ``[WORDS]`` and the values in them ``[WORDS, 64]``."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return word, word[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit
def _pack(flags):
    """Booleans ``[WORDS, 64]`` as words."""
    lanes = tl.arange(0, 64).to(tl.int64)
    return tl.sum(flags.to(tl.int64) << lanes[None, :], axis=1)


@triton.jit
def _unpack(words):
    """Bits of words ``[WORDS]`` as int32 ``[WORDS, 64]``."""
    lanes = tl.arange(0, 64).to(tl.int64)
    return (words[:, None] >> lanes[None, :] & 1).to(tl.int32)


@triton.jit
def _row_place(first, word, words, stride):
    """Where a word of the bucket is in a message of a row for each owner."""
    place = first + word
    return place // words * stride + place % words


@triton.jit
def _encode_signs(
    out, stride, first, words, momentum, grad, size, b1, a1, b2, a2,
    POSITIVE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    word, index = _places(WORDS)
    there = index < size
    m = tl.load(momentum + index, mask=there, other=0.0)
    g = tl.load(grad + index, mask=there, other=0.0).to(tl.float32)
    u = m * b1 + g * a1
    flags = (u < 0) == 0 if POSITIVE else u > 0
    packed = _pack(flags & there)
    tl.store(out + _row_place(first, word, words, stride), packed, mask=word * 64 < size)
    tl.store(momentum + index, m * b2 + g * a2, mask=there)


@triton.jit
def _measure(parts, momentum, grad, size, b1, a1, LARGEST: tl.constexpr, WORDS: tl.constexpr):
    _, index = _places(WORDS)
    there = index < size
    m = tl.load(momentum + index, mask=there, other=0.0)
    g = tl.load(grad + index, mask=there, other=0.0).to(tl.float32)
    values = tl.ravel(tl.abs(m * b1 + g * a1).to(tl.float64))
    if LARGEST:
        bad = tl.sum((values != values).to(tl.int32), axis=0)
        part = tl.where(bad > 0, float("nan"), tl.max(values, axis=0))
    else:
        part = tl.sum(values, axis=0)
    tl.store(parts + tl.program_id(0), part)


@triton.jit
def _encode_levels(
    out, stride, first, words, momentum, grad, size, b1, a1, b2, a2, multiplier,
    LARGEST: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    word, index = _places(WORDS)
    there = index < size
    m = tl.load(momentum + index, mask=there, other=0.0)
    g = tl.load(grad + index, mask=there, other=0.0).to(tl.float32)
    value = (m * b1 + g * a1) * tl.load(multiplier)
    value = tl.where(value == value, value, 0.0)
    value = tl.minimum(tl.maximum(value, -1.0 * LARGEST), 1.0 * LARGEST)
    value = (value + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to an even integer
    level = (value + LARGEST).to(tl.int32)
    start = _row_place(first, word, words, stride)
    for b in tl.static_range(PLANES):
        packed = _pack(((level >> b & 1) == 1) & there)
        tl.store(out + start + b * words, packed, mask=word * 64 < size)
    tl.store(momentum + index, m * b2 + g * a2, mask=there)


@triton.jit
def _add(rows, stride, at, words, n, word, PLANES: tl.constexpr, WORDS: tl.constexpr):
    """The sum of n messages, int32 ``[WORDS, 64]``."""
    total = tl.zeros((WORDS, 64), dtype=tl.int32)
    start = rows + at + word
    for _ in range(n):
        for b in tl.static_range(PLANES):
            total += _unpack(tl.load(start + b * words, mask=word < words, other=0)) << b
        start += stride
    return total


@triton.jit
def _sum_planes(
    rows, stride, at, words, n, PLANES: tl.constexpr, Q: tl.constexpr, out, WORDS: tl.constexpr
):
    word, _ = _places(WORDS)
    total = _add(rows, stride, at, words, n, word, PLANES, WORDS)
    for b in tl.static_range(Q):
        tl.store(out + b * words + word, _pack(total >> b & 1), mask=word < words)


@triton.jit
def _compare_sum(
    rows, stride, at, words, n, PLANES: tl.constexpr, constant, greater, equal, WORDS: tl.constexpr
):
    word, _ = _places(WORDS)
    total = _add(rows, stride, at, words, n, word, PLANES, WORDS)
    tl.store(greater + word, _pack(total > constant), mask=word < words)
    tl.store(equal + word, _pack(total == constant), mask=word < words)


@triton.jit
def _pack_votes(greater, equal, length, out, size, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), dtype=tl.int32)
    for back in tl.static_range(5):
        index = 5 * byte + 4 - back
        there = (byte < size) & (index < length)
        more = tl.load(greater + index // 64, mask=there, other=0) >> (index % 64) & 1
        same = tl.load(equal + index // 64, mask=there, other=0) >> (index % 64) & 1
        digit = tl.where(there, 2 * more + same, 1).to(tl.int32)
        value = 3 * value + digit
    tl.store(out + byte, value.to(tl.uint8), mask=byte < size)


@triton.jit
def _apply(params, index, there, change, decay):
    x = tl.load(params + index, mask=there, other=0.0)
    moved = x.to(tl.float32) * decay + change
    tl.store(params + index, moved.to(x.dtype), mask=there)


@triton.jit
def _apply_signs(params, answers, words, size, decay, rate, WORDS: tl.constexpr):
    word, index = _places(WORDS)
    packed = tl.load(answers + word, mask=word * 64 < size, other=0)  # rows follow each other
    change = tl.where(_unpack(packed) == 1, rate, -rate)
    _apply(params, index, index < size, change, decay)


@triton.jit
def _apply_levels(
    params, answers, words, size, PLANES: tl.constexpr, unit, decay, rate, WORDS: tl.constexpr
):
    word, index = _places(WORDS)
    level = tl.zeros((WORDS, 64), dtype=tl.int32)
    start = word // words * words * PLANES + word % words
    for b in tl.static_range(PLANES):
        level += _unpack(tl.load(answers + start + b * words, mask=word * 64 < size, other=0)) << b
    change = (level.to(tl.float32) * unit - 1.0) * rate
    _apply(params, index, index < size, change, decay)


@triton.jit
def _apply_trits(params, answers, length, row_bytes, size, decay, rate, WORDS: tl.constexpr):
    _, index = _places(WORDS)
    there = index < size
    place = index % length
    byte = tl.load(answers + index // length * row_bytes + place // 5, mask=there, other=121)
    value, digit = byte.to(tl.int32), place % 5
    for j in tl.static_range(4):
        value = tl.where(digit > j, value // 3, value)
    change = (value % 3 - 1).to(tl.float32) * rate
    _apply(params, index, there, change, decay)


@triton.jit
def _lion(params, momentum, grad, size, b1, a1, b2, a2, decay, rate, WORDS: tl.constexpr):
    _, index = _places(WORDS)
    there = index < size
    m = tl.load(momentum + index, mask=there, other=0.0)
    g = tl.load(grad + index, mask=there, other=0.0).to(tl.float32)
    u = m * b1 + g * a1
    sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    _apply(params, index, there, sign * rate, decay)
    tl.store(momentum + index, m * b2 + g * a2, mask=there)
