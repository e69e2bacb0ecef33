"""The methods: one class per family, usable in any training loop, and a registry of them.

METHODS says a method once. Exports, the API reference, the README's table, colours of plots and the
lists of tests and benchmarks are made of it. Classes are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # for type checkers, which cannot follow __getattr__
    from dlion.core.optimizer import DistributedOptimizer as DistributedOptimizer
    from dlion.methods.adm import DLionADM as DLionADM
    from dlion.methods.dense import GAdamW as GAdamW
    from dlion.methods.dense import GLion as GLion
    from dlion.methods.dlion import DLion as DLion
    from dlion.methods.dlion import Signum as Signum
    from dlion.methods.lion_cub import LionCub as LionCub
    from dlion.methods.local import DiLoCo as DiLoCo
    from dlion.methods.local import LocalUpdate as LocalUpdate
    from dlion.methods.muon import GMuon as GMuon
    from dlion.methods.sign_muon import SignMuon as SignMuon
    from dlion.rivals.demo import DeMo as DeMo
    from dlion.rivals.dion import Dion as Dion
    from dlion.rivals.ef21_muon import EF21Muon as EF21Muon
    from dlion.rivals.ef_sign import EF21Sign as EF21Sign
    from dlion.rivals.ef_sign import EFSignSGD as EFSignSGD
    from dlion.rivals.muon_adm import MuonADM as MuonADM
    from dlion.rivals.onebit_adam import OneBitAdam as OneBitAdam
    from dlion.rivals.powersgd import PowerSGD as PowerSGD
    from dlion.rivals.sparse import DGC as DGC
    from dlion.rivals.sparse import GradDrop as GradDrop
    from dlion.rivals.sparseloco import SparseLoCo as SparseLoCo
    from dlion.rivals.terngrad import TernGrad as TernGrad


class MethodEntry(NamedTuple):
    """A method under its ``optimizer=`` name.

    Attributes:
        home: module in :mod:`dlion` and class, such as ``methods.dense.GLion``.
        summary: what is sent and what becomes of it, in one line.
        options: keyword arguments that distinguish it from other methods of its class.
    """

    home: str
    summary: str
    options: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.home.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The module that it is in."""
        return f"dlion.{self.home.rpartition('.')[0]}"

    @property
    def cls(self) -> "type[DistributedOptimizer]":
        """The class, imported on first use."""
        return getattr(importlib.import_module(self.module), self.name)


METHODS = {  # new ones at the end: the order decides colours of plots
    "g_adamw": MethodEntry("methods.dense.GAdamW", "AdamW on the mean gradient"),
    "g_lion": MethodEntry("methods.dense.GLion", "Lion on the mean gradient"),
    "dlion_mavo": MethodEntry(
        "methods.dlion.DLion",
        "majority vote on the signs of the workers' Lion directions",
        {"aggregation": "mavo"},
    ),
    "dlion_avg": MethodEntry(
        "methods.dlion.DLion",
        "mean of the signs of the workers' Lion directions",
        {"aggregation": "avg"},
    ),
    "signum_mavo": MethodEntry(
        "methods.dlion.Signum",
        "majority vote on the signs of the workers' momenta",
        {"aggregation": "mavo"},
    ),
    "signum_avg": MethodEntry(
        "methods.dlion.Signum", "mean of the signs of the workers' momenta", {"aggregation": "avg"}
    ),
    "terngrad": MethodEntry("rivals.terngrad.TernGrad", "mean of stochastic ternary gradients"),
    "graddrop": MethodEntry(
        "rivals.sparse.GradDrop", "mean of the largest entries of gradient + residual"
    ),
    "dgc": MethodEntry("rivals.sparse.DGC", "mean of the largest momentum-corrected gradients"),
    "lion_cub": MethodEntry(
        "methods.lion_cub.LionCub", "sign of the sum of Lion directions in p bits"
    ),
    "dlion_adm": MethodEntry(
        "methods.adm.DLionADM", "sign of the sum of Lion directions, tracked by delta modulation"
    ),
    "ef_signsgd": MethodEntry(
        "rivals.ef_sign.EFSignSGD", "scaled signs of gradient + residual, error feedback both ways"
    ),
    "ef21_sign": MethodEntry(
        "rivals.ef_sign.EF21Sign",
        "sign of the sum of Lion directions, tracked by scaled signs (EF21)",
    ),
    "g_muon": MethodEntry(
        "methods.muon.GMuon", "Muon on the mean gradient of matrices, AdamW on the rest"
    ),
    "powersgd": MethodEntry("rivals.powersgd.PowerSGD", "low-rank factors of gradient + residual"),
    "onebit_adam": MethodEntry(
        "rivals.onebit_adam.OneBitAdam",
        "AdamW in a warm-up, then scaled signs of momentum + residual",
    ),
    "demo": MethodEntry(
        "rivals.demo.DeMo", "sign of the mean of the largest cosine coefficients of momenta"
    ),
    "sparseloco": MethodEntry(
        "rivals.sparseloco.SparseLoCo",
        "largest entries of displacement + residual, after 30 local steps",
    ),
    "diloco": MethodEntry(
        "methods.local.DiLoCo",
        "Nesterov step on the mean displacement, after 30 local steps of AdamW",
    ),
    "sign_muon_mavo": MethodEntry(
        "methods.sign_muon.SignMuon",
        "majority vote on the signs of the workers' orthogonalised momenta",
        {"aggregation": "mavo"},
    ),
    "sign_muon_avg": MethodEntry(
        "methods.sign_muon.SignMuon",
        "mean of the signs of the workers' orthogonalised momenta, orthogonalised again",
        {"aggregation": "avg", "local_polar": True},
    ),
    "dion": MethodEntry(
        "rivals.dion.Dion", "orthonormal low-rank factors of momenta, AdamW on the rest"
    ),
    "ef21_muon": MethodEntry(
        "rivals.ef21_muon.EF21Muon", "Muon on momenta, tracked by their largest changes (EF21)"
    ),
    "muon_adm": MethodEntry(
        "rivals.muon_adm.MuonADM",
        "sign of the polar factor of the momenta, tracked by delta modulation",
    ),
    "muloco": MethodEntry(
        "methods.local.DiLoCo",
        "Nesterov step on the mean displacement, after 30 local steps of Muon",
        {"inner": "muon"},
    ),
}

_HOMES = {  # modules of classes
    "DistributedOptimizer": "dlion.core.optimizer",
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
