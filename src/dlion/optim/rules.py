"""Rules: what a worker says. Pure functions on one worker's flat float32 vectors.

``spans`` are the ``(start, stop)`` of the parameters in the vector.
"""

import math

import torch
from torch import Tensor

Spans = list[tuple[int, int]]


def lion_direction(momentum: Tensor, grad: Tensor, beta1: float, beta2: float) -> Tensor:
    """Lion before the sign: ``u = b1 m + (1 - b1) g``, then ``m <- b2 m + (1 - b2) g`` in place.

    Source: Chen et al. 2023 (arXiv 2302.06675), Algorithm 2; u uses the old momentum.
    """
    direction = momentum.mul(beta1).add_(grad, alpha=1 - beta1)
    momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
    return direction


def one_bit_sign(values: Tensor, step: int) -> Tensor:
    """Signs as booleans. One bit has no zero, so 0, -0.0 and NaN say + on even steps, - on odd.

    Alternating keeps a parameter that never has a gradient where it is, which a fixed choice would
    let drift by lr a step; it costs no randomness and no pass over memory.
    """
    return ~(values < 0) if step % 2 == 0 else values > 0


def quantise(values: Tensor, spans: Spans, largest: int, scale: str) -> Tensor:
    """Lion Cub's quantisation: integers in ``-largest .. largest``, zeros abstain from the vote.

    ``q = clip(round(u / c * largest / 2), -largest, largest)`` with c, for each parameter tensor,
    the mean of ``|u|`` (``l1``), its maximum (``max``) or its geometric mean over the entries that
    are not zero (``geometric``). A mean-sized entry lands at half of the scale and whatever is
    twice as large saturates; with ``max`` the factor is ``largest``, so that the scale is used up.
    (The authors' code keeps largest / 2 there, which wastes one bit.) Nothing is sent but q.

    NaN says 0, and so does all of a tensor whose scale is not finite.
    """
    result = torch.empty_like(values)
    factor = largest if scale == "max" else largest / 2
    for start, stop in spans:
        part = values[start:stop]
        size = part.abs()
        if size.numel() == 0:
            continue
        if scale == "l1":
            unit = size.mean()
        elif scale == "max":
            unit = size.max()
        else:
            unit = (size.log().where(size > 0, 0.0).sum() / (size > 0).sum().clamp(min=1)).exp()
        torch.mul(
            part, factor / unit.clamp(min=torch.finfo(unit.dtype).tiny), out=result[start:stop]
        )
    result[spans[-1][1] :] = 0
    return result.round_().clamp_(-largest, largest).nan_to_num_(0.0)


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
            top = values[start:stop].abs().topk(count, sorted=False).indices
            chosen.append(top.add_(start))
    return torch.cat(chosen).sort().values
