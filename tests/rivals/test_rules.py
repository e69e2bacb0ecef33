"""Clipping, ternarising and choosing the largest entries."""

import math

import pytest
import torch

from dlion.rivals import kernels
from dlion.rivals.kernels import reference
from dlion.rivals.sparse import largest_entries
from dlion.rivals.terngrad import clip_by_deviation

NAN = float("nan")


def test_ternarise_is_unbiased_and_ternary():
    grad = torch.linspace(-1, 1, 21)
    scales = torch.full_like(grad, 1.0)
    coins = torch.rand(4000, 21, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([kernels.ternarise(grad, scales, row) for row in coins])
    assert set(draws.unique().tolist()) == {-1, 0, 1}
    # five standard deviations of the mean of 4,000 coins
    assert (draws.float().mean(0) - grad).abs().max() < 5 * 0.5 / 4000**0.5


def test_ternarise_says_zero_for_nan_and_for_a_zero_scale():
    grad, scales = torch.tensor([NAN, 0.0]), torch.tensor([1.0, 0.0])
    assert kernels.ternarise(grad, scales, torch.tensor([0.5, 0.5])).tolist() == [0, 0]


def test_clip_by_deviation():
    grad = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.ones(1)])
    clipped, scales = clip_by_deviation(grad, [(0, 1000), (1000, 1001)], factor=2.5)
    bound = 2.5 * grad[:1000].std(correction=0)
    assert torch.equal(clipped[:1000], grad[:1000].clamp(-bound, bound))
    assert scales.tolist() == pytest.approx([bound.item(), 1.0])


def test_clip_by_deviation_takes_a_parameter_with_nan_for_zero():
    """Whatever stood beside it would be beyond the scale that the others share."""
    grad = torch.tensor([5.0, NAN, -5.0, 2.0])
    clipped, scales = clip_by_deviation(grad, [(0, 3), (3, 4)], factor=2.5)
    assert clipped.tolist() == [0, 0, 0, 2]
    assert scales.isnan().tolist() == [True, False]


def test_largest_entries_are_exact_in_number_and_place():
    values = torch.tensor([0.0, -5.0, 1.0, 4.0, 0.1, 0.2, 0.3, 9.0])
    assert largest_entries(values, [(0, 4), (4, 8)], density=0.5).tolist() == [1, 3, 6, 7]
    assert largest_entries(values, [(0, 8)], density=0.01).tolist() == [7]
    odd = torch.tensor([math.inf, 1.0, -NAN, -1.0, NAN, 1.0])
    taken = [largest_entries(odd, [(0, 6)], count / 6).tolist() for count in (1, 2, 3, 4)]
    assert taken == [[2], [2, 4], [0, 2, 4], [0, 1, 2, 4]]  # NaN first, of equal ones the first


LONG = {
    "random": torch.randn(100_000, generator=torch.Generator().manual_seed(0)),
    "all equal": torch.ones(100_000),
    "zeros but for a few": torch.zeros(100_000).index_fill_(0, torch.arange(0, 100_000, 997), 2.0),
    "large where a sample looks": torch.arange(100_000.0).index_fill_(
        0, torch.arange(0, 100_000, 24), 1e9
    ),
    "with NaN": torch.arange(100_000.0).index_fill_(0, torch.arange(5, 100_000, 500), torch.nan),
}


@pytest.mark.parametrize("density", [1e-5, 0.001, 0.04, 0.3, 1.0])
@pytest.mark.parametrize("kind", LONG)
def test_largest_entries_of_a_long_vector(kind, density):
    sizes = LONG[kind].abs().nan_to_num(nan=float("inf"))
    chosen = largest_entries(LONG[kind], [(0, 100_000)], density)
    count = math.ceil(density * 100_000)
    assert chosen.unique().numel() == count
    assert sizes[chosen].sort().values.equal(sizes.sort().values[-count:])
    first = sizes.sort(descending=True, stable=True).indices[:count]
    assert chosen.equal(first.sort().values)


@pytest.mark.parametrize("module", [kernels, reference], ids=["compiled", "reference"])
@pytest.mark.parametrize(
    ("length", "count"),
    [
        (1000, 30),
        (1025, 1),
        (4096, 32),
        (4096, 1023),
        *((50_000, k) for k in (1, 100, 3000, 50_000)),
    ],
)
def test_of_equal_sizes_in_a_row_the_first_are_taken(module, length, count):
    """In all but the shortest rows a sample says first which values may be among them."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-20, 20, (3, length), generator=generator).float()
    rows[1] = 0.0
    rows[2, 700:900] = torch.nan
    order = rows.abs().nan_to_num(nan=torch.inf).sort(descending=True, stable=True).indices
    assert torch.equal(module.largest(rows, count), order[:, :count].sort().values)
