"""Methods that send a part keep the rest: of a gradient nothing is lost and nothing is added."""

import pytest
import torch

from dlion.optim import DGC, EFSignSGD, GradDrop
from dlion.workers import Workers

METHODS = {
    "graddrop": (GradDrop, "residual", {}),
    "dgc": (DGC, "accumulated", {}),
    "dgc warmup": (DGC, "accumulated", {"warmup_steps": 4}),
}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_and_what_is_kept_is_what_there_was(method, n):
    """Gradients are small whole numbers and n is a power of two, so that every sum is exact."""
    cls, kept_name, options = METHODS[method]
    generator = torch.Generator().manual_seed(n)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((9, 7), (40,))]
    optimizer = cls(params, lr=1.0, momentum=0.0, density=0.1, workers=Workers(local=n), **options)
    kept = [torch.zeros(n, *param.shape) for param in params]
    for _ in range(8):
        rows = [
            torch.randint(-9, 10, (n, *param.shape), generator=generator).float()
            for param in params
        ]
        before = [param.detach().clone() for param in params]
        for worker in range(n):
            for param, row in zip(params, rows, strict=True):
                param.grad = row[worker].clone()
            optimizer.collect(worker)
        optimizer.step()
        for i, param in enumerate(params):
            had, sent = kept[i] + rows[i], n * (before[i] - param.detach())
            kept[i] = optimizer.state[param][kept_name].clone()
            assert sent.any() and torch.equal(sent + kept[i].sum(0), had.sum(0))
            assert ((kept[i] == had) | (kept[i] == 0)).all()  # an entry is sent whole
    assert all(rest.any() for rest in kept)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_signs_with_error_feedback_lose_nothing_on_either_way(n):
    """Nor do they move a parameter without gradients, as its scale is 0."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((9, 7), (40,), (20,))]
    optimizer = EFSignSGD(params, lr=1.0, momentum=0.0, workers=Workers(local=n))
    exchange, generator = optimizer.buckets[0].exchange, torch.Generator().manual_seed(n)
    total = [torch.zeros_like(param.detach()) for param in params]
    for _ in range(20):
        for worker in range(n):
            for param, gradients in zip(params[::2], total[::2], strict=True):
                param.grad = torch.randn(param.shape, generator=generator)
                gradients += param.grad / n
            optimizer.collect(worker)
        optimizer.step()
    assert exchange.state["error"].any() == (n > 1)  # one worker's message is sent back as it is
    for slot, gradients in zip(optimizer.buckets[0].slots, total, strict=True):
        kept_by_owners = slot.view(exchange.state["error"].flatten())
        kept_by_workers = optimizer.state[slot.tensor]["residual"].mean(0)
        arrived = -slot.tensor.detach()
        torch.testing.assert_close(arrived + kept_by_owners + kept_by_workers, gradients)
    assert not params[1].any() and not optimizer.state[params[1]]["residual"].any()
