"""Rules: what a worker sends. Pure functions on one worker's flat float32 vectors.

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
            bound = factor * part.std(correction=0)
            bound = bound.where(bound.isfinite(), torch.inf)
            torch.clamp(part, -bound, bound, out=part)
        scales.append(part.abs().max() if part.numel() else part.new_zeros(()))
    return clipped, torch.stack(scales)


def largest_entries(values: Tensor, spans: Spans, density: float) -> Tensor:
    """Indices, ascending, of the ``ceil(density * size)`` largest magnitudes of each parameter.

    Exact, so that the size of a message is known; NaN counts as larger than everything (it is
    sent, not hidden).
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
