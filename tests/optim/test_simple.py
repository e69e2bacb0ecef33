"""The library equals its specification, dlion.methods.simple, to the bit, for every method."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlion.methods import METHODS, DistributedOptimizer, DLion, simple
from dlion.streams import stream, stream_seed
from dlion.wire import packing
from dlion.workers import Workers
from tests.support.methods import SMALL

SHAPES = [(7,), (33, 20), (), (128,), (130,)]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
D = sum(SIZES)
LR, WD, SEED, STEPS = 1e-2, 0.1, 5, 8
QUINTIC = 5, torch.float32, "quintic"
SPANS = [(sum(SIZES[:t]), sum(SIZES[: t + 1])) for t in range(len(SIZES))]

# names in dlion.methods.simple, and what they are in a class: hyperparameters, and vectors of state
VALUES = {"wd": "weight_decay", "mu": "momentum"}
VECTORS = {
    "m": ["momentum", "exp_avg"],
    "v": ["exp_avg_sq"],
    "r": ["residual"],
    "b": ["momentum_buffer"],
}

Step = Callable[[Tensor, Tensor, int], None]  # x [d] and g [n, d] at a step


class Spec:
    """The state of a specification, and the random draws of the optimizer that it is held to."""

    def __init__(self, optimizer: DistributedOptimizer, n: int):
        self.optimizer, self.n = optimizer, n
        self.exchange = optimizer.buckets[0].exchange
        self.momentum, self.variance, self.residual, self.estimate = torch.zeros(4, n, D)
        self.shared_momentum, self.shared_variance = torch.zeros(2, D)
        self.shared_error, self.total = torch.zeros(2, D)
        self.outcome = torch.ones(D)  # of the vote before
        self.level = torch.zeros(n, D, dtype=torch.int64)
        self.last, self.repeated = torch.zeros(2, n, D, dtype=torch.bool)
        self.agreement = torch.full((len(optimizer.buckets) * n, n), 0.75)
        self.queries: list[Tensor] = []
        self.local = torch.zeros(n, D)  # parameters of workers that move on their own
        self.named: dict[str, Tensor] = {}

    def compact(self, padded: Tensor) -> Tensor:
        """``[..., padded]`` in the layout of the bucket -> ``[..., d]``."""
        spans = self.optimizer.buckets[0].spans
        return torch.cat([padded[..., start:stop] for start, stop in spans], dim=-1)

    def argument(self, name: str) -> Any:
        """A hyperparameter or a vector of state, by its name in a function or in the class."""
        group, optimizer = self.optimizer.param_groups[0], self.optimizer
        if VALUES.get(name, name) in group:
            return group[VALUES.get(name, name)]
        for long in VECTORS.get(name, [name]):
            if long in (*optimizer.own_state, *optimizer.shared_state):
                shape = (self.n, D) if long in optimizer.own_state else (D,)
                return self.named.setdefault(long, torch.zeros(shape))
        return getattr(optimizer, name)

    def untie(self, balance: Tensor, step: int, ties: str) -> Tensor:
        words, seed = torch.empty(self.exchange.words, dtype=torch.int64), self.exchange.seed
        draws = [
            words.random_(-(2**63), None, generator=stream(seed, "ties", owner, step)).clone()
            for owner in range(self.n)
        ]
        heads = packing.unpack_bits(torch.cat(draws).view(torch.uint8), self.exchange.numel)
        coin = self.compact(heads) * 2.0 - 1
        return simple.untie(balance, step, ties, self.outcome, coin)

    def vote(self, step: int) -> Callable[[Tensor], Tensor]:
        """What becomes of signs, as the optimizer is set."""
        optimizer: Any = self.optimizer
        if optimizer.aggregation == "avg":
            return simple.average
        if optimizer.weighted:
            return lambda signs: self.weighted(signs, step)
        return lambda signs: self.untie(signs.sum(0), step, optimizer.ties)

    def weighted(self, signs: Tensor, step: int) -> Tensor:
        """Every owner weighs the votes on its slice of a bucket by what it has seen there."""
        slices = []
        for bucket in self.optimizer.buckets:
            places = torch.cat([torch.arange(*SPANS[int(slot.name)]) for slot in bucket.slots])
            at = torch.cat([torch.arange(*span) for span in bucket.spans])
            owners = at // bucket.exchange.slice
            slices += [places[owners == owner] for owner in range(self.n)]
        balance = torch.zeros(D)
        for mine, agreement in zip(slices, self.agreement, strict=True):
            balance[mine] = simple.weigh(signs[:, mine], agreement)
        outcome = self.untie(balance, step, "previous")
        for mine, agreement in zip(slices, self.agreement, strict=True):
            if len(mine):
                simple.learn(agreement, signs[:, mine], outcome[mine])
        return outcome

    def pieces(self) -> list[tuple[int, int]]:
        """``(start, stop)`` in d of each tensor's part in each owner's slice."""
        owners = self.compact(torch.arange(self.exchange.numel) // self.exchange.slice)
        cuts = owners.bincount(minlength=self.n).cumsum(0).tolist()
        edges = sorted({0, *cuts, *(stop for _, stop in SPANS)})
        return list(itertools.pairwise(edges))

    def coins(self, step: int) -> Tensor:
        size = (self.exchange.numel,)
        streams = (stream(SEED, "terngrad", worker, 0, step) for worker in range(self.n))
        return self.compact(torch.stack([torch.rand(size, generator=s) for s in streams]))


def by_name(function: Callable[..., None]):
    """Bind the arguments of a function by their names."""

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        given = {"x": x, "g": g, "step": t, "spans": SPANS}
        names = inspect.signature(function).parameters
        if "vote" in names:
            given["vote"] = s.vote(t)
        function(*(given[name] if name in given else s.argument(name) for name in names))

    return step


dlion, signum = by_name(simple.dlion), by_name(simple.signum)


def cub(p: int, scale: str, every: int = 0, spans: list = SPANS, headroom: bool = False):
    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        betas, vote = (0.9, 0.99), s.vote(t)
        if p == 1:
            simple.dlion(x, s.momentum, g, t, LR, betas, WD, vote)
        else:
            simple.lion_cub(x, s.momentum, g, LR, betas, WD, p, scale, headroom, SPANS, vote)
        if every and (t + 1) % every == 0:
            simple.synchronise(s.momentum, spans)

    return step


def terngrad(clip: float):
    settings = LR, 0.9, WD, clip, SPANS
    return lambda s, x, g, t: simple.terngrad(x, s.shared_momentum, g, s.coins(t), *settings)


def dgc(clip_norm: float, warmup: int):
    return lambda s, x, g, t: simple.dgc(
        x, s.momentum, s.residual, g, t, LR, 0.9, WD, 0.1, warmup, clip_norm, SPANS
    )


def ef_signsgd(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
    state = s.residual, s.shared_error, s.shared_momentum
    simple.ef_signsgd(x, *state, g, LR, 0.9, WD, s.pieces())


def ef21_sign(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
    state = s.momentum, s.estimate, s.total, s.outcome
    simple.ef21_sign(x, *state, g, LR, (0.9, 0.99), WD, s.pieces())


def tiles(side: int) -> list[Tensor]:
    """Places in d of equal tiles, cut as numpy's array_split does."""
    found = []
    for (start, stop), shape in zip(SPANS, SHAPES, strict=True):
        rows = torch.arange(start, stop).view(shape[0] if len(shape) == 2 else 1, -1)
        for band in rows.tensor_split(-(-len(rows) // side)):
            found += band.tensor_split(-(-band.shape[1] // side), dim=1)
    return found


def demo(side: int, k: int, bits: int):
    cut = tiles(side)
    return lambda s, x, g, t: simple.demo(x, s.momentum, g, LR, 0.9, WD, cut, k, bits)


def dlion_adm(rise: int, lookahead: float):
    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        coder = (s.estimate, s.level, s.last, s.repeated)
        settings = (LR, (0.8, 0.9), WD, rise, lookahead, SPANS)
        simple.dlion_adm(x, s.momentum, *coder, s.total, s.outcome, g, t, *settings)

    return step


def muon_adm(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
    """The second tensor is the one matrix."""
    others, matrices = [span for span in SPANS if span != SPANS[1]], [(*SPANS[1], 33)]
    coder = (s.estimate, s.level, s.last, s.repeated)
    settings = (LR, 0.95, (0.9, 0.99), WD, 3, 0.5, QUINTIC, matrices, others)
    simple.muon_adm(x, s.momentum, *coder, s.total, s.outcome, g, t, *settings)


def g_muon(adjust: str, newton_schulz=QUINTIC):
    """The second tensor is the one matrix."""
    scales = {
        "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    }
    others, matrices = [span for span in SPANS if span != SPANS[1]], [(*SPANS[1], 33)]
    fixed = (LR, 0.95, (0.9, 0.999), 1e-8, WD, newton_schulz, scales[adjust], matrices, others)
    return lambda s, x, g, t: simple.g_muon(x, s.shared_momentum, s.shared_variance, g, t, *fixed)


def sign_muon(rest: str, polar: bool, newton_schulz=QUINTIC, every: int = 0):
    """The second tensor is the one matrix."""
    others, matrices = [span for span in SPANS if span != SPANS[1]], [(*SPANS[1], 33)]
    fixed = (LR, 0.95, (0.9, 0.99), WD, rest, polar, newton_schulz, matrices, others)

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        simple.sign_muon(x, s.momentum, s.shared_variance, g, t, *fixed, s.vote(t))
        if every and (t + 1) % every == 0:
            simple.synchronise(s.momentum, SPANS)

    return step


def powersgd(rank: int):
    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        matrices = [(*SPANS[1], 33)] if rank * (33 + 20) < 33 * 20 else []
        if t == 0 and matrices:
            seed = stream_seed(SEED, "powersgd", 0)
            s.queries = [torch.randn(20, rank, generator=stream(seed, "query"))]
        state = s.residual, s.shared_momentum, s.queries
        simple.powersgd(x, *state, g, LR, 0.9, WD, matrices)

    return step


def dion(fraction: float, adjust: str):
    """The second tensor is the one matrix."""
    scales = {
        "original": lambda rows, columns: math.sqrt(rows / columns),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    }
    others, matrices = [span for span in SPANS if span != SPANS[1]], [(*SPANS[1], 33)]
    fixed = (LR, 0.95, (0.9, 0.95), 1e-8, WD, scales[adjust], matrices, others)

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        if t == 0:
            seed, rank = stream_seed(SEED, "dion", 0), math.ceil(20 * fraction)
            s.queries = [torch.randn(20, rank, generator=stream(seed, "query"))]
        state = s.shared_momentum, s.shared_variance, s.momentum, s.queries
        simple.dion(x, *state, g, t, *fixed)

    return step


def ef21_muon(density: float, bits: int):
    """The second tensor is the one matrix."""
    others, matrices = [span for span in SPANS if span != SPANS[1]], [(*SPANS[1], 33)]
    fixed = LR, 0.95, (0.9, 0.95), 1e-8, WD, density, bits, QUINTIC, matrices, others

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        state = s.shared_momentum, s.shared_variance, s.momentum, s.estimate, s.total
        simple.ef21_muon(x, *state, g, t, *fixed)

    return step


def diloco(inner: str = "adamw", wire: str = "float32"):
    rates = LR, (0.9, 0.99), WD
    means = {
        "float32": lambda s, v: simple.mean(v),
        "bf16": lambda s, v: simple.bfloat16(simple.mean(simple.bfloat16(v))),
        "int8": lambda s, v: simple.scaled_int8(
            simple.mean(simple.scaled_int8(v, s.pieces())), s.pieces()
        ),
        "sign": lambda s, v: simple.signs_both_ways(v, s.residual, s.shared_error, s.pieces()),
    }
    steps = {
        "adamw": lambda s, g, t: simple.adamw(
            s.local, s.momentum, s.variance, g, t, LR, (0.9, 0.99), 1e-8, WD
        ),
        "lion": lambda s, g, t: simple.lion(s.local, s.momentum, g, *rates),
        "muon": lambda s, g, t: simple.muon(
            s.local, s.momentum, s.variance, g, t, *rates, SPANS, SHAPES
        ),
        "sgd": lambda s, g, t: simple.descend(s.local, g, LR, WD),
    }

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        if t == 0:
            s.local = x.repeat(s.n, 1)
        steps[inner](s, g, t)
        simple.diloco(x, s.local, s.shared_momentum, t, 3, 0.7, 0.9, lambda v: means[wire](s, v))

    return step


def onebit_adam(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
    settings = (LR, (0.9, 0.999), 1e-8, WD, 3, s.pieces())
    state = s.shared_momentum, s.shared_variance, s.residual, s.shared_error
    simple.onebit_adam(x, *state, g, t, *settings)


def sparseloco(chunk: int, k: int, bits: int):
    pieces = [torch.arange(start, stop) for start, stop in SPANS]
    chunks = [part for piece in pieces for part in piece.tensor_split(-(-len(piece) // chunk))]

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        if t == 0:
            s.local = x.repeat(s.n, 1)
        simple.adamw(s.local, s.momentum, s.variance, g, t, LR, (0.9, 0.99), 1e-8, WD)
        simple.sparseloco(x, s.local, s.residual, t, 2, 0.7, 0.95, chunks, k, bits)

    return step


# how far apart they may be: sums of one tensor that the library adds in another order
NORM = 1e-6  # the norm over all tensors, gaps included

ROWS = {
    **{
        f"dlion_mavo {ties}": ({"ties": ties}, dlion, 0)
        for ties in ("zero", "plus", "alternate", "random", "previous")
    },
    "dlion_mavo weighted": ({"weighted": True}, dlion, 0),
    "dlion_avg": ({}, dlion, 0),
    "signum_mavo": ({"momentum": 0.9}, signum, 0),
    "signum_avg": ({"momentum": 0.9}, signum, 0),
    "terngrad": ({}, terngrad(2.5), 0),
    "terngrad unclipped": ({"clip": 0}, terngrad(0), 0),
    "dgc": ({"density": 0.1}, dgc(float("inf"), 0), 0),
    "dgc warmup": ({"density": 0.1, "warmup_steps": 6}, dgc(float("inf"), 6), 0),
    "dgc clip": ({"density": 0.1, "clip_norm": 5.0}, dgc(5.0, 0), NORM),
    "ef_signsgd": ({"momentum": 0.9}, ef_signsgd, 0),
    "dlion_adm": ({}, dlion_adm(3, 0.5), 0),
    "dlion_adm 2 0.3": ({"rise": 2, "lookahead": 0.3}, dlion_adm(2, 0.3), 0),
    "ef21_sign": ({}, ef21_sign, 0),
    **{
        f"demo {side} {k} {bits}": (
            {"momentum": 0.9, "chunk": side, "topk": k, "value_bits": bits},
            demo(side, k, bits),
            0,
        )
        for side, k, bits in ((64, 32, 32), (16, 9, 2))
    },
    **{
        f"lion_cub {p} {scale}": ({"bits": p, "scale": scale}, cub(p, scale), 0)
        for p in (2, 4, 8)
        for scale in ("l1", "max", "geometric")
    },
    **{
        f"lion_cub {p} headroom {scale}": (
            {"bits": p, "scale": scale, "headroom": True},
            cub(p, scale, headroom=True),
            0,
        )
        for p, scale in ((8, "l1"), (8, "max"))
    },
    "lion_cub 1": ({"bits": 1}, cub(1, "l1"), 0),
    "lion_cub previous": ({"ties": "previous"}, cub(4, "l1"), 0),
    "lion_cub sync": ({"momentum_sync": 3}, cub(4, "l1", 3), 0),
    "lion_cub sync some": (
        {"momentum_sync": 3, "sync_pattern": "^1$"},
        cub(4, "l1", 3, SPANS[1:2]),
        0,
    ),
    "muon_adm": ({}, muon_adm, 0),
    "g_muon": ({}, g_muon("match_rms_adamw"), 0),
    "g_muon original": (
        {"adjust_lr": "original", "ns_steps": 3, "ns_precision": "bf16"},
        g_muon("original", (3, torch.bfloat16, "quintic")),
        0,
    ),
    "g_muon polar_express": (
        {"ns_coefficients": "polar_express", "ns_steps": 9},
        g_muon("match_rms_adamw", (9, torch.float32, "polar_express")),
        0,
    ),
    "sign_muon_mavo": ({}, sign_muon("lion", False), 0),
    "sign_muon_mavo zero polar": (
        {"ties": "zero", "local_polar": True, "ns_steps": 3, "ns_precision": "bf16"},
        sign_muon("lion", True, (3, torch.bfloat16, "quintic")),
        0,
    ),
    "sign_muon_mavo weighted": ({"weighted": True}, sign_muon("lion", False), 0),
    "sign_muon_avg": ({}, sign_muon("lion", True), 0),
    "sign_muon_avg adamw": (
        {"rest": "adamw", "betas": (0.9, 0.99)},
        sign_muon("adamw", True),
        0,
    ),
    "sign_muon_avg no polar": (
        {"local_polar": False, "momentum_sync": 3},
        sign_muon("lion", False, every=3),
        0,
    ),
    "dion": ({}, dion(0.25, "match_rms_adamw"), 0),
    "dion original": (
        {"rank_fraction": 1 / 16, "adjust_lr": "original"},
        dion(1 / 16, "original"),
        0,
    ),
    "ef21_muon": ({}, ef21_muon(0.15, 16), 0),
    "ef21_muon 32": ({"density": 0.05, "value_bits": 32}, ef21_muon(0.05, 32), 0),
    **{f"powersgd {r}": ({"rank": r}, powersgd(r), 0) for r in (1, 2, 4, 13)},
    "onebit_adam": ({"warmup_steps": 3}, onebit_adam, 0),
    **{
        f"sparseloco {bits}": (
            {
                "betas": (0.9, 0.99),
                "local_steps": 2,
                "outer_lr": 0.7,
                "chunk": 100,
                "topk": 20,
                "value_bits": bits,
            },
            sparseloco(100, 20, bits),
            0,
        )
        for bits in (2, 16)
    },
    **{
        "muloco" if inner == "muon" else f"diloco {inner} {wire}": (
            {"inner": inner, "wire": wire, "betas": (0.9, 0.99), "local_steps": 3},
            diloco(inner, wire),
            0,
        )
        for inner, wire in (
            *((inner, "float32") for inner in ("adamw", "lion", "muon", "sgd")),
            *(("adamw", wire) for wire in ("bf16", "int8", "sign")),
        )
    },
}
# a method without a row is bound to its function by the names of the arguments
CASES = {
    name: (SMALL.get(name, {}), by_name(getattr(simple, name)), 0)
    for name in METHODS
    if not any(row.split()[0] == name for row in ROWS)
} | ROWS


def gradients(n: int, step: int) -> Tensor:
    """Random ones, some of which are exactly zero on all or on all but one worker."""
    rows = torch.randn(n, D, generator=torch.Generator().manual_seed(1000 * n + step))
    rows[:, :3] = 0
    rows[1:, 3:9] = 0
    return rows


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_library_is_its_specification(name, n):
    options, step, tolerance = CASES[name]
    method = METHODS[name.split()[0]]
    start = torch.randn(D, generator=torch.Generator().manual_seed(n))
    params = [
        torch.nn.Parameter(part.view(shape).clone())
        for part, shape in zip(start.split(SIZES), SHAPES, strict=True)
    ]
    named = [(str(t), param) for t, param in enumerate(params)]
    settings = {"lr": LR, "weight_decay": WD, "seed": SEED, **method.options, **options}
    optimizer = method.cls(named, workers=Workers(local=n), **settings)
    spec, x = Spec(optimizer, n), start.clone()
    for t in range(STEPS):
        rows = gradients(n, t)
        for worker in range(n):
            for param, part in zip(params, rows[worker].split(SIZES), strict=True):
                param.grad = part.view(param.shape).clone()
            optimizer.collect(worker)
        optimizer.step()
        optimizer.host(None)
        step(spec, x, rows, t)
        ours = torch.cat([param.detach().flatten() for param in params])
        if tolerance:
            torch.testing.assert_close(ours, x, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(ours, x), f"step {t}: {(ours - x).abs().max()}"


def test_the_streams_of_ties_are_named_after_the_bucket():
    optimizer = DLion([torch.nn.Parameter(torch.zeros(3))], seed=SEED)
    assert optimizer.buckets[0].exchange.seed == stream_seed(SEED, "exchange", 0)
