"""Rules: messages of a worker. Pure functions on one worker's flat float32 vectors.

``spans`` are the ``(start, stop)`` of the parameters in the vector.
"""

import math

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange import Spans


def clip_by_deviation(grad: Tensor, spans: Spans, factor: float) -> tuple[Tensor, Tensor]:
    """TernGrad's clipping and scale: entries beyond ``factor`` standard deviations are cut.

    Returns the clipped gradient and ``max |g|`` of each parameter after clipping, ``[T]``; with
    NaN in a parameter, zeros and NaN for it.
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
        extremes = torch.stack(part.aminmax()) if part.numel() else part.new_zeros(1)
        scale = extremes.abs().max()
        part.masked_fill_(scale.isnan(), 0)
        scales.append(scale)
    return clipped, torch.stack(scales)


def largest_entries(values: Tensor, spans: Spans, density: float) -> Tensor:
    """Indices, ascending, of the ``ceil(density * size)`` largest magnitudes of each parameter.

    Exact, so that the size of a message is known; NaN counts as larger than everything (it is
    sent, not hidden), and of equal magnitudes the first are taken.
    """
    chosen = [
        kernels.largest(values[start:stop], math.ceil(density * (stop - start))).add_(start)
        for start, stop in spans
        if stop > start
    ]
    return torch.cat(chosen)
