"""The optimizers in plain loops: they learn, with groups, schedules, closures and every dtype."""

import itertools

import pytest
import torch
from omegaconf import OmegaConf

from dlion.optim import DistributedOptimizer, DLion, DLionADM, GLion
from dlion.suite.config import instantiate
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.support.methods import of_all
from tests.support.small_model import flat, loss_of, net, samples


@of_all
def test_every_method_learns(method, cls, options):
    """With the values of its YAML file."""
    settings = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{method}.yaml")
    if method == "onebit_adam":
        settings.lr = 1e-4  # its variance is that of two steps
    model = net()
    optimizer = instantiate(settings, model.parameters(), workers=Workers(local=2), **options)
    x, y = samples()
    before = loss_of(model, x, y).item()
    for _ in range(100):
        for i in range(2):
            loss_of(model, x[i::2], y[i::2]).backward()
            optimizer.collect(i)
        optimizer.step()
    assert loss_of(model, x, y).item() < 0.85 * before


def test_parameter_groups_schedulers_and_closures():
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = DLion(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    frozen, moving = model[0].weight.clone(), model[2].weight.clone()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *samples())
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    step = (model[2].weight - moving).abs().max().item()
    schedule.step()
    moving = model[2].weight.clone()
    optimizer.step(closure)
    assert torch.equal(model[0].weight, frozen)
    assert (model[2].weight - moving).abs().max().item() == pytest.approx(step / 2, rel=1e-3)


def test_gradients_accumulate_over_backward_passes():
    one, two = net(), net()
    x, y = samples()
    first, second = GLion(one.parameters(), lr=1e-3), GLion(two.parameters(), lr=1e-3)
    loss_of(one, x, y).backward()
    for part in (slice(0, 32), slice(32, 64)):
        (loss_of(two, x[part], y[part]) / 2).backward()
    first.step(), second.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first.state[p]["momentum"], second.state[q]["momentum"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@of_all
def test_the_default_dtype_changes_nothing(method, cls, options, dtype):
    results = []
    for default in (torch.float32, dtype):
        model = net()
        gradients = [[torch.randn(p.shape) for p in model.parameters()] for _ in range(6)]
        torch.set_default_dtype(default)
        try:
            optimizer = cls(model.parameters(), lr=1e-2, workers=Workers(local=2), **options)
            for worker, grads in enumerate(gradients):
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.grad = grad
                optimizer.collect(worker % 2)
                if worker % 2:
                    optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        sent = optimizer.channel.traffic.sent_bytes
        results.append((flat(model).tolist(), sent, optimizer.state_bytes))
    assert results[0] == results[1]


def test_bfloat16_parameters_and_autocast():
    model = net().to(torch.bfloat16)
    optimizer = DLion(model.parameters(), lr=1e-2)
    x, y = samples()
    before = loss_of(model, x.bfloat16(), y.bfloat16()).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, x.bfloat16(), y.bfloat16()).backward()
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert loss_of(model, x.bfloat16(), y.bfloat16()).item() < before

    model = net()
    optimizer = DLion(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def loss_on_sorted_digits(cls: type[DistributedOptimizer], **options) -> float:
    """Train on handwritten digits of which each of 8 workers sees one or two kinds."""
    from sklearn.datasets import load_digits  # takes two seconds, in every test process

    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    order = y.argsort(stable=True)
    x, y = (x.float() / 16)[order], y[order]
    torch.manual_seed(0)
    sizes = (64, 32, 32)
    layers = [(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*itertools.chain(*layers), torch.nn.Linear(32, 10))
    optimizer = cls(model.parameters(), workers=Workers(local=8), **options)
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 100)
        for worker, (own, kinds) in enumerate(
            zip(x.tensor_split(8), y.tensor_split(8), strict=True)
        ):
            torch.nn.functional.cross_entropy(model(own), kinds).backward()
            optimizer.collect(worker)
        optimizer.step()
        optimizer.zero_grad()
    return torch.nn.functional.cross_entropy(model(x), y).item()


def test_dlion_adm_with_its_own_betas_is_as_good_as_lion_on_noniid_data():
    """0.22 nats against 0.23; with Lion's betas, (0.9, 0.99), it has 0.27."""
    assert loss_on_sorted_digits(DLionADM) < loss_on_sorted_digits(GLion)
