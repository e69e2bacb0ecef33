"""The rivals equal their specification, dlion.rivals.simple, to the bit."""

import math

import pytest
import torch
from torch import Tensor

from dlion.methods.simple import adamw
from dlion.rivals import simple
from dlion.streams import stream, stream_seed
from tests.support.specification import (
    LR,
    MATRICES,
    OTHERS,
    QUINTIC,
    SEED,
    SHAPES,
    SPANS,
    WD,
    Spec,
    assert_is_specification,
    cases,
)


def coins(s: Spec, step: int) -> Tensor:
    size = (s.exchange.numel,)
    streams = (stream(SEED, "terngrad", worker, 0, step) for worker in range(s.n))
    return s.compact(torch.stack([torch.rand(size, generator=each) for each in streams]))


def terngrad(clip: float):
    settings = LR, 0.9, WD, clip, SPANS
    return lambda s, x, g, t: simple.terngrad(x, s.shared_momentum, g, coins(s, t), *settings)


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


def muon_adm(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
    coder = (s.estimate, s.level, s.last, s.repeated)
    settings = (LR, 0.95, (0.9, 0.99), WD, 3, 0.5, QUINTIC, MATRICES, OTHERS)
    simple.muon_adm(x, s.momentum, *coder, s.total, s.outcome, g, t, *settings)


def powersgd(rank: int):
    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        matrices = MATRICES if rank * (33 + 20) < 33 * 20 else []
        if t == 0 and matrices:
            seed = stream_seed(SEED, "powersgd", 0)
            s.queries = [torch.randn(20, rank, generator=stream(seed, "query"))]
        state = s.residual, s.shared_momentum, s.queries
        simple.powersgd(x, *state, g, LR, 0.9, WD, matrices)

    return step


def dion(fraction: float, adjust: str):
    scales = {
        "original": lambda rows, columns: math.sqrt(rows / columns),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    }
    fixed = (LR, 0.95, (0.9, 0.95), 1e-8, WD, scales[adjust], MATRICES, OTHERS)

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        if t == 0:
            seed, rank = stream_seed(SEED, "dion", 0), math.ceil(20 * fraction)
            s.queries = [torch.randn(20, rank, generator=stream(seed, "query"))]
        state = s.shared_momentum, s.shared_variance, s.momentum, s.queries
        simple.dion(x, *state, g, t, *fixed)

    return step


def ef21_muon(density: float, bits: int):
    fixed = LR, 0.95, (0.9, 0.95), 1e-8, WD, density, bits, QUINTIC, MATRICES, OTHERS

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        state = s.shared_momentum, s.shared_variance, s.momentum, s.estimate, s.total
        simple.ef21_muon(x, *state, g, t, *fixed)

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
        adamw(s.local, s.momentum, s.variance, g, t, LR, (0.9, 0.99), 1e-8, WD)
        simple.sparseloco(x, s.local, s.residual, t, 2, 0.7, 0.95, chunks, k, bits)

    return step


# how far apart they may be: sums of one tensor that the library adds in another order
NORM = 1e-6  # the norm over all tensors, gaps included

ROWS = {
    "terngrad": ({}, terngrad(2.5), 0),
    "terngrad unclipped": ({"clip": 0}, terngrad(0), 0),
    "dgc": ({"density": 0.1}, dgc(float("inf"), 0), 0),
    "dgc warmup": ({"density": 0.1, "warmup_steps": 6}, dgc(float("inf"), 6), 0),
    "dgc clip": ({"density": 0.1, "clip_norm": 5.0}, dgc(5.0, 0), NORM),
    "ef_signsgd": ({"momentum": 0.9}, ef_signsgd, 0),
    "ef21_sign": ({}, ef21_sign, 0),
    **{
        f"demo {side} {k} {bits}": (
            {"momentum": 0.9, "chunk": side, "topk": k, "value_bits": bits},
            demo(side, k, bits),
            0,
        )
        for side, k, bits in ((64, 32, 32), (16, 9, 2))
    },
    "muon_adm": ({}, muon_adm, 0),
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
}
CASES = cases(simple, ROWS)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_library_is_its_specification(name, n):
    assert_is_specification(name, CASES[name], n)
