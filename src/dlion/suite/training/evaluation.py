"""Measurements between steps: results on the test set, and the progress of Lion's theory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlion.exchange import Channel, sum_in_order
from dlion.streams import stream_seed
from dlion.suite.data import Data

Watch = Callable[[Iterable[Any], int], Iterable[Any]]

_BOX_SAMPLES = 1000  # of the training set, always the same


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    channel: Channel,
    device: str,
    limit: int | None = None,
    watch: Watch = lambda batches, count: batches,
    known: dict[int, Tensor] | None = None,
) -> dict[str, float]:
    """Return the test set's results, bit-identical however workers are spread.

    Test batches are distributed over the workers, and their sums are added in the order of batches.

    Args:
        model: what is tested.
        data: has the test set.
        channel: brings the sums of all workers together.
        device: where the model is.
        limit: the number of test batches, which are spread evenly over the set; None: all.
        watch: yields what it is given, this process's batches and their number, and shows how far
            it is.
        known: what this process has found with equal parameters, by a batch's first sample; nobody
            tests that again. What it finds is added, so that workers who die more often than an
            evaluation takes end one.

    Returns:
        ``test_loss`` (nats per label or token), ``test_accuracy`` (0 to 1) where there are classes,
        and whatever else the data set measures.
    """
    workers, starts = channel.workers, _starts(data, limit)
    known = {} if known is None else known
    tested = torch.tensor([[start in known for start in starts]], dtype=torch.uint8)
    everyones = channel.gather(tested.repeat(workers.local, 1))
    left = [starts[i] for i in (everyones.sum(0) == 0).nonzero().flatten().tolist()]
    mine = [start for worker in workers.ids for start in left[worker :: workers.count]]
    known |= zip(mine, _scores(model, data, mine, device, watch), strict=True)
    table = torch.zeros(workers.local, len(starts), 1 + data.sums, dtype=torch.float64)
    for i, start in enumerate(starts):  # of the process, so they go with its first worker only
        if start in known:
            table[0, i, 0], table[0, i, 1:] = 1, known[start]
    everyone = channel.gather(table)  # [n, batches, 1 + m]
    first = everyone[..., 0].argmax(0)  # who has a batch
    in_order = everyone[first, torch.arange(len(starts)), 1:]
    return data.results(sum_in_order(in_order).tolist())


def _starts(data: Data, limit: int | None) -> Sequence[int]:
    """Return the first sample of each test batch."""
    starts = range(0, data.test_size, data.test_batch_size)
    if limit is None or limit >= len(starts):
        return starts
    return [starts[i * len(starts) // limit] for i in range(limit)]


def _scores(
    model: nn.Module,
    data: Data,
    starts: Sequence[int],
    device: str,
    watch: Watch,
) -> list[Tensor]:
    """Return the sums of test batches, float64 ``[m]`` each, on the CPU."""
    model.eval()
    batches = watch(data.test_batches(starts, device), len(starts))
    scores = [data.score(model(x), y, start) for start, (x, y) in zip(starts, batches, strict=True)]
    model.train()
    return [*torch.stack(scores).cpu()] if scores else []


def box_state(
    model: nn.Module, data: Data, weight_decay: float, device: str, seed: int
) -> dict[str, float]:
    """Measure where the parameters x are relative to the box that Lion draws them into.

    Lion with weight decay w solves min f(x) subject to ``|x| <= 1 / w`` (Chen et al. 2024, arXiv
    2310.05898; for n workers arXiv 2404.00438, section 3): first (phase I) the distance to the box
    shrinks by ``1 - lr w`` a step, then (phase II) the KKT score, which is zero at a solution,
    falls.

    Returns:
        ``outside_box``: share of the parameters outside the box. ``box_distance``: of the farthest
        to it. ``kkt_score``: the sum over parameters of ``g (sign g + w x)``, g being the gradient
        of the loss on 1,000 training samples; not negative inside the box.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    edge = 1 / weight_decay
    gradients = _gradients(model, params, data, device, seed)
    with torch.no_grad():
        outside = sum((p.abs() > edge).sum() for p in params)
        distances = [(p.abs().max() - edge).clamp(min=0).double() for p in params]
        score = sum(
            (g.double() * (g.sign() + weight_decay * p).double()).sum()
            for g, p in zip(gradients, params, strict=True)
        )
    return {
        "outside_box": float(outside) / sum(p.numel() for p in params),
        "box_distance": torch.stack(distances).max().item(),
        "kkt_score": float(score),
    }


def _gradients(
    model: nn.Module, params: list[nn.Parameter], data: Data, device: str, seed: int
) -> list[torch.Tensor]:
    """Return the gradients of the mean loss on training samples, taken evenly."""
    model.eval()
    indices = torch.arange(0, data.train_size, -(-data.train_size // _BOX_SAMPLES))
    chunks = indices.split(data.test_batch_size)
    requests = [(chunk, stream_seed(seed, "box", i)) for i, chunk in enumerate(chunks)]
    totals = [torch.zeros_like(p) for p in params]
    for chunk, (x, y) in zip(chunks, data.batches(requests, device), strict=True):
        loss = data.loss(model(x), y) * (len(chunk) / len(indices))
        gradients = torch.autograd.grad(loss, params, allow_unused=True)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total += gradient
    model.train()
    return totals
