"""bfloat16 parameters: small steps add up where they are rounded at random, and are missed else."""

import copy
import warnings

import pytest
import torch

from dlion import kernels
from dlion.optim import DiLoCo, DLion, GAdamW
from dlion.workers import Workers


def train(cls, steps: int, ones: torch.Tensor, **options) -> tuple[torch.Tensor, list[str]]:
    """Move ones down by steps of 1e-4, where bfloat16 has 1 - 1/256 next; return warnings, too."""
    param = torch.nn.Parameter(ones.clone())
    optimizer = cls([param], lr=1e-4, weight_decay=0.0, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            param.grad = torch.ones_like(param)
            optimizer.step()
    return param.detach(), [str(each.message) for each in seen]


ONES = torch.ones(4000, dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"aggregation": "avg"}, {"cls": GAdamW}])
def test_small_steps_add_up_with_stochastic_rounding(options):
    cls = options.pop("cls", DLion)
    moved, silent = train(cls, 100, ONES, stochastic_rounding=True, **options)
    # 100 draws with a chance of 1e-4 * 256 are 2.56 of 1/256, here the mean of 4,000
    assert moved.dtype == torch.bfloat16 and not silent
    assert (1 - moved.float()).mean() == pytest.approx(0.01, rel=0.05)
    still, warned = train(cls, 100, ONES, **options)
    assert torch.equal(still, ONES)
    assert len(warned) == 1 and "stochastic_rounding=True" in warned[0] and "100%" in warned[0]


def test_nobody_is_warned_where_nothing_is_lost():
    for cls, ones in ((DLion, torch.ones(10)), (DLion, ONES * 1e-3), (DiLoCo, ONES)):
        assert train(cls, 4, ones)[1] == []


def test_warm_up_from_zero_is_no_loss():
    param = torch.nn.Parameter(ONES.clone())
    optimizer = DLion([param], lr=0.0)
    param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_all_draw_the_same_and_a_resumed_run_continues_to_the_bit():
    results = []
    for workers in (Workers(), Workers(local=2)):
        for resumes in (False, True):
            torch.manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(70).bfloat16()) for _ in range(3)]
            optimizer = DLion(params, lr=1e-3, workers=workers, stochastic_rounding=True)
            for t in range(8):
                if resumes and t == 4:
                    state = copy.deepcopy(optimizer.state_dict())
                    optimizer = DLion(params, workers=workers, stochastic_rounding=True)
                    optimizer.load_state_dict(state)
                for local in range(workers.local):
                    for param in params[t % 2 :]:  # one of them is absent in every other step
                        param.grad = torch.full_like(param, 1.0 - 2 * (t // 3 % 2))
                    optimizer.collect(local)
                before = params[0].clone()
                optimizer.step()
                assert torch.equal(params[0], before) == bool(t % 2)
            results.append(torch.stack([*params]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_rounding_at_random_keeps_the_mean_and_what_bfloat16_has():
    values = torch.tensor([1.001, -0.3, 1e-30, 3e-39, 1.0, -2.5, 0.0, torch.inf, torch.nan])
    nearest = values.bfloat16()
    draws = torch.stack([torch.zeros_like(nearest) for _ in range(4000)])
    for index, draw in enumerate(draws):
        kernels.round_at_random(draw, values, (index, 7 * index))
    unit = (values - nearest.float()).abs().clamp(min=1e-45)[:4]
    assert (draws[:, :4] != draws[0, :4]).any(0).all()
    assert (
        (draws[:, :4].float().mean(0) - values[:4]).abs() < unit + values[:4].abs() * 2e-4
    ).all()
    assert all(torch.equal(draw[4:8], nearest[4:8]) for draw in draws)
    assert draws[:, 8].isnan().all()
