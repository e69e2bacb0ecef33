"""PowerSGD, Dion, 1-bit Adam and MuonADM: what is special about each."""

import pytest
import torch
from torch import nn

from dlion.optim import Dion, MuonADM, OneBitAdam, PowerSGD
from dlion.workers import Workers
from tests.support.small_model import SHAPES, give_gradients, matrices


def test_powersgd_sends_a_mean_of_its_rank_exactly():
    """Whatever the workers have that is not in the mean stays with them, and cancels out."""
    generator = torch.Generator().manual_seed(1)
    thin = [torch.randn(20, 2, generator=generator), torch.randn(2, 33, generator=generator)]
    noise = torch.randn(20, 33, generator=generator)
    param = nn.Parameter(torch.zeros(20, 33))
    optimizer = PowerSGD([param], lr=1.0, momentum=0.0, rank=2, workers=Workers(local=2))
    for worker in range(2):
        param.grad = thin[0] @ thin[1] + (noise if worker else -noise)
        optimizer.collect(worker)
    optimizer.step()
    torch.testing.assert_close(-param.detach(), thin[0] @ thin[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_powersgd_loses_nothing_and_finds_what_comes_late(n):
    """After steps of zeros its Q is zero, too."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((9, 7, 3), (40,))]
    optimizer = PowerSGD(params, lr=1.0, momentum=0.0, rank=1, workers=Workers(local=n))
    total = [torch.zeros_like(param.detach()) for param in params]
    generator = torch.Generator().manual_seed(n)
    for t in range(12):
        for worker in range(n):
            for param, gradients in zip(params, total, strict=True):
                param.grad = torch.randn(param.shape, generator=generator) * (t > 2)
                gradients += param.grad / n
            optimizer.collect(worker)
        optimizer.step()
    for param, gradients in zip(params, total, strict=True):
        kept = optimizer.state[param]["residual"].mean(0)
        assert param.any() and kept.any() == (param.dim() > 1)
        torch.testing.assert_close(kept - param.detach(), gradients)


@pytest.mark.parametrize("n", [4, 32])
@pytest.mark.parametrize("cls", [Dion, PowerSGD])
def test_factors_of_low_rank_depend_on_the_mean_gradient_alone(cls, n):
    """What workers keep of their own cancels out: settings hold for any number of them."""
    ends = []
    for workers in (1, n):
        params, generator = matrices(), torch.Generator().manual_seed(n)
        optimizer = cls(params, lr=1e-2, workers=Workers(local=workers))
        for _ in range(20):
            rows = [torch.randn(n, *shape, generator=generator) for shape in SHAPES]
            for worker in range(workers):
                for param, row in zip(params, rows, strict=True):
                    param.grad = row[worker].clone() if workers == n else row.mean(0)
                optimizer.collect(worker)
            optimizer.step()
        ends.append([param.detach() for param in params])
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)
    before = matrices()
    assert all((one - end).abs().max() > 0.02 for one, end in zip(before, ends[0], strict=True))


def test_one_bit_adam_leaves_what_never_had_a_gradient_where_it_is():
    param = nn.Parameter(torch.ones(130))
    optimizer = OneBitAdam([param], lr=1e-3, weight_decay=0.0, warmup_steps=3)
    for t in range(8):
        give_gradients([param], t)
        param.grad[:5] = 0
        optimizer.step()
    assert torch.equal(param[:5].detach(), torch.ones(5))
    assert (param[5:].detach() - 1).abs().amax() < 1 and (param[5:] != 1).all()


def test_one_bit_adam_freezes_the_variance_after_the_warm_up():
    param = nn.Parameter(torch.ones(128))
    optimizer = OneBitAdam([param], warmup_steps=2, workers=Workers(local=2))
    variances = []
    for t in range(4):
        for worker in range(2):
            give_gradients([param], 2 * t + worker)
            optimizer.collect(worker)
        optimizer.step()
        variances.append(optimizer.state[param]["exp_avg_sq"].clone())
    assert not torch.equal(variances[0], variances[1])
    assert torch.equal(variances[1], variances[3])
    assert len(optimizer.state[param]["exp_avg"].abs().unique()) == 2  # a scale for each slice


def test_delta_modulation_of_experts_is_that_of_their_matrices():
    """Its step is one for a parameter, so that the same gradient for all makes the same signs."""
    together = nn.Parameter(torch.zeros(2, 18, 20))
    alone = nn.Parameter(torch.zeros(18, 20))
    optimizers = MuonADM([("mlp.experts.w", together)]), MuonADM([("mlp.w", alone)])
    for t in range(4):
        give_gradients([alone], t)
        together.grad = torch.stack([alone.grad, alone.grad])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(together, torch.stack([alone, alone]))
