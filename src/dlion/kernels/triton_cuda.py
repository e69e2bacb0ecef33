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
from dlion.kernels.rounding import MIX, PLACE
from dlion.kernels.steps import BASE, SHIFT
from dlion.transfer import upload

_BLOCK = tl.constexpr(1024)  # values of a program
_WORDS = tl.constexpr(256)  # words of a program that adds messages
_PARTS = tl.constexpr(256)  # partial sums that a program adds at a time
_LANES = tl.constexpr(512)  # of a program that packs votes, 20 each
_HALVES = tl.constexpr(128)  # of a program that follows deltas
_SHIFT, _BASE = tl.constexpr(SHIFT), tl.constexpr(BASE)
_PLACE_FACTOR = tl.constexpr(PLACE)
_MIX_1, _MIX_2 = map(tl.constexpr, MIX)
EXACT = {"enable_fp_fusion": False}  # products and sums are rounded one by one
# where a message lies differs from bucket to bucket, and none of it is worth a compilation
_PLACE = ["row", "plane", "words", "n"]


def on_device(function: Callable) -> Callable:
    """Make the device of the first argument the current one for a call."""

    @wraps(function)
    def run(first: Tensor, *args):
        with torch.cuda.device_of(first):
            return function(first, *args)

    return run


@on_device
def encode_signs(message, momentum, gradients, beta1, beta2, positive):
    table = _table(gradients, momentum)
    factors = *_betas(beta1, beta2), positive
    _encode_signs[table.grid](*_layout(message), momentum, *table, *factors, **EXACT)


@on_device
def measure(momentum, gradients, beta1, scale):
    if scale == "geometric":
        return reference.measure(momentum, gradients, beta1, scale)
    table, count = _table(gradients, momentum), len(gradients.tensors)
    parts = torch.empty(table.grid, dtype=torch.float64, device=momentum.device)
    scales = torch.empty(count, dtype=torch.float32, device=momentum.device)
    factors, largest = (float(beta1), float(1 - beta1)), scale == "max"
    _measure[table.grid](parts, momentum, *table, *factors, largest, **EXACT)
    _combine[(count,)](parts, table.places, scales, largest, **EXACT)
    return scales


@on_device
def encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest):
    table = _table(gradients, momentum)
    factors = *_betas(beta1, beta2), multipliers, largest, message.shape[1]
    _encode_levels[table.grid](*_layout(message), momentum, *table, *factors, **EXACT)


@on_device
def sum_planes(rows, largest, out):
    n, planes, words = rows.shape
    _sum_planes[_words(words)](*_layout(rows), n, planes, out, out.shape[0], **EXACT)


@on_device
def compare_sum(rows, largest, constant, greater, equal):
    n, planes, words = rows.shape
    bits = (n * largest).bit_length()
    masks = (greater, equal)
    _compare_sum[_words(words)](*_layout(rows), n, planes, bits, constant, *masks, **EXACT)


@on_device
def pack_votes(greater, equal, out):
    grid = (triton.cdiv(out.numel(), 4 * _LANES.value),)
    _pack_votes[grid](greater, equal, greater.numel(), out, out.numel(), **EXACT)


@on_device
def encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise):
    table, state = _table(gradients, momentum), (*coder, coder.history.stride(0))
    factors = _betas(beta1, beta2)
    _encode_deltas[table.grid](
        *_layout(message), momentum, *table, *factors, *state, int(rise), **EXACT
    )


@on_device
def decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied):
    received, weighted = (*_layout(messages), rows, len(rows)), weights is not None
    state = (*coders, *(s for t in coders for s in t.stride()[:-1]))
    sums = (weights if weighted else coders.estimate, weighted, float(lookahead), positive, tied)
    grid = (triton.cdiv(2 * len(positive), _HALVES.value),)
    _decode_deltas[grid](*received, *state, int(rise), *sums, **EXACT)


@on_device
def apply_signs(params, answers, lr, weight_decay):
    size, answers = params.numel(), _layout(answers.unsqueeze(1))
    _apply_signs[grid_for(size)](params, size, *answers, *rates_of(lr, weight_decay), **EXACT)


@on_device
def apply_levels(params, answers, largest, lr, weight_decay):
    size, planes = params.numel(), answers.shape[1]
    factors = (2 / largest, *rates_of(lr, weight_decay))
    _apply_levels[grid_for(size)](params, size, *_layout(answers), planes, *factors, **EXACT)


@on_device
def apply_trits(params, answers, length, lr, weight_decay):
    size, row = params.numel(), answers.stride(0)
    factors = rates_of(lr, weight_decay)
    _apply_trits[grid_for(size)](params, size, answers, row, length // 64, *factors, **EXACT)


@on_device
def lion(params, momentum, grad, beta1, beta2, lr, weight_decay):
    size = params.numel()
    factors = (*_betas(beta1, beta2), *rates_of(lr, weight_decay))
    _lion[grid_for(size)](params, momentum, grad, size, *factors, **EXACT)


@on_device
def round_at_random(params, values, key):
    size, signed = params.numel(), (half - (half >> 31 << 32) for half in key)
    _round_at_random[grid_for(size)](params, values, size, *signed, **EXACT)


def grid_for(size: int) -> tuple[int]:
    return (triton.cdiv(size, _BLOCK.value),)


def _words(words: int) -> tuple[int]:
    return (triton.cdiv(words, _WORDS.value),)


def _layout(message: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a message, its strides of rows and of planes, and the words of a plane."""
    return message, message.stride(0), message.stride(1), message.shape[2]


def _betas(beta1: float, beta2: float) -> tuple[float, ...]:
    return float(beta1), float(1 - beta1), float(beta2), float(1 - beta2)


def rates_of(lr: float, weight_decay: float) -> tuple[float, float]:
    return float(1 - lr * weight_decay), float(-lr)


class _Table(NamedTuple):
    """Lookup table by which the programs of a kernel find the gradients of a bucket.

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
def block_of_program(size):
    """Return the first value of this program, and how many there are from it on, up to _BLOCK.

    What follows is 32-bit arithmetic.
    """
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    return start, tl.minimum(size - start, _BLOCK).to(tl.int32)


@triton.jit
def index_in_block():
    """Return the places of values in a block ``[32, 32]``."""
    return tl.arange(0, 32)[:, None] * 32 + _lanes()


@triton.jit
def _pack(flags):
    """Pack booleans ``[32, 32]`` into halves ``[32]``."""
    return tl.sum(flags.to(tl.int32) << _lanes(), axis=1)


@triton.jit
def _unpack(halves):
    """Unpack the bits of halves ``[32]``: int32 ``[32, 32]``."""
    return halves[:, None] >> _lanes() & 1


@triton.jit
def _halves_at(message, start, row, words):
    """Return pointers to the halves of words ``[32]`` that a block has in a message.

    Args:
        start: the first element of the block in the bucket.
        row: how many words after another the rows of ``words`` words of the message start.
    """
    half = (start // 32).to(tl.int32) + tl.arange(0, 32)
    word, words = half.to(tl.uint32) // 2, words.to(tl.uint32)
    which = word // words
    offset = which.to(tl.int64) * row + (word - which * words)
    return _in_halves(message) + 2 * offset + half % 2


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

    Returns its first element in the bucket, how many of its elements are of the parameter, a
    pointer to their gradients, and how many gradients there are: as many, or 0.
    """
    program = tl.program_id(0)
    parameter = tl.load(programs + program)
    place = places + parameter * 3
    skipped = (program - tl.load(place + 2)) * _BLOCK
    start = tl.multiple_of(tl.load(place) + skipped, 64)
    left = tl.minimum(tl.load(place + 1) - skipped, _BLOCK).to(tl.int32)
    address = tl.load(addresses + parameter)
    if HALF:
        grad = address.to(tl.pointer_type(tl.bfloat16))
    else:
        grad = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        grad = tl.multiple_of(grad, 16)
    return start, left, grad + skipped, tl.where(address != 0, left, 0)


@triton.jit
def _direction(momentum, grad, left, some, b1, a1, b2, a2, WHOLE: tl.constexpr):
    """Update the momentum and return the direction before it: float32 ``[32, 32]``."""
    index = index_in_block()
    inside = index < left
    m = _load(momentum + index, inside, WHOLE)
    g = _load(grad + index, index < some, WHOLE).to(tl.float32)
    _store(momentum + index, m * b2 + g * a2, inside, WHOLE)
    return m * b1 + g * a1


@triton.jit
def _inside(left):
    """Return which values ``[32, 32]``, and which halves of words ``[32]``, there are."""
    return index_in_block() < left, tl.arange(0, 32) // 2 * 64 < left


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
    target = _halves_at(message, start, row, words)
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
    target = _halves_at(message, start, row, words)
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


@triton.jit(do_not_specialize=[*_PLACE, "constant"])  # 1 would be a number of Python there
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
def _pack_votes(greater, equal, words, out, size):
    """Pack 20 votes of each lane as four bytes, all at once in one register."""
    first = tl.program_id(0).to(tl.int64) * _LANES
    lane = tl.arange(0, _LANES)
    half, shift = lane * 5 // 8, (lane * 5 % 8 * 4).to(tl.uint64)
    left = tl.minimum(2 * words - first * 5 // 8, _LANES).to(tl.int32)
    bytes_left = tl.minimum(size - 4 * first, 4 * _LANES).to(tl.int32)
    used = 4 * lane < bytes_left
    more = _twenty(_in_halves(greater) + first * 5 // 8, half, shift, left, used, 0)
    same = _twenty(_in_halves(equal) + first * 5 // 8, half, shift, left, used, -1)
    value = more >> 3 & 0x02020202 | same >> 4 & 0x01010101  # 2, 1 or 0: a trit and 1
    value = value * 3 + (more >> 2 & 0x02020202 | same >> 3 & 0x01010101)
    value = value * 3 + (more >> 1 & 0x02020202 | same >> 2 & 0x01010101)
    value = value * 3 + (more & 0x02020202 | same >> 1 & 0x01010101)
    value = value * 3 + (more << 1 & 0x02020202 | same & 0x01010101)
    byte = 4 * lane[:, None] + tl.arange(0, 4)[None, :]
    parts = value[:, None] >> 8 * tl.arange(0, 4)[None, :]
    tl.store(out + 4 * first + byte, parts.to(tl.uint8), mask=byte < bytes_left)


@triton.jit
def _twenty(mask, half, shift, left, used, other: tl.constexpr):
    """Return 20 bits of a mask, from a bit of a half on, as four bytes of five bits."""
    low = tl.load(mask + half, mask=used & (half < left), other=other)
    high = tl.load(mask + half + 1, mask=used & (half + 1 < left), other=other)
    pair = high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    bits = ((pair | low.to(tl.uint32, bitcast=True)) >> shift).to(tl.uint32)
    bits = (bits & 0x3FF) | (bits << 6 & 0x03FF0000)
    return (bits & 0x001F001F) | (bits << 3 & 0x1F001F00)


@triton.jit
def _delta_steps(bits, level, history, plane, rise, used, inside, WHOLE: tl.constexpr):
    """Adapt levels and history to halves of bits ``[H]``; four levels are the bytes of an integer.

    Args:
        level: pointers to fours of levels ``[H, 8]``.
        history: pointers to the halves of the bits before; whether these repeated follows.

    Returns the steps with their signs: float32 ``[H, 8, 4]``.
    """
    same = ~(bits ^ _load(history, used, WHOLE))
    rises = same & _load(history + 2 * plane, used, WHOLE)
    fours = _load(level, inside, WHOLE)
    tl.debug_barrier()  # several warps may have loaded a half that one of them stores
    _store(history, bits, used, WHOLE)
    _store(history + 2 * plane, same, used, WHOLE)
    fours = _adapt(fours, _spread(rises), _spread(~same), rise)
    _store(level, fours, inside, WHOLE)
    lane = tl.arange(0, 4)[None, None, :]
    steps = ((fours[:, :, None] >> 8 * lane & 255) << _SHIFT) + _BASE
    sign = ~(bits[:, None] >> 4 * tl.arange(0, 8)[None, :])[:, :, None] << (31 - lane)
    return (steps | sign & -2147483648).to(tl.float32, bitcast=True)


@triton.jit
def _spread(halves):
    """Return the bits of halves ``[H]`` as bytes of 0 or 1, four to an integer: ``[H, 8]``."""
    bits = halves[:, None] >> 4 * tl.arange(0, 8)[None, :] & 15
    return bits * 0x00204081 & 0x01010101


@triton.jit
def _adapt(fours, rises, falls, rise):
    """Add ``rise`` to levels where rises is 1, take 1 where falls is, and stay within 0 and 255.

    Four levels are the bytes of an integer, added without carries from one to the next.
    """
    falls *= 255  # -1
    change = rises * rise + falls
    total = (fours & 0x7F7F7F7F) + (change & 0x7F7F7F7F) ^ ((fours ^ change) & -2139062144)
    carry = (fours & change) | ((fours | change) & ~total)
    wrong = ((carry ^ falls) & -2139062144).to(tl.uint32, bitcast=True) >> 7  # rises must not carry
    wrong = (wrong * 255).to(tl.int32, bitcast=True)
    return (total | wrong) & ~(wrong & falls)


@triton.jit
def _pack_fours(flags):
    """Pack booleans ``[H, 8, 4]`` into halves ``[H]``."""
    place = 4 * tl.arange(0, 8)[None, :, None] + tl.arange(0, 4)[None, None, :]
    return tl.sum(tl.sum(flags.to(tl.int32) << place, axis=2), axis=1)


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
    target = _halves_at(message, start, row, words)
    history = _in_halves(history) + start // 32 + tl.arange(0, 32)
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
    four = tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
    index = four[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    h = _load(estimate + index, used[:, None, None], WHOLE)
    bits = _pack_fours(tl.reshape(u, (32, 8, 4)) >= h)
    level = level.to(tl.pointer_type(tl.int32)) + four
    steps = _delta_steps(bits, level, history, plane, rise, used, used[:, None], WHOLE)
    _store(estimate + index, h + steps, used[:, None, None], WHOLE)
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
    first = tl.program_id(0).to(tl.int64) * _HALVES
    half = tl.arange(0, _HALVES)
    left = tl.minimum(2 * words - first, _HALVES).to(tl.int32)
    four = half[:, None] * 8 + tl.arange(0, 8)[None, :]
    index = four[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    used, some, inside = half < left, four < 8 * left, index < 32 * left
    messages, history = _in_halves(messages) + first + half, _in_halves(history) + first + half
    estimate, level = estimate + first * 32, level + first * 32
    # loaded where there is nothing, as zeros would have another layout than what is added to them
    ahead = tl.load(estimate + index, mask=index < tl.minimum(left, 0), other=0.0)
    total = ahead
    if not WEIGHTED:
        total = tl.load(estimate + index, mask=inside, other=0.0)
    for i in range(n):
        sender, levels = tl.load(rows + i), level.to(tl.pointer_type(tl.int32)) + four
        if sender >= 0:
            bits = tl.load(messages + 2 * sender * row, mask=used, other=0)
            steps = _delta_steps(bits, levels, history, history_plane, rise, used, some, False)
            if WEIGHTED:
                h = tl.load(estimate + index, mask=inside, other=0.0) + steps
                tl.store(estimate + index, h, mask=inside)
                weight = tl.load(weights + i)
                total += h * weight
                ahead += steps * weight
            else:
                total += steps
                ahead += steps
        elif WEIGHTED:
            total += tl.load(estimate + index, mask=inside, other=0.0) * tl.load(weights + i)
        if WEIGHTED:
            estimate += estimate_row
        level += level_row
        history += 2 * history_row
    if not WEIGHTED:
        tl.store(estimate + index, total, mask=inside)
    value = total + ahead * lookahead
    tl.store(_in_halves(positive) + first + half, _pack_fours(value > 0), mask=used)
    tl.store(_in_halves(tied) + first + half, _pack_fours(value == 0), mask=used)


@triton.jit
def descend_block(values, left, change, decay):
    """Move a block of values ``[32, 32]``, of which there are ``left``."""
    index = index_in_block()
    inside = index < left
    x = tl.load(values + index, mask=inside, other=0.0)
    moved = x.to(tl.float32) * decay + change
    tl.store(values + index, moved.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=_PLACE)
def _apply_signs(values, size, answers, row, plane, words, decay, rate):
    start, left = block_of_program(size)
    half = tl.arange(0, 32)
    answers = _halves_at(answers, start, row, words)
    votes = tl.load(answers, mask=half * 32 < left, other=0)
    descend_block(values + start, left, tl.where(_unpack(votes) == 1, rate, -rate), decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_levels(
    values, size, answers, row, plane, words, PLANES: tl.constexpr, unit, decay, rate
):
    start, left = block_of_program(size)
    half = tl.arange(0, 32)
    answers = _halves_at(answers, start, row, words)
    level = tl.zeros((32, 32), dtype=tl.int32)
    for low in tl.static_range(0, PLANES, 8):
        fours = tl.zeros((32, 8), dtype=tl.int32)
        for b in tl.static_range(low, min(low + 8, PLANES)):
            halves = tl.load(answers + 2 * b * plane, mask=half * 32 < left, other=0)
            fours |= _spread(halves) << (b - low)
        bytes = fours[:, :, None] >> 8 * tl.arange(0, 4)[None, None, :] & 255
        level |= tl.reshape(bytes, (32, 32)) << low
    descend_block(values + start, left, (_float(level) * unit - 1.0) * rate, decay)


@triton.jit(do_not_specialize=_PLACE)
def _apply_trits(values, size, answers, row, words, decay, rate):
    start, left = block_of_program(size)
    half = (start // 32).to(tl.uint32) + tl.arange(0, 32).to(tl.uint32)
    which = half // (2 * words.to(tl.uint32))
    at = half - which * (2 * words.to(tl.uint32))
    # trit 32 h of a row is in byte 6 h + 2 h // 5
    answers += which.to(tl.int64) * row + 6 * at.to(tl.int64) + 2 * at // 5
    trit = (2 * at % 5)[:, None] + _lanes().to(tl.uint32)
    byte = trit * 52 >> 8  # trit // 5, as trits are below 36
    used = tl.arange(0, 32)[:, None] * 32 < left
    digit = _digit(tl.load(answers[:, None] + byte, mask=used, other=0), trit - 5 * byte)
    descend_block(values + start, left, digit * rate, decay)


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
    start, left = block_of_program(size)
    u = _direction(momentum + start, grad + start, left, left, b1, a1, b2, a2, False)
    sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    descend_block(values + start, left, sign * rate, decay)


@triton.jit(do_not_specialize=["first", "second"])
def _round_at_random(values, wide, size, first, second):
    start, left = block_of_program(size)
    index = index_in_block()
    value = tl.load(wide + start + index, mask=index < left, other=0.0)
    h = (start.to(tl.uint32) + index.to(tl.uint32)) * _PLACE_FACTOR + first.to(tl.uint32)
    h = (h ^ (h >> 16)) * _MIX_1
    h = (h ^ (h >> 13)) + second.to(tl.uint32)
    h = h * _MIX_2
    cut = (value.to(tl.uint32, bitcast=True) + (h >> 16)) & 0xFFFF0000
    rounded = tl.where(value == value, cut.to(tl.float32, bitcast=True), value)
    tl.store(values + start + index, rounded.to(values.dtype.element_ty), mask=index < left)
