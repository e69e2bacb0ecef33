"""Rules: what a worker says. Pure functions on one worker's flat float32 vectors.

``spans`` are the ``(start, stop)`` of the parameters in the vector.
"""

import math

import torch
from torch import Tensor

Spans = list[tuple[int, int]]


def clip_by_deviation(grad: Tensor, spans: Spans, factor: float) -> tuple[Tensor, Tensor]:
    """TernGrad's clipping and scale: entries beyond ``factor`` standard deviations are cut.

    Returns the clipped gradient and ``max |g|`` of each parameter after clipping, ``[T]``.
    Source: Wen et al. 2017 (arXiv 1705.07878), sections 3.1 and 4; the deviation is the
    population's and a factor of 0 does not clip.
    """
    clipped = grad.clone()
    scales = []
    for start, stop in spans:
        part = clipped[start:stop]
        if factor and part.numel() > 1:
            bound = (factor * part.std(correction=0)).item()
            if math.isfinite(bound):
                part.clamp_(-bound, bound)
        scales.append(part.abs().max() if part.numel() else part.new_zeros(()))
    return clipped, torch.stack(scales)


def ternarise(grad: Tensor, scales: Tensor, generator: torch.Generator) -> Tensor:
    """TernGrad: ``sign(g)`` with probability ``|g| / s``, else 0, so that s times it is unbiased.

    ``scales`` holds s for every entry. NaN says 0; a scale of 0 says 0. Returns int8.
    """
    coins = torch.rand(grad.shape, generator=generator, device=grad.device)
    return (grad.sign() * (coins * scales < grad.abs())).nan_to_num_(0.0).to(torch.int8)


def largest_entries(values: Tensor, spans: Spans, density: float) -> Tensor:
    """Indices, ascending, of the ``ceil(density * size)`` largest magnitudes of each parameter.

    Exact, so that the size of a message is known; NaN counts as larger than everything (it is
    said, not hidden).
    """
    chosen = []
    for start, stop in spans:
        if stop > start:
            count = math.ceil(density * (stop - start))
            chosen.append(_largest(values[start:stop].abs(), count).add_(start))
    return torch.cat(chosen).sort().values


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The indices that ``topk`` gives, but it only has to look at the likely ones.

    A sample tells a size that about twice as many exceed as are asked for. Whatever it tells, the
    answer is exact; 3 times faster at a million entries and 4 %.
    """
    stride = sizes.numel() // 4096
    if stride > 8 and 4 * count < sizes.numel():
        likely = sizes[::stride].topk(2 * count // stride + 8).values[-1]
        candidates = (~(sizes < likely)).nonzero().squeeze(-1)  # NaN is one
        if candidates.numel() >= count:
            return candidates[sizes[candidates].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices
