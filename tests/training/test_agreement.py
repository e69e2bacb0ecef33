"""What a vote keeps of the workers' mean, and how far their momenta are apart."""

import pytest
import torch

from dlion import methods
from dlion.methods.dlion import SignVoteOptimizer
from dlion.optim import DLion, DLionADM, LionCub, Signum
from dlion.suite.training.agreement import Agreement
from dlion.workers import Workers

N, LR = 5, 0.01
METHODS = {
    "mavo": lambda *args, **more: DLion(*args, betas=(0.8, 0.9), **more),
    "avg": lambda *args, **more: DLion(*args, betas=(0.8, 0.9), aggregation="avg", **more),
    "adm": lambda *args, **more: DLionADM(*args, betas=(0.8, 0.9), **more),
    "cub": lambda *args, **more: LionCub(*args, betas=(0.8, 0.9), bits=2, **more),
    "signum": lambda *args, **more: Signum(*args, momentum=0.8, **more),
}


@pytest.mark.parametrize("method", METHODS)
def test_one_step_is_what_the_definitions_say(method):
    """Momenta and means by hand; the answer is read from how the parameters move.

    A twin that is not watched moves alike.
    """
    torch.manual_seed(0)
    names = ["blocks.0.a", "blocks.1.a", "head"]
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (70, 30, 9)]
    workers = Workers(local=N)
    alone = [p.detach().clone().requires_grad_() for p in params]
    optimizer, unseen = (
        METHODS[method](
            zip(names, tensors, strict=True), lr=LR, workers=workers, bucket_cap_mb=3e-4
        )
        for tensors in (params, alone)
    )
    assert len(optimizer.buckets) > 1
    agreement = Agreement(optimizer, workers)
    common = [torch.randn_like(p) for p in params]
    beta2 = 0.8 if method == "signum" else 0.9
    momenta = [torch.zeros(N, p.numel()) for p in params]
    for step in range(3):
        if step == 2:
            agreement.begin()
            before = [p.detach().clone() for p in params]
        grads = [torch.stack([c + torch.randn_like(c) for _ in range(N)]) for c in common]
        grads[2][:, :4] = 0  # nobody knows these
        for local in range(N):
            for p, twin, rows in zip(params, alone, grads, strict=True):
                p.grad, twin.grad = rows[local].clone(), rows[local].clone()
            agreement.look(local)
            optimizer.collect(local)
            unseen.collect(local)
        optimizer.step()
        unseen.step()
        if step < 2:
            momenta = [m.lerp(g, 1 - beta2) for m, g in zip(momenta, grads, strict=True)]
    found = agreement.measure()
    assert all(map(torch.equal, params, alone))
    means = [(0.8 * m + 0.2 * g).mean(0) for m, g in zip(momenta, grads, strict=True)]
    moves = [(old - p).detach() for old, p in zip(before, params, strict=True)]
    signs = [(move.sign() * (move.abs() > LR / 100)).sign() for move in moves]
    pairs = list(zip(signs, means, strict=True))
    right = sum(int((s == m.sign())[m != 0].sum()) for s, m in pairs)
    assert found["agreement"] == right / (70 + 30 + 5)
    assert 0.6 < found["agreement"] < 1
    opposed = sum(int((s * m.sign() < 0).sum()) for s, m in pairs)
    assert found["disagreement"] == opposed / (70 + 30 + 5)

    def variance(*rows: torch.Tensor) -> float:
        rows = torch.cat(rows, 1).double()
        return float(rows.var(0, correction=0).sum() / rows.square().mean(0).sum())

    blocks, head = torch.cat(momenta[:2], 1), momenta[2]
    assert found["momentum_variance"] == pytest.approx(variance(blocks, head), rel=1e-5)
    assert found["momentum_variance.blocks.a"] == pytest.approx(variance(blocks), rel=1e-5)
    assert found["momentum_variance.head"] == pytest.approx(variance(head), rel=1e-5)
    assert len(found) == 5


ONE_BIT = [
    name
    for name, method in methods.METHODS.items()
    if issubclass(method.cls, SignVoteOptimizer) and method.cls is not LionCub
]


@pytest.mark.parametrize("name", ONE_BIT)
def test_one_worker_agrees_with_itself(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5))
    method = methods.METHODS[name]
    optimizer = method.cls(model.named_parameters(), workers=Workers(), **method.options)
    agreement = Agreement(optimizer, Workers())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 20)).square().mean().backward()
        if step:
            agreement.begin()
            agreement.look(0)
        optimizer.step()
        if step:
            assert agreement.measure()["agreement"] == 1
