"""State of an optimizer: shown as ``state[param][name]``, saved and loaded.

Per-worker state that several processes have parts of is a DTensor, which knows which part is where.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlion import checks
from dlion.checks import EXCHANGE
from dlion.core.bucket import Bucket
from dlion.core.layout import local_part
from dlion.workers import Workers

APART = "workers_apart"  # an entry of a saved state that lacks what workers own
BY_NAME = "by_name"  # an entry that torch.distributed.checkpoint does not keep
States = dict[Tensor, dict[str, Tensor]]  # of each parameter, by name


def of_worker(buckets: Sequence[Bucket], local: int) -> dict[str, Tensor]:
    """Return views of one local worker's own state by name: the same for every spread."""
    views = {}
    for bucket in buckets:
        for name, rows in (bucket.own | bucket.own_counters).items():
            views[f"{bucket.index}.{name}"] = rows[local]
        for name, rows in bucket.exchange.state.items():
            views[f"{bucket.index}.{EXCHANGE}{name}"] = rows[local]
    return views


def of_all(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """Return parameters and state that are equal on all workers, as views by name."""
    views = {}
    for bucket in buckets:
        views[f"{bucket.index}.parameters"] = bucket.params
        counters = {} if bucket.counts_steps else bucket.counters
        for name, values in (bucket.shared | counters).items():
            views[f"{bucket.index}.{name}"] = values
    return views


def publish(bucket: Bucket, state: dict[Tensor, Any], workers: Workers) -> None:
    """Show the flat state of a bucket as ``state[param][name]``, as views.

    ``worker`` says whose the per-worker state is. What an exchange keeps for its bucket is with the
    first parameter, ``exchange.NAME``.
    """
    worker, published = ids_of(workers), []
    for index, slot in enumerate(bucket.slots):
        own: dict[str, Tensor] = {}
        if bucket.own:
            own["worker"] = worker
        for name, flat in (bucket.own | bucket.shared).items():
            own[name] = slot.view(flat)
        for name, counts in bucket.counters.items():
            own[name] = counts[index]
        for name, counts in bucket.own_counters.items():
            own[name] = counts[:, index]
        if not index:
            own |= {EXCHANGE + name: rows for name, rows in bucket.exchange_state.items()}
        state[slot.tensor].update(own)  # others' entries stay
        published += [(slot.tensor, name, value) for name, value in own.items()]
    bucket.published = published


def ids_of(workers: Workers) -> Tensor:
    """Return the owners of per-worker state: ids and number of workers, int64 ``[k, 2]``."""
    rows = [[worker, workers.count] for worker in workers.ids]
    return torch.tensor(rows, device="cpu")


# ---- saving and loading


class Placements:
    """How state is saved: as it is here. Extensions know of several processes.

    Args:
        workers: who owns per-worker state.
        param: one of the parameters.
    """

    def __init__(self, workers: Workers, param: Tensor):
        pass

    def own(self, rows: Tensor, param: Tensor | None = None) -> Tensor:
        """Per-worker state, ``[k, ...]`` -> ``[n, ...]``, of a parameter's shape or not."""
        return rows

    def shared(self, values: Tensor, param: Tensor) -> Tensor:
        """State of a parameter's shape that is equal on all workers."""
        return values


class Entry(NamedTuple):
    """A tensor of the state: what is here of it, and what a saved state has."""

    here: Tensor
    saved: Tensor


Entries = dict[Tensor, dict[str, Entry]]  # of each parameter, by name


@torch.no_grad()
def entries(optimizer: Any) -> tuple[Entries, list[Callable[[], None]]]:
    """Return an optimizer's state, sharing its memory, as DTensors where processes differ.

    And what is to be called once values were copied into it.
    """
    found: Entries = {}
    after: list[Callable[[], None]] = []
    placements = optimizer.placements(optimizer.owner, optimizer.params[0])
    for bucket in optimizer.buckets:
        for param, name, value in bucket.published:
            if name in bucket.shared:
                there = placements.shared(value, param)
            elif name in bucket.counters:
                there = value
            else:
                there = placements.own(value, param if name in bucket.own else None)
            found.setdefault(param, {})[name] = Entry(value, there)
        more, finish = bucket.unpublished(placements)
        for param, name, value, there in more:
            found[param][name] = Entry(value, there)
        after += finish
    for param, named in optimizer.bucket_type.absent(optimizer, placements).items():
        found[param] = {name: Entry(value, there) for name, (value, there) in named.items()}
    return found, after


def pack(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the state of all buckets into torch's packed state, before others' hooks see it."""
    for bucket in optimizer.buckets:
        bucket.adopt_state(optimizer.state)
    found, _ = entries(optimizer)
    state = {
        key: {**value} if isinstance(key, int) else value
        for key, value in state_dict["state"].items()
    }
    index_of = {param: index for index, param in enumerate(optimizer.params)}
    for param, named in found.items():
        index = index_of[param]
        state[index] = state.get(index, {}) | {name: each.saved for name, each in named.items()}
    for bucket in optimizer.buckets:
        if bucket.counts_steps and not bucket.step:
            # as in torch, no step is counted before the first; so torch.distributed.checkpoint,
            # which insists on all keys that are here, loads states that do not have this one
            for slot in bucket.slots:
                del state[index_of[slot.tensor]]["step"]
    packed = {**state_dict, "state": state}
    if all("param_names" in group for group in packed["param_groups"]):
        packed[BY_NAME] = True
    if extra := optimizer.get_extra_state():
        packed["inner"] = extra
    return packed


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copy a saved state in; nothing is changed before all of it is known to fit."""
    groups, apart = state_dict["param_groups"], APART in state_dict
    if BY_NAME in state_dict:
        _reorder(optimizer, [group["param_names"] for group in groups])
    arrange(optimizer, groups)
    optimizer.include_unfrozen()
    checks.check_saved_sizes(groups, optimizer.param_groups)
    checks.check_saved_names(groups, optimizer.param_groups)
    names = [name for group in groups for name in group["params"]]
    param_of = dict(zip(names, optimizer.params, strict=True))
    here, finish = entries(optimizer)
    local = {
        param: {name: local_part(each.here) for name, each in named.items()}
        for param, named in here.items()
    }
    saved, foreign = _sort_out(_with_steps(state_dict["state"], groups), param_of, local, apart)
    checks.check_saved_groups(groups, optimizer.hyperparameters.keys() - {"added"})
    worker = ids_of(optimizer.owner)
    for name, param in param_of.items():
        own, given = local.get(param, {}), saved.get(param, {})
        if apart:
            own = {key: own[key] for key in own.keys() & given.keys()}
        if given and not own and not param.requires_grad:
            raise ValueError(
                f"parameter {name} is frozen, and was trained when the state was saved: call"
                " requires_grad_(True) before you load it"
            )
        checks.check_saved_state(name, given, own, worker)
    optimizer.restart()
    for group, new in zip(optimizer.param_groups, copy.deepcopy(groups), strict=True):
        kept = {key: group[key] for key in ("params", "param_names") if key in group}
        names_too = {"param_names": new["param_names"]} if "param_names" in new else {}
        group.clear()
        group.update({"added": 0} | new | kept | names_too)
    optimizer.state.clear()
    for bucket in optimizer.buckets:
        publish(bucket, optimizer.state, optimizer.owner)
    with torch.no_grad():
        for param, tensors in saved.items():
            for name, value in tensors.items():
                local[param][name].copy_(value)
        for each in finish:
            each()
    for key, value in foreign.items():
        if isinstance(key, Tensor):
            optimizer.state[key] |= value
        else:
            optimizer.state[key] = value
    optimizer.awaits = state_dict.get(APART)
    optimizer.set_extra_state(None if apart else state_dict.get("inner", []))


def arrange(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Lay an optimizer that took no step out as that of a saved state, whose groups these are.

    Groups that were added later then have buckets of their own, as they had. What others have put
    into ``param_groups``, as Lightning's BaseFinetuning does, is taken over.
    """
    here = optimizer.param_groups
    added = [group.get("added", 0) for group in saved]
    if optimizer.taken or len(saved) != len(here):
        return
    if optimizer.edited or added != [group["added"] for group in here]:
        for group, theirs, order in zip(here, saved, added, strict=True):
            group["steps"], group["added"] = theirs.get("steps", 0), order
        optimizer.lay_out_again()


def _reorder(optimizer: Any, names: list[list[str]]) -> None:
    """Put the parameters of each group in the order of these names, if they are its own."""
    for group, wanted in zip(optimizer.param_groups, names, strict=False):
        here = group.get("param_names", [])
        if wanted == here or sorted(wanted) != sorted(here):
            continue
        if group["steps"]:
            raise ValueError(
                "the saved state has the parameters in another order, and this optimizer has"
                " taken steps in its own: load it into a new one"
            )
        params = dict(zip(here, group["params"], strict=True))
        group["params"], group["param_names"] = [params[name] for name in wanted], [*wanted]


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
    """Tell an optimizer's state, as much as is here, from entries that others have put there.

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
                if isinstance(found, dict):
                    raise ValueError(
                        f"the saved state of parameter {key} has no value for {name}: it is of"
                        " other parameter groups"
                    )
                if not isinstance(found, Tensor):
                    found = own[name].new_full(own[name].shape, found)
                saved.setdefault(param, {})[name] = local_part(found)
            elif complete and own and not str(name).startswith(EXCHANGE):
                foreign.setdefault(param, {})[name] = found
            else:
                saved.setdefault(param, {})[name] = local_part(torch.as_tensor(found))
    return saved, foreign
