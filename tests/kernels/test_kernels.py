"""The compiled kernels give the bits of the reference, and the reference means what it says."""

import os

import numba
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from dlion import kernels
from dlion.kernels import Coder, numba_cpu, reference, triton_cuda
from dlion.wire import packing
from tests.support.scripts import script

shared = script("kernel_cases")
Compiled, Case, INF, NAN = shared.Compiled, shared.Case, shared.INF, shared.NAN
both, coder, coins, copied = shared.both, shared.coder, shared.coins, shared.copied
message, same, vector, words = shared.message, shared.same, shared.vector, shared.words
at = shared.at
pytestmark = pytest.mark.gpu
CPU = Compiled(kernels, "cpu")
COMPILED = {
    "cpu": CPU,
    "triton": Compiled(kernels, "cuda")
    if torch.cuda.is_available()
    else Compiled(triton_cuda, "cpu", interpreted=True),
}


@pytest.fixture(params=COMPILED)
def compiled(request):
    """The compiled kernels of a kind of device, and where their tensors live."""
    return COMPILED[request.param]


@pytest.mark.parametrize("case", shared.cases(), ids=lambda case: case.name)
def test_the_bits_are_those_of_the_reference(compiled, case):
    assert case.holds(compiled)


@pytest.mark.parametrize("scale", ["l1", "max", "geometric"])
def test_nan_has_no_scale_and_zero_has_one(scale):
    zeros, broken = torch.zeros(65), torch.zeros(65)
    broken[32] = NAN
    for module in (kernels, reference):
        assert module.measure(zeros, at(0, broken), 0.9, scale).isnan()
        assert module.measure(zeros, at(0, zeros), 0.9, scale) == (
            1.0 if scale == "geometric" else 0.0
        )


def test_nothing_measures_zero():
    nothing = torch.empty(0)
    for scale in ("l1", "max", "geometric"):
        assert kernels.measure(nothing, at(0, nothing), 0.9, scale) == 0


@pytest.mark.parametrize(("n", "largest"), shared.SUMS)
def test_sums_are_sums(n, largest):
    values, rows = shared.levels(n, largest, length=20)
    total = torch.zeros((n * largest).bit_length(), 20, dtype=torch.int64)
    kernels.sum_planes(rows.view(), largest, total)
    sums = packing.unpack_planes(total.view(torch.uint8), 64 * 20)
    assert torch.equal(sums, values.sum(0, dtype=torch.int32))


def fresh(*shape: int, level: int = 128, sums: bool = False) -> Coder:
    """A coder of ``[..., d]`` elements that has seen nothing; ``sums``: of the workers' sum."""
    *rows, length = shape
    estimate = torch.zeros((1, length) if sums else shape)
    levels = torch.full(shape, level, dtype=torch.uint8)
    return Coder(estimate, levels, torch.zeros(*rows, 2, length // 64, dtype=torch.int64))


def test_a_cpu_has_compiled_kernels():
    assert kernels.choose(torch.empty(1), torch.empty(1, dtype=torch.bfloat16)) is numba_cpu
    assert kernels.choose(torch.empty(64), length=64) is numba_cpu


def test_the_reference_takes_what_compiled_kernels_do_not():
    assert kernels.choose(torch.empty(1, dtype=torch.float64)) is reference
    assert kernels.choose(torch.empty(4, 4).t()) is reference
    params, grad = torch.randn(128, 2, generator=coins()).half().unbind(1)
    momentum, rows = torch.zeros(128), message(1, 1, 2)
    numbers = torch.zeros(128, dtype=torch.float64)
    assert both(CPU, "encode_signs", rows, momentum, at(0, grad), 0.9, 0.99, True)
    assert both(CPU, "apply_signs", params, rows._replace(flat=True), 0.1, 0.2)
    assert both(CPU, "apply_signs", numbers, rows._replace(flat=True), 0.1, 0.2)


def test_bfloat16_rounds_and_keeps_denormals():
    tiny = torch.tensor([1e-39, -1e-39, 2e-39, 9.2e-41, -9.2e-41, 1e-38]).bfloat16()
    assert tiny.abs().min() > 0
    assert both(CPU, "encode_signs", message(1, 1, 1), torch.zeros(6), at(0, tiny), 0.9, 0.5, True)
    params = torch.cat([tiny, vector(58, torch.bfloat16, 1)])
    assert both(CPU, "apply_signs", params, message(1, 1, 1)._replace(flat=True), 1e-39, 0.1)


def test_threads_do_not_change_a_bit():
    length = 1 << 19
    momentum, grad = vector(length, torch.float32, 1), vector(length, torch.float32, 2)
    rows, wide = words(4, 1, length // 256), words(8, 2, length // 64)
    slice_ = 64 * (length // 192 + 1)  # of three owners, neither a share's length nor whole bytes
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
            kernels.encode_signs(sent, moved, at(0, grad), 0.9, 0.99, True)
            kernels.apply_signs(params, sent.squeeze(1), 0.1, 0.2)
            kernels.compare_sum(wide, 3, 12, *masks)
            trits = torch.empty(3, slice_ // 5 + 1, dtype=torch.uint8)
            for row in trits:
                kernels.pack_votes(*masks[:, : slice_ // 64], row)
            kernels.apply_trits(params, trits, slice_, 0.1, 0.2)
            sizes = [
                kernels.measure(moved, at(0, grad), 0.9, s) for s in ("l1", "max", "geometric")
            ]
        finally:
            torch.set_num_threads(before)
        results.append((sent, moved, params, masks, trits, torch.stack(sizes)))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_deltas_over_threads_are_those_of_the_reference():
    length = (1 << 17) + 65  # the last share ends within a word
    momentum, grad = vector(64 + length, torch.float32, 1), vector(length, torch.bfloat16, 2)
    rows = message(2, 1, length // 128 + 2)
    state, masks = coder(2, 64 * rows.words), words(2, rows.words)
    sent, senders = (momentum, at(64, grad), coder(128 * rows.words)), torch.tensor([1, 0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert both(CPU, "encode_deltas", rows, *sent, 0.9, 0.99, 3)
        weights = torch.tensor([0.4, 0.6])
        assert both(CPU, "decode_deltas", rows, senders, state, weights, 3, 0.7, *masks)
        state = state._replace(estimate=state.estimate[:1])
        assert both(CPU, "decode_deltas", rows, senders, state, None, 3, 0.7, *masks)
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
        module.encode_deltas(rows, momentum, at(0, grad), encoder, 0.9, 0.99, 3)
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
            sent = (rows[i : i + 1], momenta[i], at(0, grads[i]))
            kernels.encode_deltas(*sent, state, 0.9, 0.99, 3)
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
            kernels.encode_deltas(rows, momentum, at(0, directions), state, 0.0, 0.0, rise)
        assert (state.level <= 2 * rise).all()
        assert ((state.estimate - directions).abs() <= 2 * kernels.step_size(state.level)).all()


def test_larger_directions_are_reached_to_the_precision_of_float32():
    directions = torch.randn(256, generator=coins()) * 10.0 ** torch.arange(-2, 2).repeat(64)
    momentum, rows, state = torch.zeros(256), torch.zeros(1, 1, 4, dtype=torch.int64), fresh(256)
    for _ in range(600):
        kernels.encode_deltas(rows, momentum, at(0, directions), state, 0.0, 0.0, 3)
    torch.testing.assert_close(state.estimate, directions, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("module", [kernels, reference], ids=["compiled", "reference"])
def test_levels_follow_the_runs_of_bits(module):
    state, rows, seen = fresh(64, level=100), torch.zeros(1, 1, 1, dtype=torch.int64), []
    for bit in (1, 1, 1, 1, 0, 0, 0, 1, 0):
        grad = torch.full((64,), INF if bit else -INF)
        module.encode_deltas(rows, torch.zeros(64), at(0, grad), state, 0.0, 0.0, 3)
        assert (rows == -bit).all()
        seen += state.level.unique().tolist()
    assert seen == [99, 99, 102, 105, 104, 104, 107, 106, 105]
    for level, bit, expected in ((1, 1, 0), (0, 0, 0), (254, 1, 255), (255, 1, 255)):
        state, before = fresh(64, level=level), -bit if level > 100 else bit - 1
        state.history[0], state.history[1] = before, -1
        grad = torch.full((64,), INF if bit else -INF)
        module.encode_deltas(rows, torch.zeros(64), at(0, grad), state, 0.0, 0.0, 3)
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
    factors = (1.0, 1.0, torch.tensor([multiplier]), largest)
    kernels.encode_levels(rows, values.clone(), at(0, torch.zeros_like(values)), *factors)
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
        unit = kernels.measure(values, at(0, torch.zeros(4)), 1.0, scale)
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


def test_where_numba_compiles_nothing_the_reference_runs(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert kernels._kind.__wrapped__("cpu") == "reference"
