"""Overlap changes no bit, whatever is frozen, unused or accumulated."""

import threading

import pytest
import torch

from dlion.optim import DLion
from dlion.workers import Workers
from tests.support.methods import of_all
from tests.support.small_model import flat, loss_of, net, samples, train


@of_all
@pytest.mark.parametrize("local", [1, 2])
def test_overlap_and_buckets_keep_every_bit(method, cls, options, local):
    options = {name: value for name, value in options.items() if name != "clip_norm"}
    results = []
    for overlap in (False, True):
        model = net()
        optimizer = cls(
            model.parameters(),
            workers=Workers(local=local),
            overlap=overlap,
            bucket_cap_mb=1e-3,
            **options,
        )
        assert len(optimizer.buckets) > 1
        for t in range(4):
            for i in range(local):
                loss_of(model, *samples(10 * t + i)).backward()
                optimizer.collect(i)
            optimizer.step()
        results.append(flat(model))
    assert torch.equal(*results)


@of_all
@pytest.mark.parametrize("local", [1, 2])
def test_unfrozen_parameters_learn_with_overlap_as_without(method, cls, options, local):
    options = {name: value for name, value in options.items() if name != "clip_norm"}
    results = []
    for overlap in (False, True):
        model = net()
        model[0].requires_grad_(False)
        optimizer = cls(
            model.parameters(),
            lr=1e-2,
            overlap=overlap,
            bucket_cap_mb=1e-3,
            workers=Workers(local=local),
            **options,
        )
        before = flat(model[0])
        for t in range(6):
            if t == 2:
                assert torch.equal(flat(model[0]), before)
                model[0].requires_grad_(True)
            if t == 4:
                model[2].requires_grad_(False)
            for i in range(local):
                loss_of(model, *samples(10 * t + i)).backward()
                optimizer.collect(i)
            optimizer.step()
        assert not torch.equal(flat(model[0]), before)
        results.append(flat(model))
    assert torch.equal(*results)


def test_a_second_optimizer_takes_over_from_one_that_overlapped():
    one, two = net(), net()
    first = DLion(one.parameters(), lr=1e-2, overlap=True)
    train(one, first, 3)
    del first
    expected = train(two, DLion(two.parameters(), lr=1e-2), 3)
    assert torch.equal(flat(one), expected)
    second = [DLion(model.parameters(), lr=1e-2, overlap=model is one) for model in (one, two)]
    assert torch.equal(train(one, second[0], 3), train(two, second[1], 3))


def test_with_overlap_frozen_and_unused_parameters_wait_for_nobody():
    results = []
    for overlap in (False, True):
        model = net()
        model[0].bias.requires_grad_(False)
        unused = torch.nn.Parameter(torch.ones(5))
        params = [*model.parameters(), unused]
        optimizer = DLion(params, overlap=overlap, bucket_cap_mb=1e-3, weight_decay=0.1)
        results.append(train(model, optimizer, 3))
        assert torch.equal(unused.detach(), torch.ones(5))
    assert torch.equal(*results)


def test_with_overlap_gradients_accumulate_in_no_sync():
    x, y = samples()
    momenta = []
    for overlap in (False, True):
        model = net()
        optimizer = DLion(model.parameters(), overlap=overlap)
        with optimizer.no_sync():
            with optimizer.no_sync():
                loss_of(model, x[:16], y[:16]).backward()
            loss_of(model, x[16:32], y[16:32]).backward()
        loss_of(model, x[32:], y[32:]).backward()
        optimizer.step()
        momenta.append(optimizer.buckets[0].own["momentum"])
    assert torch.equal(*momenta)


def test_with_overlap_a_second_backward_pass_is_refused():
    model = net()
    optimizer = DLion(model.parameters(), overlap=True)
    loss_of(model, *samples()).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        loss_of(model, *samples()).backward()
    del optimizer


def test_with_overlap_gradients_may_come_from_several_threads():
    """As autograd has one for every device."""
    results = []
    for together in (False, True):
        model = torch.nn.ParameterList(torch.full((64,), float(i)) for i in range(40))
        optimizer = DLion(model.parameters(), overlap=True, bucket_cap_mb=1e-4)

        def backward(half: int, model: torch.nn.ParameterList = model) -> None:
            torch.stack([p.square().sum() for p in [*model][half::2]]).sum().backward()

        for _ in range(10):
            threads = [threading.Thread(target=backward, args=[half]) for half in (0, 1)]
            for thread in threads:
                thread.start()
                if not together:
                    thread.join()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        results.append(flat(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("measured", [range(6), (3, 5)])
def test_with_overlap_a_norm_that_is_only_measured_is_no_change(measured):
    """Whether steps before have measured it, too, or not."""
    plain = net()
    expected = train(plain, DLion(plain.parameters(), lr=1e-2), 6)
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True, bucket_cap_mb=1e-3)
    for t in range(6):
        optimizer.zero_grad()
        loss_of(model, *samples(t)).backward()
        if t in measured:
            torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
    assert torch.equal(flat(model), expected)


@pytest.mark.parametrize("steps", [0, 2])
def test_with_overlap_changed_gradients_are_refused_in_every_step(steps):
    def clip(grad: torch.Tensor) -> None:
        grad.mul_(0.999)

    def freeze(grad: torch.Tensor) -> None:
        grad[0] = 0

    for change in (clip, freeze):
        model = net()
        optimizer = DLion(model.parameters(), overlap=True, bucket_cap_mb=1e-3)
        train(model, optimizer, steps)
        optimizer.zero_grad()
        loss_of(model, *samples(steps)).backward()
        change(model[0].weight.grad)
        with pytest.raises(RuntimeError, match="changed between"):
            optimizer.step()
