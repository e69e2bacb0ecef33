"""Wrong arguments of optimizers are named, with what is allowed."""

import pytest

from dlion.optim import (
    DGC,
    METHODS,
    DeMo,
    DiLoCo,
    DLion,
    DLionADM,
    EFSignSGD,
    GMuon,
    LionCub,
    OneBitAdam,
    PowerSGD,
    SignMuon,
    SparseLoCo,
    TernGrad,
)
from dlion.workers import Workers
from tests.support.small_model import net


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: DLion(p, ties="maybe"), "ties=maybe is unknown"),
        (lambda p: DLion(p, aggregation="sum"), "choose mavo or avg"),
        (
            lambda p: DLion(p, exchange="ring"),
            "exchange=ring is not possible: give direct, grid, auto or the sizes of a grid",
        ),
        (lambda p: DLion(p, weighted=True, exchange="grid"), "owners see sums, not single votes"),
        (lambda p: DLion(p, lr=-1.0), "lr=-1.0 is not possible: give a number, at least 0"),
        (lambda p: DLion(p, lr=None), "lr=None is not possible: give a number"),
        (lambda p: DLion(p, betas=(1.0, 0.9)), "betas="),
        (lambda p: DLion(p, betas=("a", 0.9)), "'a', 0.9. is not possible: give two numbers"),
        (lambda p: DLion(p, betas=(0.9,)), "0.9,. is not possible: give two numbers"),
        (lambda p: DLion(p, betas=0.9), "betas=0.9 is not possible: give two numbers"),
        (lambda p: DLion(p, lr=float("inf")), "lr=inf is not possible"),
        (lambda p: DLion(p, exchange=4), "exchange=4 is not possible: give direct, grid"),
        (lambda p: DLion(p, nonfinite="maybe"), "nonfinite=maybe is unknown: choose stop, sk"),
        (lambda p: DLion(p, overlap="no"), "overlap=no is not possible: give True or False"),
        (lambda p: DLion([{"params": p, "lr": -1}]), "lr=-1 is not possible: give a number"),
        (lambda p: DGC(p, clip_norm=-1.0), "clip_norm=-1.0 is not possible: give a number, above"),
        (lambda p: DGC(p, warmup_steps=-5), "warmup_steps=-5 is not possible"),
        (lambda p: TernGrad(p, clip=-1.0), "clip=-1.0 is not possible: give a number, at least"),
        (lambda p: SparseLoCo(p, decay=5.0), "decay=5.0 is not possible: give a number, at least"),
        (
            lambda p: EFSignSGD(p, momentum=None),
            "momentum=None is not possible: give a number, at least 0 and below",
        ),
        (lambda p: DLionADM(p, rise=2.0), "rise=2.0 is not possible: give a whole number"),
        (lambda p: DLionADM(p, lookahead="far"), "lookahead=far is not possible: give a number"),
        (
            lambda p: DLionADM(p, limit="no"),
            "limit=no is not possible: give a number, at least 1, or None",
        ),
        (lambda p: DLionADM(p, weighted="no"), "weighted=no is not possible: give True or False"),
        (lambda p: LionCub(p, bits=3), "bits=3 is not possible: choose 1, 2, 4 or 8"),
        (lambda p: LionCub(p, scale="l2"), "scale=l2 is unknown"),
        (lambda p: LionCub(p, momentum_sync="often"), "momentum_sync=often"),
        (lambda p: SignMuon(p, rest="adamw"), "rest=adamw needs aggregation=avg"),
        (lambda p: SignMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: LionCub(p, momentum_sync=1, sync_pattern="w"), "matches no parameter name"),
        (lambda p: LionCub(p, sync_pattern="w"), "has no effect with momentum_sync=0"),
        (lambda p: LionCub(p, sync_until=9), "sync_until=9 has no effect with momentum_sync=0"),
        (lambda p: LionCub(p, headroom=True, bits=1), "it needs bits=2, 4 or 8"),
        (
            lambda p: LionCub(p, headroom=True, workers=Workers(local=8)),
            "bits=4 and 8 workers is not possible: it needs at most 7 workers",
        ),
        (
            lambda p: LionCub(p, momentum_sync="exponential", sync_rate=0),
            "sync_rate=0 is not possible",
        ),
        (lambda p: DGC(p, density=0.0), "density=0.0 is not possible: give a number, above 0"),
        (lambda p: DGC(p, clip_norm=1.0, bucket_cap_mb=1e-3), "needs the whole gradient"),
        (lambda p: DeMo(p, topk=0), "topk=0 is not possible: give a whole number, at least 1"),
        (lambda p: DeMo(p, chunk=1.5), "chunk=1.5 is not possible: give a whole number"),
        (lambda p: DeMo(p, value_bits=8), "value_bits=8 is not possible: choose 2, 16 or 32"),
        (
            lambda p: SparseLoCo(p, topk=0),
            "topk=0 is not possible: give a whole number, at least 1",
        ),
        (
            lambda p: DiLoCo(p, inner="adam"),
            "inner=adam is not possible: give adamw, lion, muon, sgd or in",
        ),
        (
            lambda p: DiLoCo(p, wire="fp8"),
            "wire=fp8 is unknown: choose float32, bf16, int8 or sign",
        ),
        (lambda p: DiLoCo(p, local_steps=0), "local_steps=0 is not possible: give a whole number"),
        (
            lambda p: DiLoCo(p, outer_momentum=1),
            "outer_momentum=1 is not possible: give a number, at least 0 and below",
        ),
        (
            lambda p: DLion(p, bucket_cap_mb=0),
            "bucket_cap_mb=0 is not possible: give a number, above 0, auto or",
        ),
        (
            lambda p: GMuon([{"params": p, "use_muon": 0}]),
            "use_muon=0 is not possible: give True or",
        ),
        (
            lambda p: DiLoCo([{"params": p, "use_muon": "no"}], inner="muon"),
            "use_muon=no is not possible: give True or False",
        ),
        (lambda p: GMuon(p, adjust_lr="rms"), "choose match_rms_adamw or original"),
        (lambda p: GMuon(p, ns_precision="fp16"), "choose auto, bf16 or float32"),
        (lambda p: GMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: SignMuon(p, rest="adamw"), "rest=adamw needs aggregation=avg"),
        (lambda p: SignMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: LionCub(p, momentum_sync=1, sync_pattern="("), "is no regular expression: miss"),
        (lambda p: PowerSGD(p, rank=0), "rank=0 is not possible: give a whole number"),
        (
            lambda p: OneBitAdam(p, warmup_steps=0),
            "warmup_steps=0 is not possible: give a whole number, at least 1",
        ),
    ],
)
def test_wrong_values_are_named(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(net().parameters())


@pytest.mark.parametrize("cls", sorted({entry.cls for entry in METHODS.values()}, key=str))
def test_what_torch_takes_for_no_parameters_is_refused(cls):
    model = net()
    params, named = list(model.parameters()), dict(model.named_parameters())
    for unordered in (set(params), frozenset(params)):
        for given in (unordered, [{"params": unordered}]):
            with pytest.raises(TypeError, match="the parameters are in a set, whose order"):
                cls(given)
    optimizer = cls(params)
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        optimizer.add_param_group({"params": iter([3])})
    for given in ([3], [{"params": [3]}], named, [{"params": ("x", params[0])}], [(1, params[0])]):
        with pytest.raises((TypeError, ValueError), match=r"optimizer|param"):
            cls(given)
