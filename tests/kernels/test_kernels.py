"""The compiled kernels give the bits of the reference, and the reference means what it says."""

import math

import pytest
import torch

from dlion import kernels
from dlion.kernels import reference
from dlion.wire import reference as wire

NAN, INF = math.nan, math.inf
LENGTHS = [1, 63, 64, 65, 320, 1000, 9000]
ODD = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1.0, -1.0]
compiled = kernels.choose(torch.empty(1))


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values of many sizes, every third one replaced by an odd one."""
    generator = coins(seed)
    values = torch.randn(length, generator=generator)
    values *= 10.0 ** torch.randint(-6, 3, (length,), generator=generator)
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (length,), generator=generator)]
    return values.where(torch.rand(length, generator=generator) > 0.3, odd).to(dtype)


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=coins(seed))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype.is_floating_point:
        integers = {4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
        first, second = (t.nan_to_num(nan=12345.0).view(integers) for t in (first, second))
    return torch.equal(first, second)


def test_a_cpu_has_compiled_kernels():
    assert compiled is not reference
    assert kernels.choose(torch.empty(1, dtype=torch.float64)) is reference
    assert kernels.choose(torch.empty(4, 4).t()) is reference


def both(name: str, *arguments):
    """Call the compiled kernel and the reference on copies; returns their arguments afterwards."""
    results = []
    for module in (compiled, reference):
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        getattr(module, name)(*copies)
        results.append([a for a in copies if isinstance(a, torch.Tensor)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("positive", [True, False])
def test_encode_signs(length, dtype, positive):
    n, slice_words, at = 5, length // 64 // 4 + 1, 64
    out = words(n, slice_words + 1)  # one word of header
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    arguments = (out, at, momentum, grad, 0.9, 0.99, positive, slice_words)
    assert all(same(a, b) for a, b in both("encode_signs", *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("largest", [1, 7, 127])
def test_encode_levels(length, dtype, largest):
    n, slice_words, at = 5, length // 64 // 4 + 1, 64
    out = words(n, slice_words * (2 * largest).bit_length() + 1)
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    for multiplier in (largest / 1e-3, 0.0, NAN, 1e30):
        factor = torch.tensor(multiplier)
        arguments = (out, at, momentum, grad, 0.9, 0.99, factor, largest, slice_words)
        assert all(same(a, b) for a, b in both("encode_levels", *arguments))


@pytest.mark.parametrize("scale", ["l1", "max", "geometric"])
@pytest.mark.parametrize("length", LENGTHS)
def test_measure(scale, length):
    momentum = torch.randn(length, generator=coins(1))
    grad = torch.randn(length, generator=coins(2)).bfloat16()
    expected = reference.measure(momentum, grad, 0.9, scale)
    torch.testing.assert_close(compiled.measure(momentum, grad, 0.9, scale), expected)
    grad[length // 2] = NAN
    assert all(m.measure(momentum, grad, 0.9, scale).isnan() for m in (compiled, reference))
    zeros = torch.zeros(length)
    unit = 1.0 if scale == "geometric" else 0.0
    assert all(m.measure(zeros, zeros, 0.9, scale) == unit for m in (compiled, reference))


@pytest.mark.parametrize("planes", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
def test_sums_and_votes(n, planes):
    largest = 2**planes - 1
    length, at = 700, 3
    rows = words(n, at + planes * length + 2)
    total = torch.zeros((n * largest).bit_length() * length, dtype=torch.int64)
    message = (rows, at, length, planes, largest)
    assert all(same(a, b) for a, b in both("sum_planes", *message, total))
    masks = words(2, length)
    for constant in (0, n * largest // 2, n * largest):
        arguments = (*message, constant, masks[0], masks[1])
        assert all(same(a, b) for a, b in both("compare_sum", *arguments))


@pytest.mark.parametrize("length", [1, 5, 700])
def test_pack_votes(length):
    greater = words(length)
    equal = words(length, seed=1) & ~greater
    out = torch.zeros(-(-64 * length // 5), dtype=torch.uint8)
    assert all(same(a, b) for a, b in both("pack_votes", greater, equal, out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_apply(length, dtype):
    n, params = 3, vector(length, dtype, 1)
    slice_words = -(-length // (64 * n))
    assert all(same(a, b) for a, b in both("apply_signs", params, words(n, slice_words), 0.1, 0.2))
    for largest in (1, 3, 8, 112):
        answers = words(n, slice_words * largest.bit_length())
        arguments = (params, answers, largest, 0.1, 0.2)
        assert all(same(a, b) for a, b in both("apply_levels", *arguments))
    size = 64 * slice_words
    trits = wire.pack_trits(torch.randint(-1, 2, (n, size), generator=coins()))
    assert all(same(a, b) for a, b in both("apply_trits", params, trits, size, 0.1, 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_lion(length, dtype):
    params = vector(length, dtype, 1)
    momentum, grad = vector(length, torch.float32, 2), vector(length, torch.float32, 3)
    arguments = (params, momentum, grad, 0.9, 0.99, 0.1, 0.2)
    assert all(same(a, b) for a, b in both("lion", *arguments))


def test_threads_do_not_change_a_bit():
    length = 1 << 19
    momentum, grad = vector(length, torch.float32, 1), vector(length, torch.float32, 2)
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out, own, params = words(4, length // 256), momentum.clone(), grad.clone()
            compiled.encode_signs(out, 0, own, grad, 0.9, 0.99, True, length // 256)
            compiled.apply_signs(params, out, 0.1, 0.2)
        finally:
            torch.set_num_threads(before)
        results.append((out, own, params))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_zero_and_nan_say_what_they_are_told():
    values = torch.tensor([1e-45, -1e-45, 0.0, -0.0, NAN, INF, -INF])
    positive = [True, False, True, True, True, True, False]
    negative = [True, False, False, False, False, True, False]
    assert reference.one_bit_sign(values, True).tolist() == positive
    assert reference.one_bit_sign(values, False).tolist() == negative


def said(values: torch.Tensor, multiplier: float, largest: int) -> list[int]:
    """What is quantised and sent, for a direction of ``values``."""
    planes = (2 * largest).bit_length()
    out = torch.zeros(1, planes, dtype=torch.int64)
    arguments = (values.clone(), torch.zeros_like(values), 1.0, 1.0, torch.tensor(multiplier))
    reference.encode_levels(out, 0, *arguments, largest, 1)
    levels = wire.unpack_planes(out.view(torch.uint8).view(planes, 8), len(values))
    return (levels - largest).tolist()


def test_levels_round_saturate_and_abstain():
    values = torch.tensor([1.0, -1.0, 0.1, -1.9, 0.5, -0.5, 5.0, -INF, 0.0, NAN])
    assert said(values, 3.0, 7) == [3, -3, 0, -6, 2, -2, 7, -7, 0, 0]  # halves to even
    assert said(values, NAN, 7) == 10 * [0]
    assert said(values, 0.0, 1) == 10 * [0]


def test_scales():
    values = torch.tensor([1.0, -2.0, 0.0, 4.0])
    for scale, expected in (("l1", 1.75), ("max", 4.0), ("geometric", 2.0)):
        unit = reference.measure(values, torch.zeros(4), 1.0, scale)
        assert unit.item() == pytest.approx(expected)
