"""The rivals in a few lines each: the specification that they are tested against.

Shapes and names are those of :mod:`dlion.methods.simple`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlion.methods.simple import (
    Betas,
    Matrices,
    NewtonSchulz,
    Spans,
    delta_steps,
    descend,
    dlion_adm,
    first_level,
    g_adamw,
    lion_direction,
    mean,
    orthogonalise,
    scaled_sign,
    signs_both_ways,
)


def sgd(x: Tensor, b: Tensor, a: Tensor, lr: float, mu: float, wd: float) -> None:
    b.mul_(mu).add_(a)
    descend(x, b, lr, wd)


# Stochastic ternary gradients.


def terngrad(
    x: Tensor,
    b: Tensor,
    g: Tensor,
    coins: Tensor,
    lr: float,
    mu: float,
    wd: float,
    clip: float,
    spans: Spans,
) -> None:
    g, s = g.clone(), torch.zeros_like(x)
    for start, stop in spans:
        part = g[:, start:stop]
        if clip and stop - start > 1:
            bound = clip * part.std(1, correction=0, keepdim=True)
            part.copy_(part.clamp(-bound, bound))
        s[start:stop] = part.abs().max()  # of all workers
    trits = g.sign() * (coins * s < g.abs())  # coins: uniform in [0, 1), [n, d]
    sgd(x, b, mean(trits) * s, lr, mu, wd)


# The largest entries only.


def take_largest(values: Tensor, density: float, spans: Spans) -> Tensor:
    taken = torch.zeros_like(values)
    for start, stop in spans:
        count = math.ceil(density * (stop - start))
        for i in range(len(values)):
            order = values[i, start:stop].abs().sort(descending=True, stable=True).indices
            top = start + order[:count]  # of equal ones the first
            taken[i, top] = values[i, top]
    return taken


def graddrop(
    x: Tensor,
    r: Tensor,
    b: Tensor,
    g: Tensor,
    lr: float,
    mu: float,
    wd: float,
    density: float,
    spans: Spans,
) -> None:
    r += g
    sent = take_largest(r, density, spans)
    r[sent != 0] = 0
    sgd(x, b, mean(sent), lr, mu, wd)


def dgc(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    wd: float,
    density: float,
    warmup: int,
    clip_norm: float,
    spans: Spans,
) -> None:
    limit = clip_norm / math.sqrt(len(g)) / g.norm(dim=1, keepdim=True)
    u.mul_(mu).add_(g * limit.clamp(max=1))
    v += u
    if step < warmup:
        density = density ** ((step + 1) / (warmup + 1))
    sent = take_largest(v, density, spans)
    u[sent != 0] = v[sent != 0] = 0
    descend(x, mean(sent), lr, wd)


# Scaled signs with a memory.


def ef_signsgd(
    x: Tensor,
    r: Tensor,
    e: Tensor,
    b: Tensor,
    g: Tensor,
    lr: float,
    mu: float,
    wd: float,
    pieces: Spans,
) -> None:
    sgd(x, b, signs_both_ways(g, r, e, pieces), lr, mu, wd)


def ef21_sign(
    x: Tensor,
    m: Tensor,
    h: Tensor,
    total: Tensor,
    previous: Tensor,
    g: Tensor,
    lr: float,
    betas: Betas,
    wd: float,
    pieces: Spans,
) -> None:
    q = scaled_sign(lion_direction(m, g, betas) - h, pieces)
    h += q
    for row in q:
        total += row  # the sum of h, an absent worker's included
    previous.copy_(total.sign().where(total != 0, -previous))
    descend(x, previous, lr, wd)


# Muon by delta modulation: the owner of a matrix orthogonalises the sum of the estimates.


def muon_adm(
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
    mu: float,
    betas: Betas,
    wd: float,
    rise: int,
    lookahead: float,
    newton_schulz: NewtonSchulz,
    matrices: Matrices,
    spans: Spans,
) -> None:
    for start, stop in spans:
        part = slice(start, stop)
        coder = (h[:, part], level[:, part], last[:, part], repeated[:, part])
        rates, state = (0.1 * lr, betas, wd / 0.1), (total[part], previous[part])
        own = [(0, stop - start)]
        dlion_adm(
            x[part], m[:, part], *coder, *state, g[:, part], step, *rates, rise, lookahead, own
        )
    for start, stop, rows in matrices:
        part = slice(start, stop)
        m[:, part].lerp_(g[:, part], 1 - mu)
        u = g[:, part].lerp(m[:, part], mu)
        if step == 0:
            level[:, part] = first_level(u, [(0, stop - start)])
        steps = delta_steps(u, h[:, part], level[:, part], last[:, part], repeated[:, part], rise)
        before = total[part].clone()
        for row in steps:
            total[part] += row
        ahead = total[part] + lookahead * (total[part] - before)
        o = orthogonalise(ahead.view(rows, -1), *newton_schulz).flatten()
        previous[part] = o.sign().where(o != 0, previous[part])
        descend(x[part], previous[part], 0.2 * lr, wd / 0.2)


# PowerSGD: a step of power iteration on each matrix; its Q, ``[columns, rank]``, is the next one's.


def powersgd(
    x: Tensor,
    r: Tensor,
    b: Tensor,
    q: list[Tensor],
    g: Tensor,
    lr: float,
    mu: float,
    wd: float,
    matrices: Matrices,
) -> None:
    r += g
    a = mean(r)
    left = torch.zeros_like(r)
    for i, (start, stop, rows) in enumerate(matrices):
        ms = [row[start:stop].clone().view(rows, -1) for row in r]
        p = torch.linalg.qr(mean([matrix @ q[i] for matrix in ms])).Q
        qs = [matrix.T @ p for matrix in ms]
        q[i] = mean(qs)
        a[start:stop] = (p @ q[i].T).flatten()
        left[:, start:stop] = torch.stack(
            [(matrix - p @ own.T).flatten() for matrix, own in zip(ms, qs, strict=True)]
        )
    r.copy_(left)
    sgd(x, b, a, lr, mu, wd)


# Dion: the same step of power iteration on momenta, of which P^ and a Q of norm 1 are the step.


def dion(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    e: Tensor,
    q: list[Tensor],
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    betas: Betas,
    eps: float,
    wd: float,
    scale: Callable[[int, int], float],
    matrices: Matrices,
    spans: Spans,
) -> None:
    for start, stop in spans:
        part = slice(start, stop)
        g_adamw(x[part], m[part], v[part], g[:, part], step, lr, betas, eps, wd)
    for i, (start, stop, rows) in enumerate(matrices):
        e[:, start:stop] += g[:, start:stop]
        ms = [row[start:stop].clone().view(rows, -1) for row in e]
        p = torch.linalg.qr(mean([matrix @ q[i] for matrix in ms])).Q
        r = mean([matrix.T @ p for matrix in ms])
        e[:, start:stop].sub_((p @ r.T).flatten(), alpha=1 - mu)
        q[i] = r / (r.norm(dim=0) + 1e-8)
        s = scale(rows, (stop - start) // rows)
        x[start:stop].mul_(1 - lr * wd).add_((p @ q[i].T).flatten(), alpha=-lr * s)


# EF21-Muon: estimates h of the momenta move by their largest differences, c is their mean.


def ef21_muon(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    e: Tensor,
    h: Tensor,
    c: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    mu: float,
    betas: Betas,
    eps: float,
    wd: float,
    density: float,
    bits: int,
    newton_schulz: NewtonSchulz,
    matrices: Matrices,
    spans: Spans,
) -> None:
    for start, stop in spans:
        part = slice(start, stop)
        g_adamw(x[part], m[part], v[part], g[:, part], step, lr, betas, eps, wd)
    for start, stop, rows in matrices:
        e[:, start:stop].lerp_(g[:, start:stop], 1 - mu)
        k, chunk = math.ceil(density * (stop - start)), torch.arange(stop - start)
        sent = take_topk(e[:, start:stop] - h[:, start:stop], [chunk], k, bits)
        h[:, start:stop] += sent
        c[start:stop] += mean(sent)
        o = orthogonalise(c[start:stop].view(rows, -1), *newton_schulz)
        scale = 0.2 * math.sqrt(max(o.shape))
        x[start:stop].mul_(1 - lr * wd).add_(o.flatten(), alpha=-lr * scale)


# 1-bit Adam: the momentum in scaled signs, once the variance v stays as it is.


def onebit_adam(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    r: Tensor,
    e: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    betas: Betas,
    eps: float,
    wd: float,
    warmup: int,
    pieces: Spans,
) -> None:
    b1, b2 = betas
    if step < warmup:
        a = mean(g)
        m.lerp_(a, 1 - b1)
        v.mul_(b2).addcmul_(a, a, value=1 - b2)
    else:
        a = signs_both_ways(b1 * m + (1 - b1) * g, r, e, pieces)
        m.copy_(a * (v > 0))
    x.mul_(1 - lr * wd).addcdiv_(m, v.sqrt() + eps, value=-lr)


# The largest entries of each chunk, from everyone to everyone. ``tiles`` are the places in d of the
# tiles of the matrices, ``[h, w]`` each; a momentum m is kept as coefficients of their transform.


def cosines(size: int) -> Tensor:
    k, i = torch.arange(size, dtype=torch.float64).view(-1, 1), torch.arange(size)
    basis = (math.pi / size * k * (i + 0.5)).cos() * (2 / size) ** 0.5
    basis[0] /= 2**0.5
    return basis  # orthonormal: its transpose is its inverse


def transform(v: Tensor, tiles: Sequence[Tensor], back: bool = False) -> Tensor:
    out = torch.zeros_like(v)
    for tile in tiles:
        rows, columns = (cosines(size) for size in tile.shape)
        rows, columns = (rows.T, columns.T) if back else (rows, columns)
        found = rows @ v[..., tile].double() @ columns.T
        noise = 1e-9 * found.abs().amax((-2, -1), keepdim=True)  # what cancels is 0
        out[..., tile] = found.where(found.abs() >= noise, 0).float()
    return out


def rounded(v: Tensor, bits: int) -> Tensor:
    if bits != 2:
        return v.bfloat16().float() if bits == 16 else v
    sizes, levels = v.abs().double(), torch.zeros_like(v)
    large = sizes > sizes.mean()
    for part in (large, ~large):
        levels[part] = sizes[part].mean().bfloat16().float()
    return levels * torch.where(v < 0, -1, 1)


def take_topk(v: Tensor, chunks: Sequence[Tensor], k: int, bits: int) -> Tensor:
    """Take out and return the k largest entries of each chunk, as rounded as they travel.

    Of equal ones the first are taken.
    """
    sent = torch.zeros_like(v)
    for chunk in chunks:
        for row, taken in zip(v, sent, strict=True):
            sizes = row[chunk].abs()
            top = chunk[sizes.sort(descending=True, stable=True).indices[:k]]
            taken[top] = rounded(row[top], bits)
    v -= sent
    return sent


def demo(
    x: Tensor,
    m: Tensor,
    g: Tensor,
    lr: float,
    beta: float,
    wd: float,
    tiles: Sequence[Tensor],
    k: int,
    bits: int,
) -> None:
    m.mul_(beta).add_(transform(g, tiles))
    sent = take_topk(m, [tile.flatten() for tile in tiles], k, bits)
    descend(x, transform(mean(sent), tiles, back=True).sign(), lr, wd)


# SparseLoCo: workers move on their own, ``y [n, d]``, and exchange after every H steps.


def sparseloco(
    x: Tensor,
    y: Tensor,
    e: Tensor,
    step: int,
    h: int,
    lr: float,
    decay: float,
    chunks: Sequence[Tensor],
    k: int,
    bits: int,
) -> None:
    if (step + 1) % h == 0:
        e.mul_(decay).add_(x - y)
        descend(x, mean(take_topk(e, chunks, k, bits)), lr, 0)
        y.copy_(x.expand_as(y))
