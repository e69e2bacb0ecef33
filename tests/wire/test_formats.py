"""Every wire reads back what it wrote, in as many bytes as it promised."""

import numpy as np
import pytest
import torch

from dlion.wire import (
    BFloat16,
    Float32,
    Level,
    ScaledInt8,
    ScaledSign,
    Sign,
    Ternary,
    packing,
)
from tests.support.properties import given, settings, st

LENGTHS = st.integers(0, 300)


def integers(low: int, high: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def assert_round_trip(wire, values: torch.Tensor) -> None:
    packed = wire.encode(values)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*values.shape[:-1], wire.nbytes(values.shape[-1]))
    assert torch.equal(wire.decode(packed, values.shape[-1]), values)


@given(LENGTHS, st.integers(0, 99))
def test_sign_round_trip(length, seed):
    assert_round_trip(Sign(), integers(0, 2, (3, length), seed).bool())


@given(LENGTHS, st.integers(2, 300), st.integers(0, 99))
def test_level_round_trip(length, levels, seed):
    assert_round_trip(Level(levels), integers(0, levels, (2, length), seed).int())


@given(LENGTHS, st.integers(0, 99))
def test_ternary_round_trip(length, seed):
    assert_round_trip(Ternary(), integers(-1, 2, (2, length), seed).to(torch.int8))


@given(LENGTHS, st.integers(1, 5), st.integers(0, 99))
def test_scaled_sign_round_trip(length, count, seed):
    wire, signs = ScaledSign(count), integers(0, 2, (2, 3, length), seed).bool()
    scales = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(seed))
    packed = wire.encode((scales, signs))
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, wire.nbytes(length))
    back = wire.decode(packed, length)
    assert torch.equal(back[0], scales) and torch.equal(back[1], signs)


@given(LENGTHS, st.integers(1, 5), st.integers(0, 99))
def test_scaled_int8_round_trip(length, count, seed):
    wire, numbers = ScaledInt8(count), integers(-127, 128, (2, 3, length), seed).to(torch.int8)
    scales = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(seed))
    packed = wire.encode((scales, numbers))
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, wire.nbytes(length))
    back = wire.decode(packed, length)
    assert torch.equal(back[0], scales) and torch.equal(back[1], numbers)


@given(LENGTHS, st.integers(0, 99))
def test_bfloat16_round_trip(length, seed):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(seed))
    assert_round_trip(BFloat16(), values.bfloat16().float())


def test_a_scale_costs_four_bytes():
    assert ScaledSign(3).nbytes(64 * 2**31) == 8 * 2**31 + 12


def test_float32_keeps_every_bit():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38])
    back = Float32().decode(Float32().encode(special), 6)
    assert torch.equal(back.view(torch.int32), special.view(torch.int32))


def test_signs_are_packed_as_numpy_packs_them():
    bits = integers(0, 2, (5, 77), 1).bool()
    expected = np.packbits(bits.numpy(), axis=-1, bitorder="little")
    assert (packing.pack_bits(bits).numpy() == expected).all()


@pytest.mark.parametrize(
    ("wire", "bits"),
    [(Sign(), 1), (Level(16), 4), (Ternary(), 1.6), (BFloat16(), 16), (Float32(), 32)],
)
def test_sizes_beyond_two_to_the_31_are_exact(wire, bits):
    numel = 40 * 2**31
    assert wire.nbytes(numel) == numel * bits / 8


@given(st.integers(1, 40), st.integers(2, 300), st.integers(0, 99))
@settings(max_examples=60)
def test_sums_of_planes_equal_sums_of_integers(n, levels, seed):
    values = integers(0, levels, (n, 2, 100), seed).int()
    bits = (levels - 1).bit_length()
    planes = packing.sum_planes(packing.pack_planes(values, bits), levels - 1)
    total = values.sum(0)
    assert planes.shape[-2] == (n * (levels - 1)).bit_length()
    assert torch.equal(packing.unpack_planes(planes, 100), total.int())
    for constant in (0, n * (levels - 1) // 2, n * (levels - 1), 10**6):
        greater, equal = packing.compare_planes(planes, constant)
        assert torch.equal(packing.unpack_bits(greater, 100), total > constant)
        assert torch.equal(packing.unpack_bits(equal, 100), total == constant)


def test_full_scale_sums_do_not_overflow():
    values = torch.full((300, 64), 254, dtype=torch.int32)
    planes = packing.sum_planes(packing.pack_planes(values, 8), 254)
    assert (packing.unpack_planes(planes, 64) == 300 * 254).all()


def test_a_level_wire_needs_two_levels():
    with pytest.raises(ValueError, match="at least 2 levels"):
        Level(1)
