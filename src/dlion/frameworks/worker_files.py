"""Files of each worker's own state, beside the files that a framework saves of process 0."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dlion.checks import EXCHANGE
from dlion.core.bucket import Bucket
from dlion.core.optimizer import DistributedOptimizer
from dlion.core.state import APART, arrange
from dlion.extensions.shards import ShardedBucket

KEY = "dlion worker"


class WorkerFiles:
    """Keeps what differs from worker to worker out of an optimizer's ``state_dict()``, in files.

    What that returns is then equal on all processes, so that process 0 may save it for all, as
    frameworks do. Call ``save`` and ``load`` on every process::

        files = WorkerFiles(optimizer)
        files.save(folder)  # beside the checkpoint
        files.load(folder)  # before or after load_state_dict()

    Raises:
        ValueError: if FSDP has sharded the parameters; if a file is missing, or of another number
            of workers or another save.
    """

    def __init__(self, optimizer: DistributedOptimizer):
        self.optimizer, self._own_of = optimizer, None
        optimizer.register_state_dict_post_hook(self._without_own)
        optimizer.register_load_state_dict_post_hook(self._compare)

    @property
    def awaited(self) -> bool:
        """Whether a state was loaded whose files are still to be read."""
        return self.optimizer.awaits is not None

    def _without_own(self, optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
        """Leave out per-worker state, and name the save that the rest belongs to."""
        if not self._is_apart:
            return packed
        index_of = {param: index for index, param in enumerate(optimizer.params)}
        for bucket in optimizer.buckets:
            for slot in bucket.slots:
                own = packed["state"].get(index_of[slot.tensor], {})
                for name in _own_names(bucket, own):
                    del own[name]
        packed["state"] = {key: value for key, value in packed["state"].items() if value != {}}
        rest = {key: value for key, value in packed.items() if key != "inner"}
        return rest | {APART: self._mark()}

    def _compare(self, optimizer: Any) -> None:
        """Note that the files of a loaded state were read before it."""
        if optimizer.awaits is not None and optimizer.awaits == self._own_of:
            optimizer.awaits = None

    @property
    def _is_apart(self) -> bool:
        """Whether the method has state that differs from worker to worker."""
        return any(bucket.own or bucket.exchange.state for bucket in self.optimizer.buckets)

    def _mark(self) -> list[int]:
        """Return numbers that identify a save: equal on all processes."""
        first = [view.flatten()[:64].cpu() for view in self.optimizer.common_state().values()]
        content = b"".join(view.view(torch.uint8).numpy().tobytes() for view in first)
        return [self.optimizer.param_groups[0]["steps"], zlib.crc32(content)]

    def _slots(self) -> list[tuple[int, Any, list[str]]]:
        """Index of each parameter in a bucket, its state, and the names that are a worker's own."""
        optimizer, found = self.optimizer, []
        index_of = {param: index for index, param in enumerate(optimizer.params)}
        for bucket in optimizer.buckets:
            if isinstance(bucket, ShardedBucket):
                raise ValueError(
                    "the parameters are sharded, and each shard has its own state: save and load"
                    " with torch.distributed.checkpoint (get_state_dict, set_state_dict)"
                )
            bucket.adopt_state(optimizer.state)
            for slot in bucket.slots:
                own = optimizer.state[slot.tensor]
                names = [name for name in _own_names(bucket, own) if name != "worker"]
                found.append((index_of[slot.tensor], own, names))
        return found

    def save(self, folder: Path, name: str = "optimizer") -> None:
        """Write a file for each local worker, whole or not at all."""
        optimizer = self.optimizer
        if not self._is_apart:
            return
        slots, workers = self._slots(), optimizer.workers
        inner = optimizer.get_extra_state() or []
        folder.mkdir(parents=True, exist_ok=True)
        for local, worker in enumerate(workers.ids):
            rows = {
                index: {key: own[key][local].clone() for key in names}
                for index, own, names in slots
            }
            content = {
                KEY: [worker, workers.count],
                APART: self._mark(),
                "groups": [
                    {key: group[key] for key in ("steps", "added")}
                    for group in optimizer.param_groups
                ],
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

    @torch.no_grad()
    def load(self, folder: Path, name: str = "optimizer") -> None:
        """Read the file of each local worker; nothing is changed before all are known to fit."""
        optimizer = self.optimizer
        if not self._is_apart:
            return
        workers, paths = optimizer.workers, []
        for worker in workers.ids:
            paths.append(_file(folder, name, worker, workers.count))
            if not paths[-1].exists():
                raise ValueError(_missing(folder, name, paths[-1], workers.count))
        files = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
        arrange(optimizer, files[0].get("groups", []))
        optimizer.include_unfrozen()
        slots = self._slots()
        for path, file in zip(paths, files, strict=True):
            of, state = file[APART], file["state"]
            if of != files[0][APART] or optimizer.awaits not in (None, of):
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
        self._own_of, optimizer.awaits = files[0][APART], None
        optimizer.set_extra_state(
            [list(states) for states in zip(*(f["inner"] for f in files), strict=True)]
        )


def _own_names(bucket: Bucket, names: Iterable[str]) -> list[str]:
    """Return which names of a parameter's state are of one worker alone."""
    own = {"worker", *bucket.own, *bucket.own_counters}
    return [name for name in names if name in own or str(name).startswith(EXCHANGE)]


def _file(folder: Path, name: str, worker: int, count: int) -> Path:
    return folder / f"{name}.worker{worker}of{count}.pt"


def _missing(folder: Path, name: str, path: Path, count: int) -> str:
    others = sorted(folder.glob(f"{name}.worker*of*.pt"))
    if not others:
        complete = [file.parent for file in folder.parent.glob(f"*/{path.name}")]
        there = f", such as {max(complete, key=_written)}" if complete else ""
        return (
            f"{folder} has no state of the workers ({path.name}): the run ended while it saved, or"
            f" did not save the workers' state; resume from another checkpoint{there}"
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
