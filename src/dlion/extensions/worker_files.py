"""Files of each worker's own state, beside the files that a framework saves of process 0."""

from pathlib import Path
from typing import Any

import torch

from dlion.core import saving

KEY = "dlion worker"


def _file(folder: Path, name: str, worker: int, count: int) -> Path:
    return folder / f"{name}.worker{worker}of{count}.pt"


def _slots(optimizer: Any) -> list[tuple[int, Any, list[str]]]:
    """Index of each parameter in a bucket, its state, and the names that are a worker's own."""
    index_of = {param: index for index, param in enumerate(optimizer.params)}
    found = []
    for bucket in optimizer.buckets:
        if bucket.sharded:
            raise ValueError(
                "the parameters are sharded, and each shard has its own state: save and load with"
                " torch.distributed.checkpoint (get_state_dict, set_state_dict)"
            )
        bucket.adopt_state(optimizer.state)
        for slot in bucket.slots:
            own = optimizer.state[slot.tensor]
            names = [name for name in saving.own_names(bucket, own) if name != "worker"]
            found.append((index_of[slot.tensor], own, names))
    return found


def save(optimizer: Any, folder: Path, name: str) -> None:
    """Write a file for each local worker, whole or not at all."""
    if not optimizer.own_state_is_apart:
        return
    slots, workers = _slots(optimizer), optimizer.workers
    inner = optimizer.inner_state()
    folder.mkdir(parents=True, exist_ok=True)
    for local, worker in enumerate(workers.ids):
        rows = {
            index: {key: own[key][local].clone() for key in names} for index, own, names in slots
        }
        content = {
            KEY: [worker, workers.count],
            saving.APART: saving.mark(optimizer),
            "steps": [group["steps"] for group in optimizer.param_groups],
            "state": rows,
            "inner": [states[local] for states in inner],
        }
        path = _file(folder, name, worker, workers.count)
        part = path.with_name(f"{path.name}.part")
        try:
            torch.save(content, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    optimizer.files.here |= saving.WRITTEN


@torch.no_grad()
def load(optimizer: Any, folder: Path, name: str) -> None:
    """Read the file of each local worker; nothing is changed before all are known to fit."""
    if not optimizer.own_state_is_apart:
        return
    workers, paths = optimizer.workers, []
    for worker in workers.ids:
        paths.append(_file(folder, name, worker, workers.count))
        if not paths[-1].exists():
            raise ValueError(_missing(folder, name, paths[-1], workers.count))
    files = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    optimizer.arrange(files[0].get("steps", []))
    optimizer.include_unfrozen()
    slots = _slots(optimizer)
    for path, file in zip(paths, files, strict=True):
        of, state = file[saving.APART], file["state"]
        if of != files[0][saving.APART] or optimizer._awaits not in (None, of):
            raise ValueError(
                f"{path} is of another save than the checkpoint: give the folder of one"
            )
        for index, own, names in slots:
            here = {key: own[key].shape[1:] for key in names}
            if {key: value.shape for key, value in state.get(index, {}).items()} != here:
                raise ValueError(
                    f"{path} does not fit parameter {index}: load it into the same model and"
                    " method, with the same bucket_cap_mb, and unfreeze what was unfrozen then"
                    " after the optimizer is made"
                )
    for local, file in enumerate(files):
        for index, own, names in slots:
            for key in names:
                own[key][local].copy_(file["state"][index][key])
    optimizer._own_of, optimizer._awaits = files[0][saving.APART], None
    optimizer.load_inner(
        [list(states) for states in zip(*(f["inner"] for f in files), strict=True)]
    )


def _missing(folder: Path, name: str, path: Path, count: int) -> str:
    others = sorted(folder.glob(f"{name}.worker*of*.pt"))
    if not others:
        complete = [file.parent for file in folder.parent.glob(f"*/{path.name}")]
        there = f", such as {max(complete, key=_written)}" if complete else ""
        return (
            f"{folder} has no state of the workers ({path.name}): the run ended while it saved, or"
            f" did not call save_workers(); resume from another checkpoint{there}"
        )
    saved = others[0].stem.rpartition("of")[2]
    if saved == str(count):
        return f"{path} is missing: copy it there, or take an earlier checkpoint"
    return (
        f"{folder} has the state of {saved} workers, and this run has {count}: as each worker owns"
        f" its state, start {saved}, or let processes host several,"
        " workers=Workers.current(local=...)"
    )


def _written(folder: Path) -> float:
    return folder.stat().st_mtime
