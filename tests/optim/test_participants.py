"""Absent workers, and workers that are collected too often or too late."""

import itertools

import pytest
import torch

from dlion.optim import DLion, DLionADM
from dlion.workers import Workers
from tests.support.methods import OF_PIECES, of_all
from tests.support.small_model import flat, loss_of, net, samples


@of_all
def test_the_absent_keep_their_state_and_do_not_count(method, cls, options):
    """Steps with two of four workers are steps of those two alone."""
    some, pair = net(), net()
    four = cls(some.parameters(), lr=1e-2, workers=Workers(local=4), **options)
    two = cls(pair.parameters(), lr=1e-2, workers=Workers(local=2), **options)
    for t in range(4):
        four.set_participants([1, 3])
        for optimizer, model, ids in ((four, some, (1, 3)), (two, pair, (0, 1))):
            for position, i in enumerate(ids):
                loss_of(model, *samples(10 * t + position)).backward()
                if method == "terngrad":  # coins are each worker's own: leave nothing to them
                    for param in model.parameters():
                        param.grad.sign_()
                optimizer.collect(i)
            optimizer.step()
    # scales are of pieces, weights and limits of slices, which four cut otherwise
    if method not in OF_PIECES and not {"limit", "wire"} & options.keys():
        torch.testing.assert_close(flat(some), flat(pair), rtol=0, atol=1e-6)
    for bucket in four.buckets:
        for param, name in itertools.product(bucket.tensors, bucket.own.keys() - {"local"}):
            rows = four.state[param][name]
            if method != "powersgd" or param.dim() > 1:  # it sends vectors whole
                assert rows[1].any() and rows[3].any()
            assert not rows[0].any() and not rows[2].any()


@pytest.mark.parametrize("options", [{}, {"limit": 1}, {"limit": 2.0, "weighted": True}])
@pytest.mark.parametrize("n", [1, 4])
def test_delta_modulation_keeps_both_ends_in_step_whoever_is_absent(n, options):
    """From the first step on; one parameter gets its gradients late, on some workers only."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((70, 3), (1,), (200,))]
    optimizer = DLionADM(params, workers=Workers(local=n), **options)
    generator = torch.Generator().manual_seed(n)
    for step, present in enumerate(([1, 3], [1, 3], [2], None, [0], None) if n > 1 else [[0]] * 6):
        optimizer.set_participants(present)
        for worker in range(n) if present is None else present:
            for param in params if step > 1 and worker != 1 else params[:2]:
                param.grad = torch.randn(param.shape, generator=generator) + worker
            optimizer.collect(worker)
        optimizer.step()
    bucket = optimizer.buckets[0]
    state = bucket.exchange.state
    received = state["received_level"].transpose(0, 1).flatten(1)
    assert torch.equal(state["level"][:, : bucket.numel], received[:, : bucket.numel])
    total = state["received_estimate"].sum(1).flatten()
    torch.testing.assert_close(state["estimate"].sum(0)[: bucket.numel], total[: bucket.numel])
    assert total.any()


def test_attendance_that_cannot_be():
    model = net()
    optimizer = DLion(model.parameters(), workers=Workers(local=2))
    for wrong in ([], [2], [-1]):
        with pytest.raises(ValueError, match="give at least one of the 2 workers"):
            optimizer.set_participants(wrong)
    optimizer.set_participants([1])
    loss_of(model, *samples()).backward()
    with pytest.raises(RuntimeError, match="worker 0 does not take part"):
        optimizer.collect(0)
    optimizer.collect(1)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        optimizer.set_participants(None)
    optimizer.step()
    optimizer.set_participants(None)


def test_collecting_a_worker_twice_is_refused():
    optimizer = DLion(net().parameters(), workers=Workers(local=2))
    optimizer.collect(0)
    with pytest.raises(RuntimeError, match="worker 0 was collected twice"):
        optimizer.collect(0)


def test_step_before_collect_says_who_is_missing():
    optimizer = DLion(net().parameters(), workers=Workers(local=2))
    with pytest.raises(RuntimeError, match=r"virtual workers \[0, 1\]"):
        optimizer.step()
