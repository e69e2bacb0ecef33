"""The methods in a few lines each: the specification that they are tested against.

n workers' gradients ``g [n, d]`` go in, the parameters ``x [d]`` change in place, and so does the
state: ``m, r, u, v [n, d]``, a row for each worker, or ``[d]``, equal everywhere. All is float32.
``spans`` are the ``(start, stop)`` of the parameter tensors in d, steps count from 0. Here nothing
is packed and nothing travels; sources and settings are in the docstrings of the classes. The rivals
are in :mod:`dlion.rivals.simple`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]
Betas = tuple[float, float]


def mean(rows: Tensor | Sequence[Tensor]) -> Tensor:
    # added from worker 0 to n - 1, see dlion.exchange.sum_in_order
    return sum(rows) / len(rows)  # pyrefly: ignore[bad-return] - there are rows


def descend(x: Tensor, a: Tensor, lr: float, wd: float) -> None:
    x.mul_(1 - lr * wd).sub_(lr * a)  # the decay is decoupled in every method


# What the others are measured against: 32 bits both ways.


def g_adamw(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    eps: float,
    wd: float,
) -> None:
    adamw(x, m, v, mean(g), step, lr, betas, eps, wd)


def adamw(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    a: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    eps: float,
    wd: float,
) -> None:
    (b1, b2), t = betas, step + 1
    m.lerp_(a, 1 - b1)
    v.mul_(b2).addcmul_(a, a, value=1 - b2)
    root = (v.sqrt() / math.sqrt(1 - b2**t)).add_(eps)
    x.mul_(1 - lr * wd).addcdiv_(m, root, value=-lr / (1 - b1**t))


def g_lion(x: Tensor, m: Tensor, g: Tensor, lr: float, betas: Betas, wd: float) -> None:
    lion(x, m, mean(g), lr, betas, wd)


def lion(x: Tensor, m: Tensor, a: Tensor, lr: float, betas: Betas, wd: float) -> None:
    descend(x, lion_direction(m, a, betas).sign(), lr, wd)


# Votes: one bit up.


def lion_direction(m: Tensor, g: Tensor, betas: Betas) -> Tensor:
    b1, b2 = betas
    u = b1 * m + (1 - b1) * g
    m.copy_(b2 * m + (1 - b2) * g)
    return u


def one_bit(u: Tensor, step: int) -> Tensor:
    n = len(u)
    majority = (torch.arange(n) + step // 2) % n < n // 2 + 1
    zero = torch.where(majority == (step % 2 == 0), 1.0, -1.0)  # one bit has no zero
    return u.sign().where((u > 0) | (u < 0), zero.unsqueeze(1))


def untie(balance: Tensor, step: int, ties: str, previous: Tensor, coin: Tensor) -> Tensor:
    tied = {
        "zero": torch.zeros_like(balance),
        "plus": torch.ones_like(balance),
        "alternate": torch.full_like(balance, 1 if step % 2 == 0 else -1),
        "random": coin,
        "previous": previous,
    }[ties]
    return previous.copy_(torch.where(balance == 0, tied, balance.sign()))


def dlion(
    x: Tensor,
    m: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    wd: float,
    vote: Callable[[Tensor], Tensor],
) -> None:
    descend(x, vote(one_bit(lion_direction(m, g, betas), step)), lr, wd)


def signum(
    x: Tensor,
    m: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    wd: float,
    vote: Callable[[Tensor], Tensor],
) -> None:
    m.copy_(mu * m + (1 - mu) * g)
    descend(x, vote(one_bit(m, step)), lr, wd)


def average(signs: Tensor) -> Tensor:
    return (signs > 0).sum(0) * (2 / len(signs)) - 1  # the mean of signs, from the count of +1


def weigh(signs: Tensor, agreement: Tensor) -> Tensor:
    p = agreement.clamp(0.5, 0.999)  # [n], how often each worker was with the outcome
    rows = (weight * row for weight, row in zip((p / (1 - p)).log(), signs, strict=True))
    return sum(rows)  # pyrefly: ignore[bad-return] - there are rows


def learn(agreement: Tensor, signs: Tensor, outcome: Tensor) -> None:
    agreement.lerp_((signs == outcome).float().mean(1), 0.01)


# Lion Cub: p bits up.


def quantise(u: Tensor, p: int, scale: str, headroom: bool, spans: Spans) -> Tensor:
    q, s = torch.zeros_like(u), 2 ** (p - 1) - 1
    if headroom:  # the sum of all workers fits into p bits
        s //= len(u)
    for start, stop in spans:
        for i in range(len(u)):
            size = u[i, start:stop].abs()
            c = {
                "l1": size.mean(dtype=torch.float64).float(),
                "max": size.max(),
                "geometric": size[size != 0].double().log().mean().exp().float(),
            }[scale]
            q[i, start:stop] = u[i, start:stop] * ((s if scale == "max" else s / 2) / c)
    return q.nan_to_num(0.0, torch.inf, -torch.inf).clamp(-s, s).round()  # NaN abstains


def lion_cub(
    x: Tensor,
    m: Tensor,
    g: Tensor,
    lr: float,
    betas: Betas,
    wd: float,
    p: int,
    scale: str,
    headroom: bool,
    spans: Spans,
    vote: Callable[[Tensor], Tensor],
) -> None:
    q = quantise(lion_direction(m, g, betas), p, scale, headroom, spans)
    descend(x, vote(q), lr, wd)


def synchronise(m: Tensor, spans: Spans) -> None:
    for start, stop in spans:
        m[:, start:stop] = mean(m[:, start:stop])


# Scaled signs with a memory: one bit, and a scale for each piece, a tensor's part in one owner's
# slice. ``pieces`` are their ``(start, stop)`` in d.


def scaled_sign(v: Tensor, pieces: Spans) -> Tensor:
    q = torch.zeros_like(v)
    for start, stop in pieces:
        part = v[..., start:stop]
        s = part.abs().mean(-1, keepdim=True, dtype=torch.float64).float()
        q[..., start:stop] = torch.where(part >= 0, s, -s)  # one bit has no zero
    return q


def signs_both_ways(v: Tensor, r: Tensor, e: Tensor, pieces: Spans) -> Tensor:
    r += v
    sent = scaled_sign(r, pieces)
    r -= sent
    e += mean(sent)
    a = scaled_sign(e, pieces)
    e -= a
    return a


# Adaptive delta modulation: a bit says whether the direction lies above its estimate h. Levels are
# integers, eight an octave; ``last`` and ``repeated`` are booleans.


def step_size(level: Tensor) -> Tensor:
    return 2.0 ** (level // 8 - 32) * (1 + level % 8 / 8)


def first_level(u: Tensor, spans: Spans) -> Tensor:
    level = torch.zeros(u.shape, dtype=torch.int64)
    for start, stop in spans:
        mantissa, exponent = u[:, start:stop].abs().double().mean(1, keepdim=True).frexp()
        at_mean = 8 * (exponent + 31) + (16 * mantissa - 8).long()
        level[:, start:stop] = at_mean.clamp(0, 255).where(mantissa > 0, 64)
    return level


def delta_steps(
    u: Tensor, h: Tensor, level: Tensor, last: Tensor, repeated: Tensor, rise: int
) -> Tensor:
    bits = u >= h
    same = bits == last
    level += torch.where(same, torch.where(repeated, rise, 0), -1)
    level.clamp_(0, 255)
    last.copy_(bits)
    repeated.copy_(same)
    steps = step_size(level) * torch.where(bits, 1.0, -1.0)
    h += steps
    return steps


def dlion_adm(
    x: Tensor,
    m: Tensor,
    h: Tensor,
    level: Tensor,
    last: Tensor,
    repeated: Tensor,
    total: Tensor,
    previous: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    wd: float,
    rise: int,
    lookahead: float,
    spans: Spans,
) -> None:
    u = lion_direction(m, g, betas)
    if step == 0:
        level.copy_(first_level(u, spans))
    steps = delta_steps(u, h, level, last, repeated, rise)
    for row in steps:
        total += row  # the sum of h, an absent worker's included
    ahead = total + lookahead * sum(steps)
    previous.copy_(ahead.sign().where(ahead != 0, previous))
    descend(x, previous, lr, wd)


# Muon: matrices are ``(start, stop, rows)`` in d, AdamW's are the ``spans``.

Matrices = Sequence[tuple[int, int, int]]
NewtonSchulz = tuple[int, torch.dtype, str]  # iterations, precision, coefficients

POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),  # and for ever
]


def polynomial(iteration: int, coefficients: str) -> tuple[float, float, float]:
    if coefficients == "quintic":
        return 3.4445, -4.775, 2.0315
    p, q, r = POLAR_EXPRESS[min(iteration, 7)]
    return (p / 1.01, q / 1.01**3, r / 1.01**5) if iteration < 7 else (p, q, r)


def orthogonalise(a: Tensor, steps: int, dtype: torch.dtype, coefficients: str) -> Tensor:
    u = a.T if len(a) > len(a.T) else a
    u = u.to(dtype)
    u = u / (u.norm().clamp(min=1e-7) * (1.01 if coefficients == "polar_express" else 1))
    for i in range(steps):
        p, q, r = polynomial(i, coefficients)
        gram = u @ u.T
        u = torch.addmm(u, torch.addmm(gram, gram, gram, beta=q, alpha=r), u, beta=p)
    return u.T if len(a) > len(a.T) else u


def g_muon(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    betas: Betas,
    eps: float,
    wd: float,
    newton_schulz: NewtonSchulz,
    scale: Callable[[int, int], float],
    matrices: Matrices,
    spans: Spans,
) -> None:
    for start, stop in spans:
        part = slice(start, stop)
        g_adamw(x[part], m[part], v[part], g[:, part], step, lr, betas, eps, wd)
    for start, stop, rows in matrices:
        a = mean(g[:, start:stop])
        m[start:stop].lerp_(a, 1 - mu)
        u = orthogonalise(a.lerp(m[start:stop], mu).view(rows, -1), *newton_schulz)
        x[start:stop].mul_(1 - lr * wd).add_(u.flatten(), alpha=-lr * scale(*u.shape))


# SignMuon: the signs of each worker's orthogonalised momentum.


def sign_muon(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    betas: Betas,
    wd: float,
    rest: str,
    local_polar: bool,
    newton_schulz: NewtonSchulz,
    matrices: Matrices,
    spans: Spans,
    vote: Callable[[Tensor], Tensor],
) -> None:
    b1, b2 = betas
    u = torch.zeros_like(g)
    for start, stop in spans:
        part = slice(start, stop)
        equal = (b1, b1 if rest == "adamw" else b2)
        u[:, part] = lion_direction(m[:, part], g[:, part], equal)
    for start, stop, rows in matrices:
        m[:, start:stop].lerp_(g[:, start:stop], 1 - mu)
        for i, a in enumerate(g[:, start:stop].lerp(m[:, start:stop], mu)):
            u[i, start:stop] = orthogonalise(a.view(rows, -1), *newton_schulz).flatten()
    answer = vote(one_bit(u, step))
    for start, stop in spans:
        part = slice(start, stop)
        if rest == "lion":
            descend(x[part], answer[part], 0.1 * lr, wd / 0.1)
        else:
            v[part].mul_(b2).addcmul_(answer[part], answer[part], value=1 - b2)
            root = (v[part].sqrt() / math.sqrt(1 - b2 ** (step + 1))).add_(1e-8)
            x[part].mul_(1 - lr * wd).addcdiv_(answer[part], root, value=-lr)
    for start, stop, rows in matrices:
        d = answer[start:stop]
        if not local_polar:
            descend(x[start:stop], d, 0.2 * lr, wd / 0.2)
            continue
        o = orthogonalise(d.view(rows, -1), *newton_schulz)
        scale = 0.2 * math.sqrt(max(o.shape))
        x[start:stop].mul_(1 - lr * wd).add_(o.flatten(), alpha=-lr * scale)


# Local updates: workers move on their own, ``y [n, d]``, and exchange after every H steps.


def muon(
    y: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    wd: float,
    spans: Spans,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    for (start, stop), shape in zip(spans, shapes, strict=True):
        for i in range(len(y)):
            yi, mi, vi, gi = (rows[i, start:stop] for rows in (y, m, v, g))
            if len(shape) < 2:
                adamw(yi, mi, vi, gi, step, lr, betas, 1e-8, wd)
                continue
            mi.lerp_(gi, 1 - betas[0])
            matrix = gi.lerp(mi, betas[0]).view(shape).flatten(1)
            update = orthogonalise(matrix, 5, torch.float32, "quintic") * (
                0.2 * math.sqrt(max(matrix.shape))
            )
            descend(yi, update.flatten(), lr, wd)


def bfloat16(v: Tensor) -> Tensor:
    return v.bfloat16().float()


def scaled_int8(v: Tensor, pieces: Spans) -> Tensor:
    q = torch.zeros_like(v)
    for start, stop in pieces:
        part = v[..., start:stop]
        s = part.abs().amax(-1, keepdim=True) / 127
        q[..., start:stop] = (part / s).where(s > 0, 0).round() * s
    return q


def diloco(
    x: Tensor,
    y: Tensor,
    b: Tensor,
    step: int,
    h: int,
    lr: float,
    mu: float,
    combine: Callable[[Tensor], Tensor],
) -> None:
    if (step + 1) % h == 0:  # after a step of the inner optimizer on y and g
        a = combine(x - y)  # the mean, as it is rounded on both ways
        b.mul_(mu).add_(a)
        x.sub_(lr * (a + mu * b))
        y.copy_(x.expand_as(y))
