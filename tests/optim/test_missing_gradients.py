"""Parameters and workers without a gradient, or with one that is not finite."""

import math

import pytest
import torch

from dlion.errors import TrainingFailed
from dlion.methods import METHODS
from dlion.optim import DLion, GLion, GradDrop, LionCub, LocalUpdate, Signum
from dlion.workers import Workers
from tests.support.methods import of_all
from tests.support.small_model import flat, loss_of, net, samples, train


@of_all
def test_frozen_parameters_are_not_moved_and_cost_nothing(method, cls, options):
    """The same bytes, state and steps as for the other parameters alone."""
    whole, part = net(), net()
    whole[0].weight.requires_grad_(False)
    before = whole[0].weight.clone()
    workers = Workers(local=2)
    all_ = cls(whole.parameters(), weight_decay=0.1, workers=workers, **options)
    trained = [param for param in part.parameters() if param is not part[0].weight]
    some = cls(trained, weight_decay=0.1, workers=workers, **options)
    for t in range(3):
        for optimizer, model in ((all_, whole), (some, part)):
            for i in range(2):
                loss_of(model, *samples(2 * t + i)).backward()
                part[0].weight.grad = None
                optimizer.collect(i)
            optimizer.step()
    assert torch.equal(flat(whole), flat(part)) and torch.equal(whole[0].weight, before)
    assert all_.channel.traffic == some.channel.traffic
    assert whole[0].weight not in all_.state


@of_all
def test_a_parameter_without_gradient_anywhere_is_left_alone(method, cls, options):
    model = net()
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([*model.parameters(), unused], weight_decay=0.1, **options)
    train(model, optimizer, 3)
    state = dict(optimizer.state[unused])
    names = optimizer.state_names(optimizer.buckets[-1])
    assert state.keys() >= {*names.own_state, *names.shared_state}
    for name in ("step", "worker", "local", "outer"):  # the last are parameters themselves
        state.pop(name, None)
    assert all(not value.any() for value in state.values())
    decayed = 1.0
    # one of them may have had something left to send, so it decays; but in no inner step
    if not optimizer.skips_missing and not issubclass(cls, LocalUpdate):
        decayed = (1 - 0.1 * optimizer.param_groups[0]["lr"]) ** 3
    torch.testing.assert_close(unused.detach(), torch.full((3,), decayed))


def test_a_gradient_missing_on_one_worker_counts_as_zero_there():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = DLion([param], lr=1.0, workers=Workers(local=3), ties="zero")
    for i, grad in enumerate((-1.0, -1.0, None)):
        param.grad = None if grad is None else torch.tensor([grad])
        optimizer.collect(i)
    optimizer.step()
    assert param.item() == 1.0
    assert optimizer.state[param]["momentum"].flatten().tolist() == pytest.approx([-0.01, -0.01, 0])


VOTERS = [
    (DLion, {}),
    (DLion, {"ties": "zero"}),
    (DLion, {"ties": "random"}),
    (DLion, {"aggregation": "avg"}),
    (DLion, {"weighted": True}),
    (Signum, {"momentum": 0.9}),
    (LionCub, {"bits": 1}),
    (LionCub, {"bits": 4}),
]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(("cls", "options"), VOTERS)
def test_what_nobody_knows_stays_and_what_one_knows_moves(cls, options, n):
    """Entry w has a gradient on worker w alone, the last one on none."""
    param, steps = torch.nn.Parameter(torch.zeros(n + 1)), 8 * n
    optimizer = cls([param], lr=1.0, workers=Workers(local=n), **options)
    for _ in range(steps):
        for worker in range(n):
            param.grad = torch.zeros(n + 1)
            param.grad[worker] = 1.0
            optimizer.collect(worker)
        optimizer.step()
    full = 1 / n if options.get("aggregation") == "avg" else 1.0
    assert param[n].abs() < 1e-5  # it went back and forth, an even number of times
    for worker in range(n):
        share = -param[worker].item() / steps / full
        assert share >= 0.25 and share <= 1.01, (worker, share)


def test_nan_on_one_worker_is_outvoted():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = DLion([param], lr=1.0, workers=Workers(local=3), nonfinite=None)
    for i, grad in enumerate((1.0, 1.0, math.nan)):
        param.grad = torch.full((4,), grad)
        optimizer.collect(i)
    optimizer.step()
    assert param.tolist() == 4 * [-1.0]


@pytest.mark.parametrize("cls", [DLion, GLion, GradDrop])
def test_gradients_that_are_not_finite(cls):
    model = net()
    with pytest.raises(ValueError, match="nonfinite=never is unknown"):
        cls(model.parameters(), nonfinite="never")
    optimizer = cls(model.named_parameters(), lr=1e-2, nonfinite="skip", workers=Workers(local=2))
    for i in range(2):
        loss_of(model, *samples(i)).backward()
        if i == 1:
            model[0].weight.grad[3, 3] = math.inf
        optimizer.collect(i)
    optimizer.step()
    assert optimizer.skipped == 1 and flat(model).isfinite().all()
    optimizer = cls(model.named_parameters(), lr=1e-2, workers=Workers(local=2))
    before = flat(model)
    for i in range(2):
        loss_of(model, *samples(i)).backward()
        model[0].weight.grad[3, 3] = math.nan
        optimizer.collect(i)
    with pytest.raises(TrainingFailed, match=r"the gradient of 0.weight is not finite on worker 0"):
        optimizer.step()
    assert torch.equal(flat(model), before)


# a sign has no zero, and estimates or tiles that others share swing about it
DRIFTING = {"dlion_adm": 17, "muon_adm": 5, "demo": 9}


@pytest.mark.parametrize("method", METHODS)
def test_rows_whose_gradient_is_always_zero_stay_where_they_are(method):
    """Those of padding tokens, say. How far they drift is said of the methods that let them."""
    torch.manual_seed(0)
    table, matrix = (torch.nn.Parameter(torch.zeros(shape)) for shape in [(16, 8), (32, 32)])
    found, rate = METHODS[method], 1e-3
    options = {"lr": rate, "weight_decay": 0.0, "workers": Workers(local=4), **found.options}
    optimizer = found.cls([table, matrix], **options)
    random = torch.Generator().manual_seed(1)
    for _ in range(201):
        for worker in range(4):
            table.grad = torch.randn(16, 8, generator=random) + 0.3
            table.grad[0] = 0
            matrix.grad = torch.randn(32, 32, generator=random)
            optimizer.collect(worker)
        optimizer.step()
    optimizer.host(None)
    assert table[0].abs().max() / rate < DRIFTING.get(method, 1.5) + 0.1
    assert table[1:].abs().mean() / rate > 8
