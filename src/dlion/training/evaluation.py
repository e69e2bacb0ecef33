"""The test set's results, the same to the bit however workers are spread."""

import torch
from torch import nn

from dlion.data import Data
from dlion.exchange import Channel


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, channel: Channel, device: str) -> dict[str, float]:
    """Test batches are dealt out to the workers; their sums are added in the order of batches.

    Returns ``test_loss`` (nats per label or token), ``test_accuracy`` (0 to 1) where there are
    classes, and whatever else the data set tells.
    """
    model.eval()
    workers = channel.workers
    starts = range(0, data.test_size, data.test_batch_size)
    rounds = -(-len(starts) // workers.count)
    mine = [(i, start) for i, w in enumerate(workers.ids) for start in starts[w :: workers.count]]
    sums = torch.zeros(workers.local, rounds, data.sums, dtype=torch.float64)
    batches = data.test_batches([start for _, start in mine], device)
    for (i, start), (x, y) in zip(mine, batches, strict=True):
        turn = start // data.test_batch_size // workers.count
        sums[i, turn] = data.score(model(x), y, start).cpu()
    packed = sums.flatten(1).view(torch.uint8).to(device)
    everyone = channel.gather(packed).cpu().view(torch.float64).view(-1, rounds, data.sums)
    model.train()
    return data.results(everyone.transpose(0, 1).flatten(0, 1).cumsum(0)[-1].tolist())
