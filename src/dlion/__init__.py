"""Communication-efficient distributed training: optimizers that exchange packed messages.

::

    import dlion

    optimizer = dlion.DLion(model.parameters(), lr=1e-4)

The library is ``methods`` (the optimizers; ``optim`` for short), ``rivals`` (to compare with),
``core`` (the step they share), ``extensions`` (what else a step may need), ``elastic`` (workers
that come and go), ``exchange`` (messages and how they are combined), ``wire`` (tensors as bytes),
``kernels`` (fused passes over memory) and the modules beside them.

Letters of shapes: ``n`` workers, ``m`` senders of a step (n, if all take part), ``k`` virtual
workers of this process, ``P`` processes; ``T`` tensors of a bucket, ``numel`` their elements with
the gaps between them, ``padded`` with the end that makes n equal slices; ``d`` parameters.

``dlion.suite`` is the experiment suite around it, for ``train.py`` and the command ``dlion``.

Each name is imported when it is asked for. ``load_model`` needs ``pip install 'dlion[suite]'``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dlion.methods import __all__ as _methods

if TYPE_CHECKING:
    from dlion.elastic.joining import join as join
    from dlion.errors import TrainingFailed as TrainingFailed
    from dlion.errors import UserError as UserError
    from dlion.methods import *  # noqa: F403
    from dlion.methods.groups import param_groups as param_groups
    from dlion.replicas import check_replicas as check_replicas
    from dlion.replicas import replicate as replicate
    from dlion.suite.training.weights import load_model as load_model
    from dlion.workers import Workers as Workers

__version__ = "0.1.0"
_HOMES = {
    **dict.fromkeys(_methods, "dlion.methods"),
    "param_groups": "dlion.methods.groups",
    "Workers": "dlion.workers",
    "join": "dlion.elastic.joining",
    "replicate": "dlion.replicas",
    "check_replicas": "dlion.replicas",
    "load_model": "dlion.suite.training.weights",
    "TrainingFailed": "dlion.errors",
    "UserError": "dlion.errors",
}
__all__ = [*_HOMES]


def __dir__() -> list[str]:
    """Return the names too that have not been asked for yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a slow module on first use."""
    if name == "optim":
        return importlib.import_module("dlion.optim")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = f"dlion.{name} needs {error.name}, which is not installed"
        raise ImportError(f"{missing}: type pip install 'dlion[suite]'") from error
