"""The methods: one class per family, usable in any training loop, and a registry of them.

METHODS says a method once. Exports, the API reference, the README's table, colours of plots and the
lists of tests and benchmarks are made of it. Classes are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # for type checkers, which cannot follow __getattr__
    from dlion.engine.optimizer import DistributedOptimizer as DistributedOptimizer
    from dlion.methods.adm import DLionADM as DLionADM
    from dlion.methods.demo import DeMo as DeMo
    from dlion.methods.dense import GAdamW as GAdamW
    from dlion.methods.dense import GLion as GLion
    from dlion.methods.dion import Dion as Dion
    from dlion.methods.dlion import DLion as DLion
    from dlion.methods.dlion import Signum as Signum
    from dlion.methods.ef21_muon import EF21Muon as EF21Muon
    from dlion.methods.ef_sign import EF21Sign as EF21Sign
    from dlion.methods.ef_sign import EFSignSGD as EFSignSGD
    from dlion.methods.lion_cub import LionCub as LionCub
    from dlion.methods.local import DiLoCo as DiLoCo
    from dlion.methods.local import LocalUpdate as LocalUpdate
    from dlion.methods.muon import GMuon as GMuon
    from dlion.methods.muon_adm import MuonADM as MuonADM
    from dlion.methods.onebit_adam import OneBitAdam as OneBitAdam
    from dlion.methods.powersgd import PowerSGD as PowerSGD
    from dlion.methods.sign_muon import SignMuon as SignMuon
    from dlion.methods.sparse import DGC as DGC
    from dlion.methods.sparse import GradDrop as GradDrop
    from dlion.methods.sparseloco import SparseLoCo as SparseLoCo
    from dlion.methods.terngrad import TernGrad as TernGrad


class Method(NamedTuple):
    """A method under its ``optimizer=`` name.

    Attributes:
        home: module in this package and class, such as ``dense.GLion``.
        summary: what is sent and what becomes of it, in one line.
        options: keyword arguments that distinguish it from other methods of its class.
    """

    home: str
    summary: str
    options: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.home.partition(".")[2]

    @property
    def module(self) -> str:
        """The module that it is in."""
        return f"{__name__}.{self.home.partition('.')[0]}"

    @property
    def cls(self) -> "type[DistributedOptimizer]":
        """The class, imported on first use."""
        return getattr(importlib.import_module(self.module), self.name)


METHODS = {  # new ones at the end: the order decides colours of plots
    "g_adamw": Method("dense.GAdamW", "AdamW on the mean gradient"),
    "g_lion": Method("dense.GLion", "Lion on the mean gradient"),
    "dlion_mavo": Method(
        "dlion.DLion",
        "majority vote on the signs of the workers' Lion directions",
        {"aggregation": "mavo"},
    ),
    "dlion_avg": Method(
        "dlion.DLion",
        "mean of the signs of the workers' Lion directions",
        {"aggregation": "avg"},
    ),
    "signum_mavo": Method(
        "dlion.Signum",
        "majority vote on the signs of the workers' momenta",
        {"aggregation": "mavo"},
    ),
    "signum_avg": Method(
        "dlion.Signum", "mean of the signs of the workers' momenta", {"aggregation": "avg"}
    ),
    "terngrad": Method("terngrad.TernGrad", "mean of stochastic ternary gradients"),
    "graddrop": Method("sparse.GradDrop", "mean of the largest entries of gradient + residual"),
    "dgc": Method("sparse.DGC", "mean of the largest momentum-corrected gradients"),
    "lion_cub": Method("lion_cub.LionCub", "sign of the sum of Lion directions in p bits"),
    "dlion_adm": Method(
        "adm.DLionADM", "sign of the sum of Lion directions, tracked by delta modulation"
    ),
    "ef_signsgd": Method(
        "ef_sign.EFSignSGD", "scaled signs of gradient + residual, error feedback both ways"
    ),
    "ef21_sign": Method(
        "ef_sign.EF21Sign", "sign of the sum of Lion directions, tracked by scaled signs (EF21)"
    ),
    "g_muon": Method("muon.GMuon", "Muon on the mean gradient of matrices, AdamW on the rest"),
    "powersgd": Method("powersgd.PowerSGD", "low-rank factors of gradient + residual"),
    "onebit_adam": Method(
        "onebit_adam.OneBitAdam", "AdamW in a warm-up, then scaled signs of momentum + residual"
    ),
    "demo": Method("demo.DeMo", "sign of the mean of the largest cosine coefficients of momenta"),
    "sparseloco": Method(
        "sparseloco.SparseLoCo", "largest entries of displacement + residual, after 30 local steps"
    ),
    "diloco": Method(
        "local.DiLoCo", "Nesterov step on the mean displacement, after 30 local steps of AdamW"
    ),
    "sign_muon_mavo": Method(
        "sign_muon.SignMuon",
        "majority vote on the signs of the workers' orthogonalised momenta",
        {"aggregation": "mavo"},
    ),
    "sign_muon_avg": Method(
        "sign_muon.SignMuon",
        "mean of the signs of the workers' orthogonalised momenta, orthogonalised again",
        {"aggregation": "avg", "local_polar": True},
    ),
    "dion": Method("dion.Dion", "orthonormal low-rank factors of momenta, AdamW on the rest"),
    "ef21_muon": Method(
        "ef21_muon.EF21Muon", "Muon on momenta, tracked by their largest changes (EF21)"
    ),
    "muon_adm": Method(
        "muon_adm.MuonADM", "sign of the polar factor of the momenta, tracked by delta modulation"
    ),
    "muloco": Method(
        "local.DiLoCo",
        "Nesterov step on the mean displacement, after 30 local steps of Muon",
        {"inner": "muon"},
    ),
}

_HOMES = {  # modules of classes
    "DistributedOptimizer": "dlion.engine.optimizer",
    "LocalUpdate": "dlion.methods.local",
    **{method.name: method.module for method in METHODS.values()},
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the names too that have not been imported yet."""
    return sorted({*globals(), *__all__})
