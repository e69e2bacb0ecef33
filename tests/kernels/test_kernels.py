"""The compiled kernels give the bits of the reference, and the reference means what it says."""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from dlion import kernels
from dlion.kernels import Coder, numba_cpu, reference, triton_cuda
from dlion.wire import packing

INTERPRETED = not torch.cuda.is_available()
NAN, INF = math.nan, math.inf
LENGTHS = [1, 63, 64, 65, 1100]
ODD = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1.0, -1.0]
COMPILED = {
    "cpu": (kernels, "cpu"),
    "triton": (triton_cuda, "cpu") if INTERPRETED else (kernels, "cuda"),
}

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
lengths = pytest.mark.parametrize("length", LENGTHS)


class Message(NamedTuple):
    """A message inside longer rows: words precede and follow each."""

    rows: torch.Tensor
    planes: int
    words: int
    flat: bool = False  # without the dimension of planes

    def view(self) -> torch.Tensor:
        inside = self.rows[:, 3 : 3 + self.planes * self.words]
        return inside if self.flat else inside.unflatten(1, (self.planes, self.words))


@pytest.fixture(params=COMPILED)
def compiled(request):
    """The compiled kernels of a kind of device, and where their tensors live."""
    return COMPILED[request.param]


def both(compiled, name: str, *arguments) -> bool:
    """Whether a compiled kernel and the reference leave the same bits in all their arguments."""
    results = []
    for module, device in (compiled, (reference, "cpu")):
        copies = [copied(argument, device) for argument in arguments]
        run(module, name, *copies)
        results.append([tensor.cpu() for tensor in tensors(copies)])
    exact = not (INTERPRETED and compiled[0] is triton_cuda)
    return all(same(a, b, exact) for a, b in zip(*results, strict=True))


def run(module, name: str, *arguments) -> None:
    getattr(module, name)(*(a.view() if isinstance(a, Message) else a for a in arguments))


def copied(argument, device: str):
    if isinstance(argument, Message):
        return argument._replace(rows=copied(argument.rows, device))
    if isinstance(argument, Coder):
        return Coder(*(copied(tensor, device) for tensor in argument))
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def tensors(arguments) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments and in them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, Message | Coder):
            yield from tensors(argument)


def same(first: torch.Tensor, second: torch.Tensor, exact: bool = True) -> bool:
    if first.dtype == torch.bfloat16 and not exact:  # an interpreter cuts off where a GPU rounds
        return torch.allclose(first.float(), second.float(), rtol=2**-7, equal_nan=True)
    if first.dtype.is_floating_point:
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
        first, second = (t.nan_to_num(nan=12345.0).view(integers) for t in (first, second))
    return torch.equal(first, second)


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values of many sizes, every third one replaced by an odd one."""
    generator = coins(seed)
    values = torch.randn(length, generator=generator)
    values *= 10.0 ** torch.randint(-6, 3, (length,), generator=generator)
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (length,), generator=generator)]
    values = values.where(torch.rand(length, generator=generator) > 0.3, odd).to(dtype)
    if dtype == torch.bfloat16:  # Triton's interpreter cannot read its denormals; Numba's own test
        values = values.where(values.abs() > 2e-38, 0.0)
    return values


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=coins(seed))


def message(n: int, planes: int, length: int) -> Message:
    """Random words; ``length``: words of a plane."""
    return Message(words(n, planes * length + 5), planes, length)


@dtypes
@lengths
@pytest.mark.parametrize("positive", [True, False], ids=["plus", "minus"])
def test_encode_signs(compiled, length, dtype, positive):
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    rows = message(5, 1, length // 256 + 1)
    assert both(compiled, "encode_signs", rows, 64, momentum, grad, 0.9, 0.99, positive)


@dtypes
@lengths
@pytest.mark.parametrize("largest", [1, 7, 127])
def test_encode_levels(compiled, length, dtype, largest):
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    rows = message(5, (2 * largest).bit_length(), length // 256 + 1)
    for multiplier in (largest / 1e-3, 0.0, NAN, 1e30):
        factors = (0.9, 0.99, torch.tensor(multiplier), largest)
        assert both(compiled, "encode_levels", rows, 64, momentum, grad, *factors)


@lengths
@pytest.mark.parametrize("scale", ["l1", "max", "geometric"])
def test_measure(compiled, scale, length):
    momentum = torch.randn(length, generator=coins(1))
    grad = torch.randn(length, generator=coins(2)).bfloat16()
    grad[length // 2] = momentum[length // 2] = 0
    broken = grad.clone()
    broken[length // 2] = NAN
    zeros = torch.zeros(length)

    def measured(module, device, momentum, grad):
        return module.measure(momentum.to(device), grad.to(device), 0.9, scale).cpu()

    expected = measured(reference, "cpu", momentum, grad)
    torch.testing.assert_close(measured(*compiled, momentum, grad), expected)
    for module in (compiled, (reference, "cpu")):
        assert measured(*module, momentum, broken).isnan()
        assert measured(*module, zeros, zeros) == (1.0 if scale == "geometric" else 0.0)


def test_nothing_measures_zero():
    nothing = torch.empty(0)
    assert all(kernels.measure(nothing, nothing, 0.9, s) == 0 for s in ("l1", "max", "geometric"))


@pytest.mark.parametrize(
    ("n", "largest"),
    [(1, 1), (2, 1), (3, 1), (8, 1), (33, 1), (1, 14), (3, 2), (8, 14), (5, 254)],
)
def test_sums_and_votes(compiled, n, largest):
    length = 700 if compiled[0] is kernels else 20  # an interpreter takes its time
    values = torch.randint(largest + 1, (n, 64 * length), generator=coins())
    rows = message(n, largest.bit_length(), length)
    rows.view().copy_(packing.pack_planes(values, rows.planes).view(torch.int64))
    total = torch.zeros((n * largest).bit_length(), length, dtype=torch.int64)
    assert both(compiled, "sum_planes", rows, largest, total)
    for constant in (0, n * largest // 2, n * largest):
        masks = words(2, length)
        assert both(compiled, "compare_sum", rows, largest, constant, *masks)
    kernels.sum_planes(rows.view(), largest, total)
    sums = packing.unpack_planes(total.view(torch.uint8), 64 * length)
    assert torch.equal(sums, values.sum(0, dtype=torch.int32))


@pytest.mark.parametrize("length", [1, 5, 300])
def test_pack_votes(compiled, length):
    greater = words(length)
    equal = words(length, seed=1) & ~greater
    out = torch.zeros(-(-64 * length // 5), dtype=torch.uint8)
    assert both(compiled, "pack_votes", greater, equal, out)


@dtypes
@pytest.mark.parametrize("length", [64, 65, 1216])
def test_apply(compiled, length, dtype):
    n, params = 3, vector(length, dtype, 1)
    size = -(-length // (64 * n))
    answers = message(n, 1, size)
    assert both(compiled, "apply_signs", params, answers._replace(flat=True), 0.1, 0.2)
    for largest in (1, 3, 8, 112):
        answers = message(n, largest.bit_length(), size)
        assert both(compiled, "apply_levels", params, answers, largest, 0.1, 0.2)
    trits = packing.pack_trits(torch.randint(-1, 2, (n, 64 * size), generator=coins()))
    assert both(compiled, "apply_trits", params, trits, 64 * size, 0.1, 0.2)


@dtypes
@lengths
def test_lion(compiled, length, dtype):
    params, momentum = vector(length, dtype, 1), vector(length, torch.float32, 2)
    for grad in (vector(length, torch.float32, 3), vector(length, torch.bfloat16, 3)):
        assert both(compiled, "lion", params, momentum, grad, 0.9, 0.99, 0.1, 0.2)


def coder(*shape: int, seed: int = 0) -> Coder:
    """A coder of ``[..., d]`` elements in the middle of its life, many at the ends of the scale."""
    *rows, length = shape
    estimate = vector(math.prod(shape), torch.float32, seed).view(shape)
    level = torch.randint(-200, 456, shape, generator=coins(seed)).clamp(0, 255).to(torch.uint8)
    return Coder(estimate, level, words(*rows, 2, length // 64, seed=seed))


def fresh(*shape: int, level: int = 128, sums: bool = False) -> Coder:
    """A coder of ``[..., d]`` elements that has seen nothing; ``sums``: of the workers' sum."""
    *rows, length = shape
    estimate = torch.zeros((1, length) if sums else shape)
    levels = torch.full(shape, level, dtype=torch.uint8)
    return Coder(estimate, levels, torch.zeros(*rows, 2, length // 64, dtype=torch.int64))


@dtypes
@lengths
@pytest.mark.parametrize("rise", [2, 4])
def test_encode_deltas(compiled, length, dtype, rise):
    rows, momentum = message(5, 1, length // 256 + 1), vector(length, torch.float32, 1)
    state = coder(5 * 64 * rows.words)
    for step in range(3):
        grad = vector(length, dtype, 2 + step)
        arguments = (rows, 64, momentum, grad, state, 0.9, 0.99, rise)
        assert both(compiled, "encode_deltas", *arguments)
        run(reference, "encode_deltas", *arguments)


@lengths
@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
def test_decode_deltas(compiled, length, weighted):
    size = -(-length // 64)
    state, masks = coder(4, 64 * size), words(2, size)
    if not weighted:
        state = state._replace(estimate=state.estimate[:1])
    weights = torch.tensor([0.3, 1.0, 2.7, 0.0]) if weighted else None
    for step, senders in enumerate(([2, 0, 3, 1], [-1, 1, -1, 0], [0, -1, -1, -1])):
        messages = Message(words(4, size + 5, seed=step), 1, size)
        received = (messages, torch.tensor(senders))
        arguments = (*received, state, weights, 2 + step, 1 - 0.7 * step, *masks)
        assert both(compiled, "decode_deltas", *arguments)
        run(reference, "decode_deltas", *arguments)


def test_a_cpu_has_compiled_kernels():
    assert kernels.choose(torch.empty(1), torch.empty(1, dtype=torch.bfloat16)) is numba_cpu
    assert kernels.choose(torch.empty(64), length=64) is numba_cpu


def test_the_reference_takes_what_compiled_kernels_do_not():
    assert kernels.choose(torch.empty(1, dtype=torch.float64)) is reference
    assert kernels.choose(torch.empty(4, 4).t()) is reference
    params, grad = torch.randn(128, 2, generator=coins()).half().unbind(1)
    momentum, rows = torch.zeros(128), message(1, 1, 2)
    numbers = torch.zeros(128, dtype=torch.float64)
    cpu = (kernels, "cpu")
    assert both(cpu, "encode_signs", rows, 0, momentum, grad, 0.9, 0.99, True)
    assert both(cpu, "apply_signs", params, rows._replace(flat=True), 0.1, 0.2)
    assert both(cpu, "apply_signs", numbers, rows._replace(flat=True), 0.1, 0.2)


def test_bfloat16_rounds_and_keeps_denormals():
    tiny = torch.tensor([1e-39, -1e-39, 2e-39, 9.2e-41, -9.2e-41, 1e-38]).bfloat16()
    assert tiny.abs().min() > 0
    cpu = (kernels, "cpu")
    assert both(cpu, "encode_signs", message(1, 1, 1), 0, torch.zeros(6), tiny, 0.9, 0.5, True)
    params = torch.cat([tiny, vector(58, torch.bfloat16, 1)])
    assert both(cpu, "apply_signs", params, message(1, 1, 1)._replace(flat=True), 1e-39, 0.1)


def test_threads_do_not_change_a_bit():
    length = 1 << 18
    momentum, grad = vector(length, torch.float32, 1), vector(length, torch.float32, 2)
    rows, wide = words(4, 1, length // 256), words(8, 2, length // 64)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            sent, moved, params, masks = (
                rows.clone(),
                momentum.clone(),
                grad.clone(),
                words(2, length // 64),
            )
            kernels.encode_signs(sent, 0, moved, grad, 0.9, 0.99, True)
            kernels.apply_signs(params, sent.squeeze(1), 0.1, 0.2)
            kernels.compare_sum(wide, 3, 12, *masks)
        finally:
            torch.set_num_threads(before)
        results.append((sent, moved, params, masks))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_deltas_over_threads_are_those_of_the_reference():
    length, cpu = (1 << 17) + 65, (kernels, "cpu")  # the last share ends within a word
    momentum, grad = vector(length, torch.float32, 1), vector(length, torch.bfloat16, 2)
    rows = message(2, 1, length // 128 + 2)
    state, masks = coder(2, 64 * rows.words), words(2, rows.words)
    sent, senders = (momentum, grad, coder(128 * rows.words)), torch.tensor([1, 0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert both(cpu, "encode_deltas", rows, 64, *sent, 0.9, 0.99, 3)
        weights = torch.tensor([0.4, 0.6])
        assert both(cpu, "decode_deltas", rows, senders, state, weights, 3, 0.7, *masks)
        state = state._replace(estimate=state.estimate[:1])
        assert both(cpu, "decode_deltas", rows, senders, state, None, 3, 0.7, *masks)
    finally:
        torch.set_num_threads(before)


def test_step_sizes_rise_and_have_their_levels_back():
    levels = torch.arange(256, dtype=torch.uint8)
    sizes = kernels.step_size(levels)
    expected = [2.0 ** (level // 8 - 32) * (1 + level % 8 / 8) for level in range(256)]
    assert sizes.tolist() == expected == sorted(expected)
    above = torch.cat([sizes[1:], torch.ones(1)]).nextafter(torch.tensor(0.0))  # just below these
    for size in (sizes, sizes.nextafter(torch.tensor(INF)), above):
        assert torch.equal(kernels.nearest_level(size), levels)


def test_sizes_without_a_step_size_below_them_have_level_0():
    low = torch.tensor([2e-10, 1e-45, 0.0, -0.0, -1e-45, -1e-10, -2e-10, -0.5, -3e38, -INF, NAN])
    assert (kernels.nearest_level(low) == 0).all()
    assert (kernels.nearest_level(torch.tensor([0.9375, 1.0, 3e38, INF])) == 255).all()


@pytest.mark.parametrize("module", [kernels, reference], ids=["compiled", "reference"])
def test_both_ends_of_delta_modulation_stay_equal(module):
    length, size, owners = 200, 2, 2
    momentum, rows = torch.zeros(length), torch.zeros(owners, 1, size, dtype=torch.int64)
    encoder, masks = fresh(owners * 64 * size), words(2, size)
    decoders = [fresh(1, 64 * size, sums=True) for _ in range(owners)]
    for step in range(200):
        grad = torch.randn(length, generator=coins(step)) * 10.0 ** (step % 7 - 5)
        module.encode_deltas(rows, 0, momentum, grad, encoder, 0.9, 0.99, 3)
        for owner, decoder in enumerate(decoders):
            received = (rows[owner : owner + 1], torch.zeros(1, dtype=torch.int64))
            module.decode_deltas(*received, decoder, None, 3, 1.0, *masks)
    for part, slices in zip(encoder, zip(*decoders, strict=True), strict=True):
        assert same(part, torch.cat([values[0] for values in slices], dim=-1))


def test_the_sum_is_that_of_the_estimates():
    n, size = 8, 4
    workers, momenta = [fresh(64 * size) for _ in range(n)], torch.zeros(n, 64 * size)
    total, masks = fresh(n, 64 * size, sums=True), words(2, size)
    rows, senders = torch.zeros(n, 1, size, dtype=torch.int64), torch.arange(n)
    for step in range(100):
        grads = torch.randn(n, 64 * size, generator=coins(step)) + 1
        for i, state in enumerate(workers):
            kernels.encode_deltas(rows[i : i + 1], 0, momenta[i], grads[i], state, 0.9, 0.99, 3)
        kernels.decode_deltas(rows, senders, total, None, 3, 1.0, *masks)
    expected = sum(state.estimate.double() for state in workers)
    assert (total.estimate[0] - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("rise", [2, 3, 4])
def test_a_direction_at_rest_is_reached_and_its_step_size_falls_to_the_smallest(rise):
    directions = torch.randn(256, generator=coins()) * 10.0 ** torch.arange(-7, -3).repeat(64)
    momentum, rows = torch.zeros(256), torch.zeros(1, 1, 4, dtype=torch.int64)
    for level in (0, 128, 255):  # granular noise and slope overload at first
        state = fresh(256, level=level)
        for _ in range(600):
            kernels.encode_deltas(rows, 0, momentum, directions, state, 0.0, 0.0, rise)
        assert (state.level <= 2 * rise).all()
        assert ((state.estimate - directions).abs() <= 2 * kernels.step_size(state.level)).all()


def test_larger_directions_are_reached_to_the_precision_of_float32():
    directions = torch.randn(256, generator=coins()) * 10.0 ** torch.arange(-2, 2).repeat(64)
    momentum, rows, state = torch.zeros(256), torch.zeros(1, 1, 4, dtype=torch.int64), fresh(256)
    for _ in range(600):
        kernels.encode_deltas(rows, 0, momentum, directions, state, 0.0, 0.0, 3)
    torch.testing.assert_close(state.estimate, directions, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("module", [kernels, reference], ids=["compiled", "reference"])
def test_levels_follow_the_runs_of_bits(module):
    state, rows, seen = fresh(64, level=100), torch.zeros(1, 1, 1, dtype=torch.int64), []
    for bit in (1, 1, 1, 1, 0, 0, 0, 1, 0):
        grad = torch.full((64,), INF if bit else -INF)
        module.encode_deltas(rows, 0, torch.zeros(64), grad, state, 0.0, 0.0, 3)
        assert (rows == -bit).all()
        seen += state.level.unique().tolist()
    assert seen == [99, 99, 102, 105, 104, 104, 107, 106, 105]
    for level, bit, expected in ((1, 1, 0), (0, 0, 0), (254, 1, 255), (255, 1, 255)):
        state, before = fresh(64, level=level), -bit if level > 100 else bit - 1
        state.history[0], state.history[1] = before, -1
        grad = torch.full((64,), INF if bit else -INF)
        module.encode_deltas(rows, 0, torch.zeros(64), grad, state, 0.0, 0.0, 3)
        assert (state.level == expected).all()


def alternating(sums: bool) -> Coder:
    """Two workers that said 0 and 1 before: they have steps of one size when they say 1 and 0."""
    coders = fresh(2, 64, sums=sums)
    coders.history[1, 0] = -1
    return coders


def sign(coders: Coder, senders: list[int], weights: list[float] | None, lookahead: float) -> int:
    """Decode a 1 from sender 0 and a 0 from sender 1, and return the sign of the sum."""
    messages, masks = torch.tensor([[[-1]], [[0]]]), words(2, 1)
    factors = None if weights is None else torch.tensor(weights)
    kernels.decode_deltas(messages, torch.tensor(senders), coders, factors, 3, lookahead, *masks)
    return {(-1, 0): 1, (0, -1): 0, (0, 0): -1}[tuple(masks.flatten().tolist())]


def test_weights_and_absence_decide_the_sign():
    for weights in (None, [1.0, 1.0]):
        for senders, expected in (([0, 1], 0), ([0, -1], 1), ([-1, 1], -1)):
            assert sign(alternating(weights is None), senders, weights, 1.0) == expected
    assert sign(alternating(False), [0, 1], [2.0, 1.0], 1.0) == 1
    assert sign(alternating(False), [0, 1], [1.0, 2.0], 1.0) == -1


def test_lookahead_adds_the_steps_once_more():
    for lookahead, expected in ((0.0, -1), (0.5, 0), (1.0, 1)):
        coders = alternating(True)
        coders.estimate[:] = -1.5 * kernels.step_size(torch.tensor(127, dtype=torch.uint8))
        assert sign(coders, [0, -1], None, lookahead) == expected


@pytest.mark.parametrize("weights", [None, [1.0, 1.0]], ids=["sum", "weighted"])
def test_an_absent_worker_keeps_its_state(weights):
    coders = alternating(weights is None)
    before = copied(coders, "cpu")
    sign(coders, [0, -1], weights, 1.0)
    for after, kept in zip(coders, before, strict=True):
        assert not same(after[0], kept[0])
        assert same(after[1:], kept[1:])


def test_zero_and_nan_take_the_sign_that_is_asked_for():
    values = torch.tensor([1e-45, -1e-45, 0.0, -0.0, NAN, INF, -INF])
    positive = [True, False, True, True, True, True, False]
    negative = [True, False, False, False, False, True, False]
    assert reference.one_bit_sign(values, True).tolist() == positive
    assert reference.one_bit_sign(values, False).tolist() == negative


def quantised(values: torch.Tensor, multiplier: float, largest: int) -> list[int]:
    """What is sent for a direction of ``values``."""
    planes = (2 * largest).bit_length()
    rows = torch.zeros(1, planes, 1, dtype=torch.int64)
    factors = (1.0, 1.0, torch.tensor(multiplier), largest)
    kernels.encode_levels(rows, 0, values.clone(), torch.zeros_like(values), *factors)
    levels = packing.unpack_planes(rows[0].view(torch.uint8), len(values))
    return (levels - largest).tolist()


def test_levels_round_saturate_and_abstain():
    values = torch.tensor([1.0, -1.0, 0.1, -1.9, 0.5, -0.5, 5.0, -INF, 0.0, NAN])
    assert quantised(values, 3.0, 7) == [3, -3, 0, -6, 2, -2, 7, -7, 0, 0]  # halves to even
    assert quantised(values, NAN, 7) == 10 * [0]
    assert quantised(values, 0.0, 1) == 10 * [0]


def test_scales():
    values = torch.tensor([1.0, -2.0, 0.0, 4.0])
    for scale, expected in (("l1", 1.75), ("max", 4.0), ("geometric", 2.0)):
        unit = kernels.measure(values, torch.zeros(4), 1.0, scale)
        assert unit.item() == pytest.approx(expected)


def test_descent_rounds_the_product_and_the_sum_and_keeps_the_answer():
    params, answer = torch.randn(2, 1000, generator=coins()).unbind()
    before, kept = params.clone(), answer.clone()
    kernels.descend(params, answer, 0.1, 0.2)
    decay, rate = (torch.tensor(x, dtype=torch.float32).double() for x in (1 - 0.1 * 0.2, -0.1))
    expected = (before * decay).float().double() + (answer * rate).float().double()
    assert torch.equal(params, expected.float())  # two float32 have their exact sum in float64
    assert torch.equal(answer, kept)


def test_parameters_in_float64_keep_their_precision():
    params = torch.full((64,), 1 + 2.0**-40, dtype=torch.float64)
    kernels.descend(params, torch.ones(64), 2.0**-20, 0.0)
    assert (params == 1 + 2.0**-40 - 2.0**-20).all()
    kernels.apply_signs(params, torch.full((1, 1), -1), 2.0**-20, 0.0)
    assert (params == 1 + 2.0**-40 - 2.0**-19).all()
