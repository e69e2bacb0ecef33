"""Loss and accuracy on the test set, the same to the bit however workers are spread."""

import torch
from torch import nn
from torch.nn import functional as F

from dlion.data import ImageData, TextData
from dlion.exchange import Channel

BATCH = {"image": 250, "text": 32}  # samples; fixed, as it may touch the last bit of a result


@torch.no_grad()
def evaluate(
    model: nn.Module, data: ImageData | TextData, channel: Channel, device: str
) -> dict[str, float]:
    """Test batches are dealt out to the workers; their sums are added in the order of batches.

    Returns ``test_loss`` (nats per label or token) and, for images, ``test_accuracy`` (0 to 1).
    """
    model.eval()
    workers, size = channel.workers, BATCH[data.kind]
    starts = range(0, data.test_size, size)
    rounds = -(-len(starts) // workers.count)
    sums = torch.zeros(workers.local, rounds, 3, dtype=torch.float64)
    for i, worker in enumerate(workers.ids):
        for j, start in enumerate(starts[worker :: workers.count]):
            x, y = data.test_batch(start, start + size, device)
            logits, labels = model(x).flatten(0, -2).float(), y.flatten()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            correct = (logits.argmax(-1) == labels).sum()
            sums[i, j] = torch.tensor([loss.item(), correct.item(), labels.numel()])
    packed = sums.flatten(1).view(torch.uint8).to(device)
    everyone = channel.gather(packed).cpu().view(torch.float64).view(-1, rounds, 3)
    loss, correct, count = everyone.transpose(0, 1).flatten(0, 1).cumsum(0)[-1].tolist()
    model.train()
    result = {"test_loss": loss / count}
    if data.kind == "image":
        result["test_accuracy"] = correct / count
    return result
