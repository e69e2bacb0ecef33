"""The passes of :mod:`dlion.kernels` on a GPU, in Triton.

Messages are packed in memory and on the wire only. Kernels that read or write them value by value
handle 32 halves of words, 1024 values, in a program, in registers as ``[32, 32]``: 32-bit shifts
cost half of 64-bit ones. Sums of messages never unpack them: words are added as bit planes.

One launch encodes a whole bucket. Its gradients lie wherever autograd has left them, so a table on
the device has their addresses; each program handles values of one parameter alone.

Nothing here waits for the device. Without a GPU the same code runs under Triton's interpreter
(TRITON_INTERPRET=1), and tests/kernels/test_compiles.py compiles it for GPUs that are not there.
"""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlion.kernels import reference
from dlion.kernels.gradients import Gradients
from dlion.kernels.steps import BASE, SHIFT
from dlion.transfer import upload

_BLOCK = tl.constexpr(1024)  # values of a program
_WORDS = tl.constexpr(256)  # words of a program that adds messages
_PARTS = tl.constexpr(256)  # partial sums that a program adds at a time
_BYTES = tl.constexpr(256)  # of a program, where it packs trits
_SHIFT, _BASE = tl.constexpr(SHIFT), tl.constexpr(BASE)
_EXACT = {"enable_fp_fusion": False}  # products and sums are rounded one by one
# where a message lies differs from bucket to bucket, and none of it is worth a compilation
_PLACE = ["row", "plane", "words", "n", "length"]


def _on_device(function: Callable) -> Callable:
    """Make the device of the first argument the current one for a call."""

    @wraps(function)
    def run(first: Tensor, *args):
        with torch.cuda.device_of(first):
            return function(first, *args)

    return run


@_on_device
def encode_signs(message, momentum, gradients, beta1, beta2, positive):
    table = _table(gradients, momentum)
    factors = *_betas(beta1, beta2), positive
    _encode_signs[table.grid](*_layout(message), momentum, *table, *factors, **_EXACT)


@_on_device
def measure(momentum, gradients, beta1, scale):
    if scale == "geometric":
        return reference.measure(momentum, gradients, beta1, scale)
    table, count = _table(gradients, momentum), len(gradients.tensors)
    parts = torch.empty(table.grid, dtype=torch.float64, device=momentum.device)
    scales = torch.empty(count, dtype=torch.float32, device=momentum.device)
    factors, largest = (float(beta1), float(1 - beta1)), scale == "max"
    _measure[table.grid](parts, momentum, *table, *factors, largest, **_EXACT)
    _combine[(count,)](parts, table.places, scales, largest, **_EXACT)
    return scales


@_on_device
def encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest):
    table = _table(gradients, momentum)
    factors = *_betas(beta1, beta2), multipliers, largest, message.shape[1]
    _encode_levels[table.grid](*_layout(message), momentum, *table, *factors, **_EXACT)


@_on_device
def sum_planes(rows, largest, out):
    n, planes, words = rows.shape
    _sum_planes[_words(words)](*_layout(rows), n, planes, out, out.shape[0], **_EXACT)


@_on_device
def compare_sum(rows, largest, constant, greater, equal):
    n, planes, words = rows.shape
    bits = (n * largest).bit_length()
    masks = (greater, equal)
    _compare_sum[_words(words)](*_layout(rows), n, planes, bits, constant, *masks, **_EXACT)


@_on_device
def pack_votes(greater, equal, out):
    grid = (triton.cdiv(out.numel(), _BYTES.value),)
    _pack_votes[grid](greater, equal, 64 * greater.numel(), out, out.numel(), **_EXACT)


@_on_device
def encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise):
    table, state = _table(gradients, momentum), (*coder, coder.history.stride(0))
    factors = _betas(beta1, beta2)
    _encode_deltas[table.grid](
        *_layout(message), momentum, *table, *factors, *state, int(rise), **_EXACT
    )


@_on_device
def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    received, weighted = (*_layout(messages), rows, len(rows)), weights is not None
    state = (*coders, *(s for t in coders for s in t.stride()[:-1]))
    sums = (weights if weighted else coders.estimate, weighted, float(lookahead), positive, tied)
    _decode_deltas[_grid(64 * len(positive))](*received, *state, int(rise), *sums, **_EXACT)


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
    size, factors = params.numel(), (float(momentum), *_rates(lr, weight_decay))
    _momentum_descent[_grid(size)](params, buffer, answer, size, *factors, **_EXACT)


@_on_device
def accumulate(velocity, accumulated, grad, momentum):
    size = velocity.numel()
    _accumulate[_grid(size)](velocity, accumulated, grad, size, float(momentum), **_EXACT)


ternarise = reference.ternarise
# what selects, or touches a few places only, is left to torch
largest, descend_at = reference.largest, reference.descend_at
add_entries, take_mean = reference.add_entries, reference.take_mean


def _grid(size: int) -> tuple[int]:
    return (triton.cdiv(size, _BLOCK.value),)


def _words(words: int) -> tuple[int]:
    return (triton.cdiv(words, _WORDS.value),)


def _layout(message: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a message, its strides of rows and of planes, and the words of a plane."""
    return message, message.stride(0), message.stride(1), message.shape[2]


def _betas(beta1: float, beta2: float) -> tuple[float, ...]:
    return float(beta1), float(1 - beta1), float(beta2), float(1 - beta2)


def _rates(lr: float, weight_decay: float) -> tuple[float, float]:
    return float(1 - lr * weight_decay), float(-lr)


class _Table(NamedTuple):
    """How the programs of a kernel find the gradients of a bucket.

    Attributes:
        programs: the parameter of each program, int32 ``[P]``.
        places: of each parameter its start, its size and its first program, int64 ``[T, 3]``.
        addresses: of each gradient, 0 without one, int64 ``[T]``.
        half: whether they are of bfloat16.
        aligned: whether all addresses are multiples of 16.
    """

    programs: Tensor
    places: Tensor
    addresses: Tensor
    half: bool
    aligned: bool

    @property
    def grid(self) -> tuple[int]:
        return (self.programs.numel(),)


def _table(gradients: Gradients, momentum: Tensor) -> _Table:
    """Return the table of a bucket; only addresses that have changed are uploaded."""
    tables, device = gradients.places.tables, momentum.device
    if device not in tables:
        spans = torch.tensor(gradients.places.spans, dtype=torch.int64).view(-1, 2)
        sizes = spans[:, 1] - spans[:, 0]
        counts = (sizes + _BLOCK.value - 1) // _BLOCK.value
        places = torch.stack([spans[:, 0], sizes, counts.cumsum(0) - counts], 1)
        parameters = torch.arange(len(spans), dtype=torch.int32)
        programs = parameters.repeat_interleave(counts)
        tables[device] = programs.to(device), places.to(device), [], None
    programs, places, before, addresses = tables[device]
    now = [0 if grad is None else grad.data_ptr() for grad in gradients.tensors]
    if now != before:
        addresses = upload(torch.tensor(now, dtype=torch.int64), device)
        tables[device] = programs, places, now, addresses
    half = any(grad.dtype == torch.bfloat16 for grad in gradients.present[:1])
    aligned = not any(address % 16 for address in now)
    return _Table(programs, places, addresses, half, aligned)


@triton.jit
def _lanes():
    """Return the places of the bits of a half of a word ``[1, 32]``."""
    return tl.arange(0, 32)[None, :]


@triton.jit
def _halves():
    """Return the halves of this program ``[32]`` and their values ``[32, 32]``."""
    half = tl.program_id(0) * 32 + tl.arange(0, 32)
    return half, half.to(tl.int64)[:, None] * 32 + _lanes()


@triton.jit
def _pack(flags):
    """Pack booleans ``[32, 32]`` into halves ``[32]``."""
    return tl.sum(flags.to(tl.int32) << _lanes(), axis=1)


@triton.jit
def _unpack(halves):
    """Unpack the bits of halves ``[32]``: int32 ``[32, 32]``."""
    return halves[:, None] >> _lanes() & 1


@triton.jit
def _offset(half, row, words):
    """Find a half of a word of the bucket in a message whose rows of words start ``row`` apart."""
    word = half // 2
    return 2 * ((word // words).to(tl.int64) * row + word % words) + half % 2


@triton.jit
def _in_halves(words):
    return words.to(tl.pointer_type(tl.int32))


@triton.jit
def _load(pointer, inside, WHOLE: tl.constexpr):
    """Load values, zeros outside; without a mask where the whole block is inside."""
    if WHOLE:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0)


@triton.jit
def _store(pointer, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer, values)
    else:
        tl.store(pointer, values, mask=inside)


@triton.jit
def _find(programs, places, addresses, HALF: tl.constexpr, ALIGNED: tl.constexpr):
    """Find the block of this program.

    Returns its first element in the bucket, how many are left of the parameter, a pointer to their
    gradients, and how many gradients are left: 0 where there are none.
    """
    program = tl.program_id(0)
    parameter = tl.load(programs + program)
    place = places + parameter * 3
    skipped = (program - tl.load(place + 2)) * _BLOCK
    start = tl.multiple_of(tl.load(place) + skipped, 64)
    address = tl.load(addresses + parameter)
    if HALF:
        grad = address.to(tl.pointer_type(tl.bfloat16))
    else:
        grad = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        grad = tl.multiple_of(grad, 16)
    left = tl.load(place + 1) - skipped
    return start, left, grad + skipped, tl.where(address != 0, left, 0)


@triton.jit
def _direction(momentum, grad, left, some, b1, a1, b2, a2, WHOLE: tl.constexpr):
    """Update the momentum and return the direction before it: float32 ``[32, 32]``."""
    index = tl.arange(0, 32)[:, None] * 32 + _lanes()
    inside = index < left
    m = _load(momentum + index, inside, WHOLE)
    g = _load(grad + index, index < some, WHOLE).to(tl.float32)
    _store(momentum + index, m * b2 + g * a2, inside, WHOLE)
    return m * b1 + g * a1


@triton.jit
def _inside(left):
    """Return which values ``[32, 32]``, and which halves of words ``[32]``, there are."""
    row = tl.arange(0, 32)
    return row[:, None] * 32 + _lanes() < left, row // 2 * 64 < left


@triton.jit(do_not_specialize=_PLACE)
def _encode_signs(
    message,
    row,
    plane,
    words,
    momentum,
    programs,
    places,
    addresses,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    b1,
    a1,
    b2,
    a2,
    POSITIVE: tl.constexpr,
):
    start, left, grad, some = _find(programs, places, addresses, HALF, ALIGNED)
    half = (start // 32).to(tl.int32) + tl.arange(0, 32)
    target = _in_halves(message) + _offset(half, row, words)
    momentum += start
    if some >= _BLOCK:
        _write_signs(target, momentum, grad, left, some, b1, a1, b2, a2, POSITIVE, True)
    else:
        _write_signs(target, momentum, grad, left, some, b1, a1, b2, a2, POSITIVE, False)


@triton.jit
def _write_signs(
    target,
    momentum,
    grad,
    left,
    some,
    b1,
    a1,
    b2,
    a2,
    POSITIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    u = _direction(momentum, grad, left, some, b1, a1, b2, a2, WHOLE)
    inside, used = _inside(left)
    flags = (u < 0) == 0 if POSITIVE else u > 0
    if not WHOLE:
        flags = flags & inside
    _store(target, _pack(flags), used, WHOLE)


@triton.jit(do_not_specialize=_PLACE)
def _encode_levels(
    message,
    row,
    plane,
    words,
    momentum,
    programs,
    places,
    addresses,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    b1,
    a1,
    b2,
    a2,
    multipliers,
    LARGEST: tl.constexpr,
    PLANES: tl.constexpr,
):
    start, left, grad, some = _find(programs, places, addresses, HALF, ALIGNED)
    factor = tl.load(multipliers + tl.load(programs + tl.program_id(0)))
    half = (start // 32).to(tl.int32) + tl.arange(0, 32)
    target = _in_halves(message) + _offset(half, row, words)
    momentum += start
    if some >= _BLOCK:
        u = _direction(momentum, grad, left, some, b1, a1, b2, a2, True)
        _write_levels(target, plane, u * factor, left, LARGEST, PLANES, True)
    else:
        u = _direction(momentum, grad, left, some, b1, a1, b2, a2, False)
        _write_levels(target, plane, u * factor, left, LARGEST, PLANES, False)


@triton.jit
def _write_levels(
    target, plane, value, left, LARGEST: tl.constexpr, PLANES: tl.constexpr, WHOLE: tl.constexpr
):
    """Round values ``[32, 32]`` to levels and write their planes.

    Four levels are the bytes of an integer: one multiplication collects a bit of each of them.
    """
    inside, used = _inside(left)
    value = tl.where(value == value, value, 0.0)
    value = tl.minimum(tl.maximum(value, -1.0 * LARGEST), 1.0 * LARGEST)
    # adding 1.5 * 2**23 rounds to an integer, halves to even, which its lowest bits then are
    level = (value + 12582912.0).to(tl.int32, bitcast=True) - (0x4B400000 - LARGEST)
    if not WHOLE:
        level = tl.where(inside, level, 0)
    fours = tl.reshape(level, (32, 8, 4)) << 8 * tl.arange(0, 4)[None, None, :]
    fours = tl.sum(fours, axis=2)
    for b in tl.static_range(PLANES):
        bits = ((fours >> b & 0x01010101) * 0x10204080).to(tl.uint32, bitcast=True) >> 28
        packed = tl.sum(bits.to(tl.int32) << 4 * tl.arange(0, 8)[None, :], axis=1)
        _store(target + 2 * b * plane, packed, used, WHOLE)


@triton.jit
def _measure(
    parts,
    momentum,
    programs,
    places,
    addresses,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    b1,
    a1,
    LARGEST: tl.constexpr,
):
    start, left, grad, some = _find(programs, places, addresses, HALF, ALIGNED)
    momentum += start
    if some >= _BLOCK:
        part = _size(momentum, grad, left, some, b1, a1, LARGEST, True)
    else:
        part = _size(momentum, grad, left, some, b1, a1, LARGEST, False)
    tl.store(parts + tl.program_id(0), part)


@triton.jit
def _size(momentum, grad, left, some, b1, a1, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """Return the sum, or the largest, of ``|u|`` of a block, float64; NaN if one is."""
    index = tl.arange(0, _BLOCK)
    inside = index < left
    m = _load(momentum + index, inside, WHOLE)
    g = _load(grad + index, index < some, WHOLE).to(tl.float32)
    return _total(tl.abs(m * b1 + g * a1).to(tl.float64), LARGEST)


@triton.jit
def _total(values, LARGEST: tl.constexpr):
    if LARGEST:
        bad = tl.sum((values != values).to(tl.int32), axis=0)
        return tl.where(bad > 0, float("nan"), tl.max(values, axis=0))
    return tl.sum(values, axis=0)


@triton.jit
def _combine(parts, places, scales, LARGEST: tl.constexpr):
    """Return the scale of the parameter of this program, from its partial sums."""
    place = places + tl.program_id(0) * 3
    size, first = tl.load(place + 1), tl.load(place + 2)
    count = tl.cdiv(size, _BLOCK)
    total = tl.zeros((_PARTS,), dtype=tl.float64)
    for start in range(0, count, _PARTS):
        index = start + tl.arange(0, _PARTS)
        some = tl.load(parts + first + index, mask=index < count, other=0.0)
        if LARGEST:
            total = tl.where((some > total) | (some != some), some, total)
        else:
            total += some
    result = _total(total, LARGEST)
    if not LARGEST:
        result = result / size.to(tl.float64)
    tl.store(scales + tl.program_id(0), result.to(tl.float32))


@triton.jit
def _add_planes(sums, message, plane, inside, PLANES: tl.constexpr, BITS: tl.constexpr):
    """Add a message of ``PLANES`` planes to sums of ``BITS`` planes: a ripple-carry adder."""
    result = ()
    carry = sums[0] ^ sums[0]
    for b in tl.static_range(BITS):
        if b < PLANES:
            word = tl.load(message + b * plane, mask=inside, other=0)
            half = sums[b] ^ word
            result = result + (half ^ carry,)
            carry = (sums[b] & word) | (half & carry)
        else:
            result = result + (sums[b] ^ carry,)
            carry = sums[b] & carry
    return result


@triton.jit
def _sum(rows, row, plane, inside, n, PLANES: tl.constexpr, BITS: tl.constexpr):
    """Add n messages of words ``[_WORDS]``: a tuple of ``BITS`` planes."""
    sums = ()
    for _ in tl.static_range(BITS):
        sums = sums + (tl.zeros((_WORDS,), dtype=tl.int64),)
    for _ in range(n):
        sums = _add_planes(sums, rows, plane, inside, PLANES, BITS)
        rows += row
    return sums


@triton.jit(do_not_specialize=_PLACE)
def _sum_planes(rows, row, plane, words, n, PLANES: tl.constexpr, out, BITS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * _WORDS + tl.arange(0, _WORDS)
    inside = word < words
    sums = _sum(rows + word, row, plane, inside, n, PLANES, BITS)
    for b in tl.static_range(BITS):
        tl.store(out + b * words + word, sums[b], mask=inside)


@triton.jit(do_not_specialize=_PLACE)
def _compare_sum(
    rows,
    row,
    plane,
    words,
    n,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    constant,
    greater,
    equal,
):
    word = tl.program_id(0).to(tl.int64) * _WORDS + tl.arange(0, _WORDS)
    inside = word < words
    sums = _sum(rows + word, row, plane, inside, n, PLANES, BITS)
    above = sums[0] ^ sums[0]
    same = ~above
    for i in tl.static_range(BITS):
        bit = -(constant >> (BITS - 1 - i) & 1).to(tl.int64)  # all ones, or all zeros
        above |= same & sums[BITS - 1 - i] & ~bit
        same &= ~(sums[BITS - 1 - i] ^ bit)
    tl.store(greater + word, above, mask=inside)
    tl.store(equal + word, same, mask=inside)


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
def _delta_steps(bits, level, history, plane, rise, used, inside, WHOLE: tl.constexpr):
    """Adapt the levels and the history at two pointers to halves of bits ``[32]``.

    Returns the steps with their signs: float32 ``[32, 32]``.
    """
    same = ~(bits ^ _load(history, used, WHOLE))
    rises = same & _load(history + 2 * plane, used, WHOLE)
    tl.debug_barrier()  # several warps may have loaded a half that one of them stores
    _store(history, bits, used, WHOLE)
    _store(history + 2 * plane, same, used, WHOLE)
    change = _unpack(rises) * rise + _unpack(same) - 1
    levels = _load(level, inside, WHOLE).to(tl.int32) + change
    levels = tl.minimum(tl.maximum(levels, 0), 255)
    _store(level, levels.to(tl.uint8), inside, WHOLE)
    negative = _unpack(~bits) << 31
    return (((levels << _SHIFT) + _BASE) | negative).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_PLACE)
def _encode_deltas(
    message,
    row,
    plane,
    words,
    momentum,
    programs,
    places,
    addresses,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    start, left, grad, some = _find(programs, places, addresses, HALF, ALIGNED)
    half = (start // 32).to(tl.int32) + tl.arange(0, 32)
    target, history = _in_halves(message) + _offset(half, row, words), _in_halves(history) + half
    momentum, estimate, level = momentum + start, estimate + start, level + start
    if some >= _BLOCK:
        u = _direction(momentum, grad, left, some, b1, a1, b2, a2, True)
        _write_deltas(target, u, left, estimate, level, history, history_plane, rise, True)
    else:
        u = _direction(momentum, grad, left, some, b1, a1, b2, a2, False)
        _write_deltas(target, u, left, estimate, level, history, history_plane, rise, False)


@triton.jit
def _write_deltas(target, u, left, estimate, level, history, plane, rise, WHOLE: tl.constexpr):
    """Delta-modulate directions ``[32, 32]``: whole words, in whose gaps they are 0."""
    _, used = _inside(left)
    index, inside = tl.arange(0, 32)[:, None] * 32 + _lanes(), used[:, None]
    h = _load(estimate + index, inside, WHOLE)
    bits = _pack(u >= h)
    steps = _delta_steps(bits, level + index, history, plane, rise, used, inside, WHOLE)
    _store(estimate + index, h + steps, inside, WHOLE)
    _store(target, bits, used, WHOLE)


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
    half, index = _halves()
    used = half < 2 * words
    inside = used[:, None]
    total = tl.zeros((32, 32), dtype=tl.float32)
    ahead = tl.zeros((32, 32), dtype=tl.float32)
    messages, history = _in_halves(messages) + half, _in_halves(history) + half
    estimate, level = estimate + index, level + index
    if not WEIGHTED:
        total = tl.load(estimate, mask=inside, other=0.0)
    for i in range(n):
        sender = tl.load(rows + i)
        steps = tl.zeros((32, 32), dtype=tl.float32)
        if sender >= 0:
            bits = tl.load(messages + 2 * sender * row, mask=used, other=0)
            steps = _delta_steps(bits, level, history, history_plane, rise, used, inside, False)
        if WEIGHTED:
            h = tl.load(estimate, mask=inside, other=0.0) + steps
            tl.store(estimate, h, mask=inside)
            weight = tl.load(weights + i)
            total += h * weight
            ahead += steps * weight
            estimate += estimate_row
        else:
            total += steps
            ahead += steps
        level += level_row
        history += 2 * history_row
    if not WEIGHTED:
        tl.store(estimate, total, mask=inside)
    value = total + ahead * lookahead
    tl.store(_in_halves(positive) + half, _pack(value > 0), mask=used)
    tl.store(_in_halves(tied) + half, _pack(value == 0), mask=used)


@triton.jit
def _descend(values, index, inside, change, decay):
    x = tl.load(values + index, mask=inside, other=0.0)
    moved = x.to(tl.float32) * decay + change
    tl.store(values + index, moved.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=_PLACE)
def _apply_signs(values, size, answers, row, plane, words, decay, rate):
    half, index = _halves()
    inside = index < size
    start = _in_halves(answers) + _offset(half, row, words)
    votes = tl.load(start, mask=half.to(tl.int64) * 32 < size, other=0)
    change = tl.where(_unpack(votes) == 1, rate, -rate)
    _descend(values, index, inside, change, decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_levels(
    values, size, answers, row, plane, words, PLANES: tl.constexpr, unit, decay, rate
):
    half, index = _halves()
    start, used = _in_halves(answers) + _offset(half, row, words), half.to(tl.int64) * 32 < size
    level = tl.zeros((32, 32), dtype=tl.int32)
    for low in tl.static_range(0, PLANES, 8):
        # four levels are the bytes of an integer: a multiplication hands a bit to each of them
        fours = tl.zeros((32, 8), dtype=tl.int32)
        for b in tl.static_range(low, min(low + 8, PLANES)):
            halves = tl.load(start + 2 * b * plane, mask=used, other=0)
            bits = halves[:, None] >> 4 * tl.arange(0, 8)[None, :] & 15
            fours |= (bits * 0x00204081 & 0x01010101) << (b - low)
        bytes = fours[:, :, None] >> 8 * tl.arange(0, 4)[None, None, :] & 255
        level |= tl.reshape(bytes, (32, 32)) << low
    change = (_float(level) * unit - 1.0) * rate
    _descend(values, index, index < size, change, decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_trits(values, size, answers, row, words, decay, rate):
    half, index = _halves()
    at = (half % (2 * words)).to(tl.uint32)
    # trit 32 h of a row is in byte 6 h + 2 h // 5
    start = answers + (half // (2 * words)).to(tl.int64) * row + 6 * at.to(tl.int64) + 2 * at // 5
    trit = (2 * at % 5)[:, None] + _lanes().to(tl.uint32)
    byte = trit * 52 >> 8  # trit // 5, as trits are below 36
    used = half.to(tl.int64)[:, None] * 32 < size
    digit = _digit(tl.load(start[:, None] + byte, mask=used, other=0), trit - 5 * byte)
    _descend(values, index, index < size, digit * rate, decay)


@triton.jit
def _digit(byte, place):
    """Return a base-3 digit of bytes below 243, less 1: float32; place 0 is that of 1.

    The digit is the first one of ``byte * 3**(4 - place) / 243`` behind the point, in base 3. That
    fraction is a 32-bit integer, in units of ``2**-32``: what overflows is of no interest.
    """
    power = (0x0103091B51 >> (8 * place).to(tl.int64)).to(tl.uint32) & 255  # 81, 27, 9, 3, 1
    fraction = byte.to(tl.uint32) * power * 17674763  # ceil(2**32 / 243)
    return _float(tl.umulhi(fraction, fraction * 0 + 3)) - 1.0


@triton.jit
def _float(integer):
    """Return integers from 0 to 2**23 - 1 as float32, faster than a GPU converts them."""
    return (integer.to(tl.int32, bitcast=True) | 0x4B000000).to(
        tl.float32, bitcast=True
    ) - 8388608.0


@triton.jit
def _lion(values, momentum, grad, size, b1, a1, b2, a2, decay, rate):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    left, index = size - start, tl.arange(0, 32)[:, None] * 32 + _lanes()
    u = _direction(momentum + start, grad + start, left, left, b1, a1, b2, a2, False)
    sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    _descend(values + start, index, index < left, sign * rate, decay)


@triton.jit
def _momentum_descent(values, buffer, answer, size, momentum, decay, rate):
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = index < size
    b = _moved(buffer, answer, index, inside, momentum)
    _descend(values, index, inside, b * rate, decay)


@triton.jit
def _accumulate(velocity, accumulated, grad, size, momentum):
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
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
