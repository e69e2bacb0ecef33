"""One worker equals others' code; methods equal each other where they should."""

import pytest
import torch
from lion_pytorch import Lion

from dlion.optim import DLion, GAdamW, GLion, LionCub
from dlion.workers import Workers
from tests.support.small_model import flat, loss_of, net, samples, train


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cls", [GLion, DLion])
def test_one_worker_is_lion_pytorch_to_the_bit(cls, weight_decay):
    ours, theirs = net(), net()
    settings = {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": weight_decay}
    expected = train(theirs, Lion(theirs.parameters(), **settings), 100)
    assert torch.equal(train(ours, cls(ours.parameters(), **settings), 100), expected)


def test_one_worker_average_is_lion_too():
    ours, theirs = net(), net()
    expected = train(theirs, Lion(theirs.parameters(), lr=1e-3), 100)
    result = train(ours, DLion(ours.parameters(), lr=1e-3, aggregation="avg"), 100)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("local", [1, 4])
def test_g_adamw_is_torch_adamw_on_the_mean_gradient(local):
    ours, theirs = net(), net()
    optimizer = GAdamW(ours.parameters(), lr=1e-2, weight_decay=0.1, workers=Workers(local=local))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for t in range(100):
        for i in range(local):
            loss_of(ours, *samples(4 * t + i)).backward()
            optimizer.collect(i)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for i in range(local):
            (loss_of(theirs, *samples(4 * t + i)) / local).backward()
        reference.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)


def test_one_bit_lion_cub_is_distributed_lion():
    one, two = net(), net()
    first = train(one, LionCub(one.parameters(), bits=1, ties="alternate", lr=1e-3), 20)
    assert torch.equal(first, train(two, DLion(two.parameters(), lr=1e-3), 20))
