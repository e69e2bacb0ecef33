"""Checks of an optimizer's arguments and of a loaded state, one sentence for each error."""

import gc
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from dlion.values import parameters, refusal

P, R = ParamSpec("P"), TypeVar("R")
# numbers of processes of torchrun, Open MPI, MPICH and MVAPICH
_STARTED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_hyperparameters(kind: type, group: dict[str, Any]) -> None:
    """Refuse hyperparameters that a method cannot have; make numbers of tensors of one element."""
    types = parameters(kind)
    for name in types.keys() & group.keys() - {"params"}:
        group[name] = plain(group[name])
        _check(name, group[name], types[name])


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arguments that are not of its parameters' types."""
    known = inspect.signature(function)

    @wraps(function)
    def check_first(*args: P.args, **kwargs: P.kwargs) -> R:
        types = parameters(function)
        for name, value in known.bind(*args, **kwargs).arguments.items():
            if name in types and name != "params":
                _check(name, plain(value), types[name])
        return function(*args, **kwargs)

    return check_first


def plain(value: Any) -> Any:
    """Return numbers for tensors of one element and NumPy's, inside a tuple or list too."""
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else value
    alone = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if alone or isinstance(value, np.generic) else value


def _check(name: str, value: Any, hint: Any) -> None:
    wrong = refusal(value, hint)
    if wrong is not None:
        wrong = wrong.replace("null", "None").replace("type true or false", "give True or False")
        raise ValueError(f"{name}={value} {wrong}")


def warn(message: str) -> None:
    """Warn about the line of a user's that has led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("dlion", "torch", "contextlib")


def check_pattern(name: str, pattern: str | None) -> re.Pattern[str] | None:
    """Compile a regular expression, or refuse an invalid one."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}={pattern} is no regular expression: {error}") from error


def check_matches(name: str, pattern: str | None, groups: Iterable[dict[str, Any]]) -> None:
    """Refuse a regular expression that occurs in no parameter's name."""
    names = [each for group in groups for each in group.get("param_names", [])]
    if pattern is not None and not any(re.search(pattern, each) for each in names):
        raise ValueError(
            f"{name}={pattern} matches no parameter name: pass model.named_parameters() and a"
            " pattern that occurs in a name"
        )


def check_ordered(params: Any) -> None:
    """Refuse parameters in a set, which has another order in each process."""
    if isinstance(params, set | frozenset):
        raise TypeError(
            "the parameters are in a set, whose order differs from process to process: give a list"
        )


def listed(group: Any) -> Any:
    """Let a parameter group have a list of parameters, which can be read twice, as torch does."""
    if isinstance(group, dict):
        check_ordered(group.get("params"))
        if isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return group


def check_names(group: dict[str, Any]) -> None:
    """Refuse names of parameters that are no text, which torch takes."""
    for name in group.get("param_names", ()):
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be text, not {name!r}")


def check_parameters(tensors: Sequence[Tensor], alone: bool) -> None:
    """Refuse tensors that are not real floating-point, and the flat shards of FSDP1.

    Unless a process trains ``alone``, also memory in which others may train the same parameters.
    """
    for tensor in tensors:
        if getattr(tensor, "_fsdp_flattened", False):
            raise ValueError(
                "the model is wrapped in FullyShardedDataParallel, whose processes hold different"
                " parts of flat parameters: use fully_shard (FSDP2), as examples/fsdp2.py does"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"parameters must be real floating-point numbers, not {tensor.dtype}")
        if not alone and tensor.device.type == "cpu" and tensor.is_shared():
            raise ValueError(
                "the parameters are in shared memory, as those of a model that was passed to"
                " processes, which would all update the same ones: train copy.deepcopy(model)"
            )


def check_bare(params: Sequence[Tensor]) -> None:
    """Refuse parameters of a DistributedDataParallel, which would send float32 besides.

    One whose communication hook is torch's ``noop_hook`` sends no gradients.
    """
    if wrappers(params):
        raise RuntimeError(
            "the model is wrapped in DistributedDataParallel, which would average the gradients"
            " in float32 before any message is made: give the bare model, as this optimizer"
            " takes the place of DistributedDataParallel too; where a framework insists on it, use"
            " dlion.frameworks (accelerate, transformers, lightning), or call its"
            " register_comm_hook(None, noop_hook), of"
            " torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"
        )


def check_unsplit() -> None:
    """Refuse to be made by torch's ZeroRedundancyOptimizer, which splits the parameters."""
    zero = "torch.distributed.optim.zero_redundancy_optimizer"
    if any(frame.f_globals.get("__name__") == zero for frame, _ in traceback.walk_stack(None)):
        raise RuntimeError(
            "ZeroRedundancyOptimizer gives each process other parameters, while workers exchange"
            " messages about the same ones: make the optimizer of all parameters on every process"
        )


def check_alone() -> None:
    """Refuse the first step of an optimizer that was made before its process group."""
    started = {os.environ.get(name, "1") for name in _STARTED}
    if dist.get_world_size() > 1 if dist.is_initialized() else started - {"", "1"}:
        raise RuntimeError(
            "the optimizer was made before the process group, so each process would train"
            " alone: call init_process_group() first"
        )


def wrappers(params: Sequence[Tensor]) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel that would send gradients of some parameters."""
    if not dist.is_initialized():
        return []
    ids = set(map(id, params))
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [
        found
        for found in gc.get_referrers(*kinds)  # its instances are among them
        if type(found) in kinds
        and any(id(param) in ids for param in found.parameters())
        and not any(hook is noop_hook for hook, _ in found._comm_hooks)
    ]


# ---- a loaded state

EXCHANGE = "exchange."  # before the names of what an exchange keeps


def check_saved_sizes(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    """Refuse a saved state of groups of other sizes."""
    were, are = ([len(group["params"]) for group in groups] for groups in (saved, here))
    if were != are:
        raise ValueError(
            f"the saved state is of groups of {were} parameters, this optimizer has {are}:"
            " load it into the same model with the same groups"
        )


def check_saved_names(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    """Refuse the state of the same names in other groups, as state goes by number.

    Within a group the saved order of names holds with ``by_name`` alone: of a state that comes
    through torch.distributed.checkpoint numbers are of the parameters here, and names are not.
    """
    before, now = (
        [{*group.get("param_names", ())} for group in groups] for groups in (saved, here)
    )
    if set().union(*before) != set().union(*now):  # a wrapper's prefix, say
        return
    for index, (were, are) in enumerate(zip(before, now, strict=True)):
        if were != are:
            raise ValueError(
                f"the saved state has {', '.join(sorted(were - are) or sorted(are - were))} in"
                f" another parameter group than this optimizer (group {index}): make it of the same"
                " groups"
            )


def check_saved_groups(saved: list[dict[str, Any]], hyperparameters: set[str]) -> None:
    """Refuse saved parameter groups without some hyperparameters."""
    for group in saved:
        missing = sorted(hyperparameters - group.keys())
        if missing:
            raise ValueError(
                f"the saved state has no {', '.join(missing)}: it is of another method"
            )


def check_saved_state(
    parameter: int | str, saved: dict[str, Tensor], own: dict[str, Tensor], worker: Tensor
) -> None:
    """Refuse the saved state of other workers, and of another model or method.

    Args:
        parameter: its number or name.
        saved, own: its tensors by name; ``worker`` says whose they are.
        worker: whose they have to be: ids and the number of workers, int64 ``[k, 2]``.
    """
    owner = saved.get("worker", worker).cpu()
    if not torch.equal(owner, worker):
        raise ValueError(
            f"this is the state of {_owner(owner)}, but this process hosts {_owner(worker)}: let"
            " each process load what it has saved itself, with as many processes and virtual"
            " workers; torch.distributed.checkpoint can give it to as many workers on other"
            " processes"
        )
    if _shapes(saved) != _shapes(own):
        differ = {name for name, _ in _shapes(saved).items() ^ _shapes(own).items()}
        if all(name.startswith(EXCHANGE) for name in differ):
            raise ValueError(
                "the saved state of the exchanges does not fit: load it with the groups,"
                " bucket_cap_mb, ties and shards that it was saved with, and unfreeze what was"
                " unfrozen then after the optimizer is made"
            )
        raise ValueError(
            f"the saved state of parameter {parameter} has {_shapes(saved)}, this optimizer has"
            f" {_shapes(own)}: load it into the same model and method"
        )


def _owner(rows: Tensor) -> str:
    """Workers in words, from ids and number of workers, int64 ``[k, 2]``."""
    ids, count = rows[:, 0].tolist(), int(rows[0, 1])
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))} of {count}"


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
