"""Communication-efficient distributed training: optimizers that exchange packed messages.

::

    import dlion

    optimizer = dlion.DLion(model.parameters(), lr=1e-4)

Each name is imported when it is asked for. ``load_model`` needs ``pip install 'dlion[suite]'``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.errors import TrainingFailed, UserError
    from dlion.optim import (
        DGC,
        DeMo,
        DiLoCo,
        DistributedOptimizer,
        DLion,
        DLionADM,
        EF21Sign,
        EFSignSGD,
        GAdamW,
        GLion,
        GMuon,
        GradDrop,
        LionCub,
        LocalUpdate,
        OneBitAdam,
        PowerSGD,
        Signum,
        SparseLoCo,
        TernGrad,
    )
    from dlion.training.weights import load_model
    from dlion.workers import Workers

__version__ = "0.1.0"
__all__ = [
    "DGC",
    "DLion",
    "DLionADM",
    "DeMo",
    "DiLoCo",
    "DistributedOptimizer",
    "EF21Sign",
    "EFSignSGD",
    "GAdamW",
    "GLion",
    "GMuon",
    "GradDrop",
    "LionCub",
    "LocalUpdate",
    "OneBitAdam",
    "PowerSGD",
    "Signum",
    "SparseLoCo",
    "TernGrad",
    "TrainingFailed",
    "UserError",
    "Workers",
    "load_model",
]
_HOMES = {
    "TrainingFailed": "dlion.errors",
    "UserError": "dlion.errors",
    "Workers": "dlion.workers",
    "load_model": "dlion.training.weights",
}  # of all others: dlion.optim


def __getattr__(name: str) -> Any:
    """Import what takes time to import when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES.get(name, "dlion.optim")), name)
    except ModuleNotFoundError as error:
        missing = f"dlion.{name} needs {error.name}, which is not installed"
        raise ImportError(f"{missing}: type pip install 'dlion[suite]'") from error
