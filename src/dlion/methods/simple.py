"""Every method in a few lines: the specification that the optimizers are tested against.

n workers' gradients ``g [n, d]`` go in, the parameters ``x [d]`` change in place, and so does the
state: ``m, r, u, v [n, d]``, a row for each worker, or ``[d]``, equal everywhere. All is float32.
``spans`` are the ``(start, stop)`` of the parameter tensors in d, steps count from 0. Here nothing
is packed and nothing travels; sources and settings are in the docstrings of the classes.
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


def sgd(x: Tensor, b: Tensor, a: Tensor, lr: float, mu: float, wd: float) -> None:
    b.mul_(mu).add_(a)
    descend(x, b, lr, wd)


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


# Scaled signs with a memory: one bit, and a scale for each piece, a tensor's part in one owner's
# slice. ``pieces`` are their ``(start, stop)`` in d.


def scaled_sign(v: Tensor, pieces: Spans) -> Tensor:
    q = torch.zeros_like(v)
    for start, stop in pieces:
        part = v[..., start:stop]
        s = part.abs().mean(-1, keepdim=True, dtype=torch.float64).float()
        q[..., start:stop] = torch.where(part >= 0, s, -s)  # one bit has no zero
    return q


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


def signs_both_ways(v: Tensor, r: Tensor, e: Tensor, pieces: Spans) -> Tensor:
    r += v
    sent = scaled_sign(r, pieces)
    r -= sent
    e += mean(sent)
    a = scaled_sign(e, pieces)
    e -= a
    return a


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
    newton_schulz: "NewtonSchulz",
    matrices: "Matrices",
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
    newton_schulz: "NewtonSchulz",
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
    newton_schulz: "NewtonSchulz",
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
    newton_schulz: "NewtonSchulz",
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
