"""The methods: one class per family, usable in any training loop, and a registry of them.

METHODS says a method once. Exports, the API reference, the README's table, colours of plots and the
lists of tests and benchmarks are made of it. Classes are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # for type checkers, which cannot follow __getattr__
    from dlion.optim.adm import DLionADM as DLionADM
    from dlion.optim.base import DistributedOptimizer as DistributedOptimizer
    from dlion.optim.demo import DeMo as DeMo
    from dlion.optim.dense import GAdamW as GAdamW
    from dlion.optim.dense import GLion as GLion
    from dlion.optim.dlion import DLion as DLion
    from dlion.optim.dlion import Signum as Signum
    from dlion.optim.ef_sign import EF21Sign as EF21Sign
    from dlion.optim.ef_sign import EFSignSGD as EFSignSGD
    from dlion.optim.lion_cub import LionCub as LionCub
    from dlion.optim.local import DiLoCo as DiLoCo
    from dlion.optim.local import LocalUpdate as LocalUpdate
    from dlion.optim.muon import GMuon as GMuon
    from dlion.optim.onebit_adam import OneBitAdam as OneBitAdam
    from dlion.optim.powersgd import PowerSGD as PowerSGD
    from dlion.optim.sparse import DGC as DGC
    from dlion.optim.sparse import GradDrop as GradDrop
    from dlion.optim.sparseloco import SparseLoCo as SparseLoCo
    from dlion.optim.terngrad import TernGrad as TernGrad


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
    def cls(self) -> "type[DistributedOptimizer]":
        """The class, imported on first use."""
        return _load(self.home)


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
        "local.DiLoCo", "Nesterov step on the mean displacement, after 30 local steps"
    ),
}

_BASES = ("base.DistributedOptimizer", "local.LocalUpdate")
_HOMES = {home.partition(".")[2]: home for home in (*_BASES, *(m.home for m in METHODS.values()))}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(_HOMES[name])


def __dir__() -> list[str]:
    """Return the names too that have not been imported yet."""
    return sorted({*globals(), *__all__})


def _load(home: str) -> Any:
    module, name = home.split(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
