"""Averages of the workers' momenta: when, and of which parameters."""

import copy

import pytest
import torch

from dlion.extensions.momentum_sync import MomentumSync
from dlion.optim import LionCub, SignMuon
from dlion.workers import Workers
from tests.support.small_model import loss_of, net, samples


def test_momentum_is_synchronised_when_and_where_asked():
    model = net()
    optimizer = LionCub(
        model.named_parameters(),
        momentum_sync=2,
        sync_pattern=r"^0\.weight",
        workers=Workers(local=3),
    )
    for t in range(2):
        for i in range(3):
            loss_of(model, *samples(3 * t + i)).backward()
            optimizer.collect(i)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.step()
    momenta = [state["momentum"] for state in optimizer.state_dict()["state"].values()]
    assert torch.equal(momenta[0][0], momenta[0][1]) and torch.equal(momenta[0][0], momenta[0][2])
    assert not torch.equal(momenta[2][0], momenta[2][1])
    assert not torch.equal(before[0]["momentum"][0], before[0]["momentum"][1])


@pytest.mark.parametrize("wire", ["float32", "bf16", "int8"])
def test_averages_of_sign_muon_are_as_near_as_their_wire(wire):
    model = net()
    workers = Workers(local=3)
    sync = {"momentum_sync": 1, "sync_wire": wire}
    optimizer = SignMuon(model.named_parameters(), momentum=0.5, workers=workers, **sync)
    exact: dict[str, torch.Tensor] = {}
    for i in range(3):
        loss_of(model, *samples(i)).backward()
        for name, param in model.named_parameters():  # after one step, momenta are of one gradient
            exact[name] = exact.get(name, 0) + param.grad / 3
        optimizer.collect(i)
    optimizer.step()
    rounding = {"float32": 1e-6, "bf16": 2**-7, "int8": 1 / 127}[wire]
    for name, param in model.named_parameters():
        momenta, mean = optimizer.state[param]["momentum"], exact[name]
        assert torch.equal(momenta[0], momenta[1]) and torch.equal(momenta[0], momenta[2])
        factor = (momenta[0].flatten() @ mean.flatten()) / mean.square().sum()  # 1 - beta
        largest = 2 * mean.abs().max() * 3 * factor.abs()
        assert (momenta[0] - factor * mean).abs().max() <= rounding * largest


@pytest.mark.parametrize("wire", ["float32", "bf16", "int8"])
def test_an_average_leaves_out_what_is_not_finite(wire):
    model, sync = net(), {"momentum_sync": 1, "sync_wire": wire}
    sync["nonfinite"] = None
    optimizer = SignMuon(model.named_parameters(), workers=Workers(local=3), **sync)
    weight = model[0].weight
    for i in range(3):
        loss_of(model, *samples(i)).backward()
        if i == 1:
            weight.grad[0, 0], weight.grad[0, 1] = torch.nan, -torch.inf
        optimizer.collect(i)
    before = optimizer.state[weight]["momentum"].clone()
    optimizer.step()
    expected = before.nan_to_num(0.0, 0.0, 0.0).mean(0)
    for momentum in optimizer.state[weight]["momentum"]:
        largest = before.nan_to_num(0.0, 0.0, 0.0).abs().max()
        assert (momentum - expected).abs().max() <= largest / 60


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("exponential",), [1, 2, 4, 8, 16]),
        (("floored",), [1, 2, 4, 8, 16]),
        (("exponential", 16.0), [*range(1, 8), 9, 10, 11, 13, 14, 16, 18, 19, *range(21, 30, 2)]),
        (("floored", 16.0), [*range(1, 18), *range(19, 30, 2)]),
        (("floored", 16.0, None, 20), [*range(1, 18), 19]),
        ((3, 1.0, None, 7), [3, 6]),
        ((7,), [7, 14, 21, 28]),
    ],
)
def test_the_steps_after_which_momenta_are_averaged(settings, steps):
    sync = MomentumSync(*settings)
    assert [t for t in range(1, 30) if sync.is_due(t)] == steps
