"""What zeros, NaN and large values mean, and that TernGrad is unbiased."""

import pytest
import torch

from dlion.optim import rules

NAN, INF = float("nan"), float("inf")


def test_zero_and_nan_alternate_on_a_one_bit_wire():
    values = torch.tensor([1e-45, -1e-45, 0.0, -0.0, NAN, INF, -INF])
    even = [True, False, True, True, True, True, False]
    odd = [True, False, False, False, False, True, False]
    assert rules.one_bit_sign(values, step=0).tolist() == even
    assert rules.one_bit_sign(values, step=1).tolist() == odd


def test_quantise_l1_puts_the_mean_at_half_scale_and_saturates():
    values = torch.tensor([1.0, -1.0, 0.1, -1.9, 0.0, 5.0, -5.0, 0.0])
    values *= 8 / values.abs().sum()  # mean magnitude 1
    quantised = rules.quantise(values, [(0, 8)], largest=7, scale="l1")
    assert quantised.tolist() == torch.round(values * 3.5).clamp(-7, 7).tolist()
    assert quantised.max() == 7 and quantised.min() == -7


def test_quantise_scales_each_parameter_by_itself_and_abstains_at_zero():
    values = torch.cat([torch.full((4,), 1e-6), torch.full((4,), 1e6), torch.zeros(4)])
    spans = [(0, 4), (4, 8), (8, 12)]
    for scale, expected in (("l1", 3.5), ("max", 7.0), ("geometric", 3.5)):
        quantised = rules.quantise(values, spans, largest=7, scale=scale)
        # half scale is 3.5, which may round either way
        assert ((quantised[:8] - expected).abs() <= 0.5).all()
        assert not quantised[8:].any()


def test_quantise_says_nothing_where_a_scale_is_not_finite():
    values = torch.tensor([NAN, 1.0, 1.0, 1.0])
    assert rules.quantise(values, [(0, 2), (2, 4)], 1, "max").tolist() == [0, 0, 1, 1]


def test_ternarise_is_unbiased_and_ternary():
    grad = torch.linspace(-1, 1, 21)
    scales = torch.full_like(grad, 1.0)
    coins = torch.Generator().manual_seed(0)
    draws = torch.stack([rules.ternarise(grad, scales, coins) for _ in range(4000)])
    assert set(draws.unique().tolist()) == {-1, 0, 1}
    # five standard deviations of the mean of 4,000 coins
    assert (draws.float().mean(0) - grad).abs().max() < 5 * 0.5 / 4000**0.5


def test_ternarise_says_zero_for_nan_and_for_a_zero_scale():
    coins = torch.Generator().manual_seed(0)
    grad = torch.tensor([NAN, 0.0])
    assert rules.ternarise(grad, torch.tensor([1.0, 0.0]), coins).tolist() == [0, 0]


def test_clip_by_deviation():
    grad = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.ones(1)])
    clipped, scales = rules.clip_by_deviation(grad, [(0, 1000), (1000, 1001)], factor=2.5)
    bound = 2.5 * grad[:1000].std(correction=0)
    assert torch.equal(clipped[:1000], grad[:1000].clamp(-bound, bound))
    assert scales.tolist() == pytest.approx([bound.item(), 1.0])


def test_largest_entries_are_exact_in_number_and_place():
    values = torch.tensor([0.0, -5.0, 1.0, 4.0, 0.1, 0.2, 0.3, 9.0])
    assert rules.largest_entries(values, [(0, 4), (4, 8)], density=0.5).tolist() == [1, 3, 6, 7]
    assert rules.largest_entries(values, [(0, 8)], density=0.01).tolist() == [7]
