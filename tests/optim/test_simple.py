"""The methods equal their specification, dlion.methods.simple, to the bit."""

import math

import pytest
import torch
from torch import Tensor

from dlion.methods import DLion, simple
from dlion.streams import stream_seed
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
    by_name,
    cases,
)

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


def dlion_adm(rise: int, lookahead: float):
    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        coder = (s.estimate, s.level, s.last, s.repeated)
        settings = (LR, (0.8, 0.9), WD, rise, lookahead, SPANS)
        simple.dlion_adm(x, s.momentum, *coder, s.total, s.outcome, g, t, *settings)

    return step


def g_muon(adjust: str, newton_schulz=QUINTIC):
    scales = {
        "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    }
    fixed = (LR, 0.95, (0.9, 0.999), 1e-8, WD, newton_schulz, scales[adjust], MATRICES, OTHERS)
    return lambda s, x, g, t: simple.g_muon(x, s.shared_momentum, s.shared_variance, g, t, *fixed)


def sign_muon(rest: str, polar: bool, newton_schulz=QUINTIC, every: int = 0):
    fixed = (LR, 0.95, (0.9, 0.99), WD, rest, polar, newton_schulz, MATRICES, OTHERS)

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        simple.sign_muon(x, s.momentum, s.shared_variance, g, t, *fixed, s.vote(t))
        if every and (t + 1) % every == 0:
            simple.synchronise(s.momentum, SPANS)

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


ROWS = {
    **{
        f"dlion_mavo {ties}": ({"ties": ties}, dlion, 0)
        for ties in ("zero", "plus", "alternate", "random", "previous")
    },
    "dlion_mavo weighted": ({"weighted": True}, dlion, 0),
    "dlion_avg": ({}, dlion, 0),
    "signum_mavo": ({"momentum": 0.9}, signum, 0),
    "signum_avg": ({"momentum": 0.9}, signum, 0),
    "dlion_adm": ({}, dlion_adm(3, 0.5), 0),
    "dlion_adm 2 0.3": ({"rise": 2, "lookahead": 0.3}, dlion_adm(2, 0.3), 0),
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
CASES = cases(simple, ROWS)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_library_is_its_specification(name, n):
    assert_is_specification(name, CASES[name], n)


def test_the_streams_of_ties_are_named_after_the_bucket():
    optimizer = DLion([torch.nn.Parameter(torch.zeros(3))], seed=SEED)
    assert optimizer.buckets[0].exchange.seed == stream_seed(SEED, "exchange", 0)
