"""How far Lion's theory is along: the box it draws parameters into, and what it solves inside.

Lion with weight decay w solves min f(x) subject to ``|x| <= 1 / w`` (Chen et al. 2024, arXiv
2310.05898; for n workers arXiv 2404.00438, section 3): first (phase I) the distance to the box
shrinks by ``1 - lr w`` a step, then (phase II) the KKT score, which is zero at a solution, falls.
"""

import torch
from torch import nn

from dlion.data import Data
from dlion.streams import stream_seed

_SAMPLES = 1000  # of the training set, always the same


def box_state(
    model: nn.Module, data: Data, weight_decay: float, device: str, seed: int
) -> dict[str, float]:
    """Where the parameters x are.

    Returns:
        ``outside_box``: share of them outside the box. ``box_distance``: of the farthest to it.
        ``kkt_score``: the sum over parameters of ``g (sign g + w x)``, g being the gradient of the
        loss on 1,000 training samples; not negative inside the box.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    edge = 1 / weight_decay
    indices = torch.arange(min(_SAMPLES, data.train_size))
    total = [torch.zeros_like(p) for p in params]
    model.eval()
    chunks = indices.split(data.test_batch_size)
    requests = [(chunk, stream_seed(seed, "box", i)) for i, chunk in enumerate(chunks)]
    for chunk, (x, y) in zip(chunks, data.batches(requests, device), strict=True):
        loss = data.loss(model(x), y) * (len(chunk) / len(indices))
        for sum_, gradient in zip(total, torch.autograd.grad(loss, params), strict=True):
            sum_ += gradient
    model.train()
    with torch.no_grad():
        outside = sum((p.abs() > edge).sum() for p in params)
        distance = max((p.abs().max() - edge).clamp(min=0).item() for p in params)
        score = sum(
            (g.double() * (g.sign() + weight_decay * p).double()).sum()
            for g, p in zip(total, params, strict=True)
        )
    return {
        "outside_box": float(outside) / sum(p.numel() for p in params),
        "box_distance": distance,
        "kkt_score": float(score),
    }
