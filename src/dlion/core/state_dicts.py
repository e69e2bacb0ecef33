"""The state dict of an optimizer, and checks of a loaded one."""

import copy
from typing import Any

import torch
from torch import Tensor

from dlion.core import saving
from dlion.core.saving import APART, States, own_names
from dlion.extensions.shards import EXCHANGE, local_part

BY_NAME = "by_name"  # an entry that torch.distributed.checkpoint does not keep


def pack(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the state of all buckets into torch's packed state, before others' hooks see it."""
    for bucket in optimizer.buckets:
        bucket.adopt_state(optimizer.state)
    found, params = _distributed(optimizer)[0], optimizer.params
    state = {
        key: {**value} if isinstance(key, int) else value
        for key, value in state_dict["state"].items()
    }
    for index, param in enumerate(params):
        if param in found:
            state[index] = state.get(index, {}) | found[param]
    index_of = {param: index for index, param in enumerate(params)}
    for bucket in optimizer.buckets:
        if bucket.counts_steps and not bucket.step:
            # as in torch, no step is counted before the first; so torch.distributed.checkpoint,
            # which insists on all keys that are here, loads states that do not have this one
            for slot in bucket.slots:
                del state[index_of[slot.tensor]]["step"]
    packed, inner = {**state_dict, "state": state}, optimizer.inner_state()
    if all("param_names" in group for group in packed["param_groups"]):
        packed[BY_NAME] = True
    if inner:
        packed["inner"] = inner
    if optimizer.workers_apart:
        return _without_own(packed, optimizer)
    if optimizer.own_state_is_apart and optimizer.saved_workers.processes > 1:
        optimizer.files.here |= saving.CALLED
    return packed


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copy a saved state in; nothing is changed before all of it is known to fit."""
    groups, apart = state_dict["param_groups"], state_dict.get(APART)
    if BY_NAME in state_dict:
        optimizer.reorder([group["param_names"] for group in groups])
    optimizer.arrange([group.get("steps", 0) for group in groups])
    optimizer.include_unfrozen()
    optimizer.members.check_sizes([len(group["params"]) for group in groups])
    _check_names(groups, optimizer.param_groups)
    names = [name for group in groups for name in group["params"]]
    param_of = dict(zip(names, optimizer.params, strict=True))
    here, local, flats = _distributed(optimizer)
    state = _with_steps(state_dict["state"], groups)
    saved, foreign = _sort_out(state, param_of, here, apart is not None)
    _check_groups(groups, {*optimizer._hyperparameters})
    worker = saving.of_workers(optimizer.saved_workers)
    for name, param in param_of.items():
        own = here.get(param, {})
        if apart is not None:
            own = {key: own[key] for key in own.keys() & saved.get(param, {}).keys()}
        if saved.get(param) and not own and not param.requires_grad:
            raise ValueError(
                f"parameter {name} is frozen, and was trained when the state was saved: call"
                " requires_grad_(True) before you load it"
            )
        _check_state(name, saved.get(param, {}), own, worker)
    optimizer._step.restart()
    for group, new in zip(optimizer.param_groups, copy.deepcopy(groups), strict=True):
        kept = {key: group[key] for key in ("params", "param_names") if key in group}
        names_too = {"param_names": new["param_names"]} if "param_names" in new else {}
        group.clear()
        group.update(new | kept | names_too)
    optimizer.state.clear()
    for bucket in optimizer.buckets:
        saving.publish(bucket, optimizer.state, optimizer.saved_workers)
    saving.put_back(optimizer.buckets, local, flats, saved)
    for key, value in foreign.items():
        if isinstance(key, Tensor):
            optimizer.state[key] |= value
        else:
            optimizer.state[key] = value


def _distributed(optimizer: Any) -> tuple[States, States, saving.Elementwise]:
    workers, own_state, files = optimizer.saved_workers, optimizer.own_state, optimizer.files
    return saving.distributed_state(optimizer.params, optimizer.buckets, workers, own_state, files)


def _without_own(packed: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Leave out per-worker state, and name the save that the rest belongs to."""
    if not optimizer.own_state_is_apart:
        return packed
    index_of = {param: index for index, param in enumerate(optimizer.params)}
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            own = packed["state"].get(index_of[slot.tensor], {})
            for name in own_names(bucket, own):
                del own[name]
    packed["state"] = {key: value for key, value in packed["state"].items() if value != {}}
    return {key: value for key, value in packed.items() if key != "inner"} | {
        APART: saving.mark(optimizer)
    }


def _with_steps(state: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """Give parameters whose steps an earlier state did not count those of their group."""
    steps = {name: group.get("steps", 0) for group in groups for name in group["params"]}
    return {
        key: value | {"step": value.get("step", steps[key])} if key in steps and value else value
        for key, value in state.items()
    }


def _sort_out(
    state: dict[Any, Any], param_of: dict[Any, Any], here: States, apart: bool
) -> tuple[States, dict[Any, Any]]:
    """Tell an optimizer's state, as tensors, from entries that others have put there.

    Numbers become tensors of the shape here; ``apart``: what a worker owns may be missing.
    """
    saved: States = {}
    foreign: dict[Any, Any] = {}
    for key, value in state.items():
        param = param_of.get(key)
        if param is None:
            foreign[key] = value
            continue
        own = here.get(param, {})
        complete = apart or own.keys() <= value.keys()
        for name, found in value.items():
            if name in own:
                plain = local_part(own[name])
                if isinstance(found, dict):
                    raise ValueError(
                        f"the saved state of parameter {key} has no value for {name}: it is of"
                        " other parameter groups"
                    )
                if not isinstance(found, Tensor):
                    found = plain.new_full(plain.shape, found)
                saved.setdefault(param, {})[name] = found
            elif complete and own and not str(name).startswith(EXCHANGE):
                foreign.setdefault(param, {})[name] = found
            else:
                saved.setdefault(param, {})[name] = torch.as_tensor(found)
    return saved, foreign


def _check_names(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    """Refuse the state of the same names in other groups, as state goes by number.

    Within a group the saved order of names holds with ``BY_NAME`` alone: of a state that comes
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


def _check_groups(saved: list[dict[str, Any]], hyperparameters: set[str]) -> None:
    """Refuse saved parameter groups without some hyperparameters."""
    for group in saved:
        missing = sorted(hyperparameters - group.keys())
        if missing:
            raise ValueError(
                f"the saved state has no {', '.join(missing)}: it is of another method"
            )


def _check_state(
    parameter: int | str, saved: dict[str, Tensor], own: dict[str, Tensor], worker: Tensor
) -> None:
    """Refuse the saved state of other workers, and of another model or method.

    Args:
        parameter: its number or name.
        saved, own: its tensors by name; ``worker`` says whose they are.
        worker: whose they have to be: ids and the number of workers, int64 ``[k, 2]``.
    """
    owner = local_part(saved.get("worker", worker)).cpu()
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
    return {name: tuple(local_part(value).shape) for name, value in state.items()}
