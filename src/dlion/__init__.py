"""Communication-efficient distributed training: optimizers that exchange packed messages.

::

    import dlion

    optimizer = dlion.DLion(model.parameters(), lr=1e-4)

The library is ``methods`` (the optimizers; ``optim`` for short), ``engine`` (the step they share),
``exchange`` (messages and how they are combined), ``wire`` (tensors as bytes), ``kernels`` (fused
passes over memory) and the modules beside them.
``dlion.suite`` is the experiment suite around it, for ``train.py`` and the command ``dlion``.

Each name is imported when it is asked for. ``load_model`` needs ``pip install 'dlion[suite]'``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.errors import TrainingFailed, UserError
    from dlion.methods import (
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
    from dlion.suite.training.weights import load_model
    from dlion.workers import Workers

__version__ = "0.1.0"
__all__ = [  # in the groups of docs/index.rst  # noqa: RUF022
    # any optimizer in your loop
    "DistributedOptimizer",  # packed messages instead of gradients, in the backward pass if asked
    "Workers",  # who takes part, and how many of them each process hosts
    # votes
    "DLion",  # the sign of Lion's direction, one bit each way
    "DLionADM",  # the same by delta modulation, for workers that see unlike data
    "LionCub",  # Lion's direction in a few bits
    "Signum",  # the sign of momentum
    # means of whole gradients
    "GAdamW",  # AdamW
    "GLion",  # Lion
    "GMuon",  # Muon for matrices, AdamW for the rest
    # means of compressed gradients
    "DGC",  # the largest entries, with momentum correction
    "DeMo",  # the largest cosine coefficients of momentum
    "EF21Sign",  # Lion's direction, followed by scaled signs
    "EFSignSGD",  # scaled signs with error feedback both ways
    "GradDrop",  # the largest entries, the rest kept for later
    "OneBitAdam",  # AdamW for a while, then its momentum in one bit
    "PowerSGD",  # low-rank matrices with error feedback
    "TernGrad",  # stochastic ternary gradients
    # local updates: several steps of each worker between two exchanges
    "LocalUpdate",  # what the two have in common
    "DiLoCo",  # any inner optimizer, Nesterov on the mean displacement
    "SparseLoCo",  # any inner optimizer, the largest of each displacement
    # models
    "load_model",  # that of a finished run
    # errors
    "TrainingFailed",  # training must stop
    "UserError",  # a wrong value that the user can correct
]
_HOMES = {
    "TrainingFailed": "dlion.errors",
    "UserError": "dlion.errors",
    "Workers": "dlion.workers",
    "load_model": "dlion.suite.training.weights",
}  # of all others: dlion.methods


def __dir__() -> list[str]:
    """Return the names too that have not been asked for yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import what takes time to import when it is asked for."""
    if name == "optim":
        return importlib.import_module("dlion.optim")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES.get(name, "dlion.methods")), name)
    except ModuleNotFoundError as error:
        missing = f"dlion.{name} needs {error.name}, which is not installed"
        raise ImportError(f"{missing}: type pip install 'dlion[suite]'") from error
