"""The compiled kernels give the bits of the reference, and the reference means what it says."""

import math
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from dlion import kernels
from dlion.kernels import numba_cpu, reference, triton_cuda
from dlion.wire import packing as wire

NAN, INF = math.nan, math.inf
LENGTHS = [1, 63, 64, 65, 320, 1000, 9000]
ODD = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1.0, -1.0]
COMPILED = {"numba": (numba_cpu, "cpu"), "triton": (triton_cuda, "cpu")}
if torch.cuda.is_available():
    COMPILED["triton"] = (triton_cuda, "cuda")


INTERPRETED = COMPILED["triton"][1] == "cpu"


@pytest.fixture(params=COMPILED)
def compiled(request):
    """A module of compiled kernels and where its tensors live."""
    return COMPILED[request.param]


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


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype == torch.bfloat16 and INTERPRETED:  # it cuts off where a GPU rounds
        return torch.allclose(first.float(), second.float(), rtol=2**-7, equal_nan=True)
    if first.dtype.is_floating_point:
        integers = {4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
        first, second = (t.nan_to_num(nan=12345.0).view(integers) for t in (first, second))
    return torch.equal(first, second)


def test_a_cpu_has_compiled_kernels():
    assert kernels.choose(torch.empty(1)) is numba_cpu
    assert kernels.choose(torch.empty(1, dtype=torch.float64)) is reference
    assert kernels.choose(torch.empty(4, 4).t()) is reference


def both(compiled, name: str, *arguments):
    """Call a compiled kernel and the reference on copies; returns their arguments afterwards."""
    results = []
    for module, device in (compiled, (reference, "cpu")):
        copies = [a.to(device, copy=True) if torch.is_tensor(a) else a for a in arguments]
        getattr(module, name)(*copies)
        results.append([a.cpu() for a in copies if torch.is_tensor(a)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("positive", [True, False])
def test_encode_signs(compiled, length, dtype, positive):
    n, slice_words, at = 5, length // 64 // 4 + 1, 64
    out = words(n, slice_words + 1)  # one word of header
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    arguments = (out, at, momentum, grad, 0.9, 0.99, positive, slice_words)
    assert all(same(a, b) for a, b in both(compiled, "encode_signs", *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("largest", [1, 7, 127])
def test_encode_levels(compiled, length, dtype, largest):
    n, slice_words, at = 5, length // 64 // 4 + 1, 64
    out = words(n, slice_words * (2 * largest).bit_length() + 1)
    momentum, grad = vector(length, torch.float32, 1), vector(length, dtype, 2)
    for multiplier in (largest / 1e-3, 0.0, NAN, 1e30):
        factor = torch.tensor(multiplier)
        arguments = (out, at, momentum, grad, 0.9, 0.99, factor, largest, slice_words)
        assert all(same(a, b) for a, b in both(compiled, "encode_levels", *arguments))


@pytest.mark.parametrize("scale", ["l1", "max", "geometric"])
@pytest.mark.parametrize("length", LENGTHS)
def test_measure(compiled, scale, length):
    momentum = torch.randn(length, generator=coins(1))
    grad = torch.randn(length, generator=coins(2)).bfloat16()
    module, device = compiled
    expected = reference.measure(momentum, grad, 0.9, scale)
    found = module.measure(momentum.to(device), grad.to(device), 0.9, scale)
    torch.testing.assert_close(found.cpu(), expected)
    grad[length // 2] = NAN
    zeros = torch.zeros(length)
    for module, device in (compiled, (reference, "cpu")):
        assert module.measure(momentum.to(device), grad.to(device), 0.9, scale).isnan()
        unit = module.measure(zeros.to(device), zeros.to(device), 0.9, scale)
        assert unit == (1.0 if scale == "geometric" else 0.0)


@pytest.mark.parametrize("planes", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
def test_sums_and_votes(compiled, n, planes):
    largest = 2**planes - 1
    length, at = (700 if compiled[0] is numba_cpu else 20), 3  # an interpreter takes its time
    rows = words(n, at + planes * length + 2)
    total = torch.zeros((n * largest).bit_length() * length, dtype=torch.int64)
    message = (rows, at, length, planes, largest)
    assert all(same(a, b) for a, b in both(compiled, "sum_planes", *message, total))
    masks = words(2, length)
    for constant in (0, n * largest // 2, n * largest):
        arguments = (*message, constant, masks[0], masks[1])
        assert all(same(a, b) for a, b in both(compiled, "compare_sum", *arguments))


@pytest.mark.parametrize("length", [1, 5, 700])
def test_pack_votes(compiled, length):
    greater = words(length)
    equal = words(length, seed=1) & ~greater
    out = torch.zeros(-(-64 * length // 5), dtype=torch.uint8)
    assert all(same(a, b) for a, b in both(compiled, "pack_votes", greater, equal, out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_apply(compiled, length, dtype):
    n, params = 3, vector(length, dtype, 1)
    slice_words = -(-length // (64 * n))
    assert all(
        same(a, b)
        for a, b in both(compiled, "apply_signs", params, words(n, slice_words), 0.1, 0.2)
    )
    for largest in (1, 3, 8, 112):
        answers = words(n, slice_words * largest.bit_length())
        arguments = (params, answers, largest, 0.1, 0.2)
        assert all(same(a, b) for a, b in both(compiled, "apply_levels", *arguments))
    size = 64 * slice_words
    trits = wire.pack_trits(torch.randint(-1, 2, (n, size), generator=coins()))
    assert all(same(a, b) for a, b in both(compiled, "apply_trits", params, trits, size, 0.1, 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_lion(compiled, length, dtype):
    params = vector(length, dtype, 1)
    momentum, grad = vector(length, torch.float32, 2), vector(length, torch.float32, 3)
    arguments = (params, momentum, grad, 0.9, 0.99, 0.1, 0.2)
    assert all(same(a, b) for a, b in both(compiled, "lion", *arguments))


def test_denormal_bfloat16():
    tiny = torch.tensor([1e-39, -1e-39, 2e-39, 9.2e-41, -9.2e-41, 1e-38]).bfloat16()
    assert tiny.abs().min() > 0
    numba = (numba_cpu, "cpu")
    arguments = (words(1, 1), 0, torch.zeros(6), tiny, 0.9, 0.5, True, 1)
    assert all(same(a, b) for a, b in both(numba, "encode_signs", *arguments))
    params = vector(9000, torch.float32, 1).nan_to_num(0.5).bfloat16()
    applied = both(numba, "apply_signs", params, words(1, 141), 1e-2, 0.1)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in applied)


def test_threads_do_not_change_a_bit():
    length = 1 << 19
    momentum, grad = vector(length, torch.float32, 1), vector(length, torch.float32, 2)
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out, own, params = words(4, length // 256), momentum.clone(), grad.clone()
            numba_cpu.encode_signs(out, 0, own, grad, 0.9, 0.99, True, length // 256)
            numba_cpu.apply_signs(params, out, 0.1, 0.2)
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
