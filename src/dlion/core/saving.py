"""Saved state of an optimizer: tensors that know which part of them is on which process."""

import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dlion.core.bucket import Bucket
from dlion.exchange import Channel
from dlion.extensions.shards import EXCHANGE, local_part
from dlion.workers import Workers

States = dict[Tensor, dict[str, Tensor]]  # of each parameter, by name
APART = "workers_apart"  # the entry of a state without each worker's own: which save it is of
Elementwise = list[dict[str, Tensor]]  # of each bucket whose parameters are sharded, by name


CALLED, WRITTEN = 1, 2  # state_dict() was called; own state went to a file
_PATIENCE = {CALLED: 1, WRITTEN: 10}  # steps in which others may do so, from a thread say


@dataclass
class Files:
    """Bits of every message about saved state, since one process cannot know what others save.

    Attributes:
        here: what this process did with its own state, CALLED or WRITTEN or both, since all had.
        steps: steps since some process did and another did not.
    """

    here: int = 0
    steps: dict[int, int] = field(default_factory=lambda: {CALLED: 0, WRITTEN: 0})

    def compare(self, saved: Sequence[int]) -> None:
        """Read the bits of all senders; warn once where only some save their state."""
        for what, patience in _PATIENCE.items():
            did = [bool(bits & what) for bits in saved]
            if all(did):
                self.here, self.steps[what] = self.here & ~what, 0
            elif any(did):
                self.steps[what] += 1
                if self.steps[what] == patience and self.here & what:
                    warnings.warn(_ONE_FILE, stacklevel=2)
                    self.steps = dict.fromkeys(_PATIENCE, patience)


_ONE_FILE = (
    "the state of this process was saved, but not that of every other: each worker owns its"
    " momentum, so the run cannot resume from it. Save on every process: state_dict(),"
    " save_workers(FOLDER) (with workers_apart = True), or what dlion.frameworks needs (accelerate,"
    " transformers, lightning)"
)


class Placements:
    """Placement of state: per-worker state on the workers' processes, all of it on shards.

    Attributes:
        workers: the mesh of the processes that exchange messages; None for one process.
        shards: the mesh over which parameters are sharded; None if they are not.
        both: of the two, workers first; None if there is neither.
    """

    def __init__(self, workers: Workers, param: Tensor, files: Files):
        self.files = files
        self.shards = param.device_mesh if isinstance(param, DTensor) else None
        self.workers = self.both = None
        group: Any = workers.group or dist.group.WORLD
        device = param.device.type
        if workers.processes > 1:
            self.workers = DeviceMesh.from_group(group, device, mesh_dim_names=("workers",))
        if self.workers is None or self.shards is None:
            self.both = self.workers or self.shards
            return
        own = self.shards.mesh.flatten()[None]
        everyones = Channel(replace(workers, local=1).with_cpu_group()).gather(own)
        ranks = everyones.view(workers.processes, *self.shards.shape)
        names = ("workers", *(self.shards.mesh_dim_names or map(str, range(self.shards.ndim))))
        groups = [group, *self.shards.get_all_groups()]
        self.both = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)

    def own(self, rows: Tensor, param: Tensor | None = None) -> Tensor:
        """Per-worker state, ``[k, ...]`` -> ``[n, ...]``, of a parameter's shape or not."""
        if self.both is None:
            return rows
        over: list[Placement] = [Shard(0)] if self.workers else []
        shape = rows.shape[1:] if param is None else param.shape
        if self.shards is not None:
            placements = param.placements if isinstance(param, DTensor) else ()
            behind = [Shard(p.dim + 1) for p in placements if isinstance(p, Shard)]
            over += behind or [Replicate()] * self.shards.ndim
        count = self.workers.size() if self.workers else 1
        return _dtensor(rows, self.both, over, (len(rows) * count, *shape), self.files)

    def shared(self, values: Tensor, param: Tensor) -> Tensor:
        """State of a parameter's shape that is equal on all workers."""
        if not isinstance(param, DTensor):
            return values
        return _dtensor(values, param.device_mesh, list(param.placements), tuple(param.shape))

    def of_shard(self, rows: Tensor) -> Tensor:
        """Per-worker state that other shards have otherwise: ``[k, ...]`` -> ``[n, ...]``."""
        if self.workers is None:
            return rows
        shape = (len(rows) * self.workers.size(), *rows.shape[1:])
        return _dtensor(rows, self.workers, [Shard(0)], shape, self.files)


def _dtensor(
    here: Tensor,
    mesh: DeviceMesh,
    over: list[Placement],
    shape: tuple[int, ...],
    files: Files | None = None,
) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    # the same memory: pickle fails on a tensor that begins inside another
    here = torch.from_dlpack(here)
    size = torch.Size(shape)
    return _as_saved(
        DTensor.from_local(here, mesh, over, run_check=False, shape=size, stride=stride), files
    )


def of_workers(workers: Workers) -> Tensor:
    """Return the owners of per-worker state: ids and number of workers, int64 ``[k, 2]``."""
    rows = [[worker, workers.count] for worker in workers.ids]
    return torch.tensor(rows, device="cpu")


class _Saved(DTensor):
    """A DTensor that is pickled as the plain tensor of this process.

    So files that torch.save writes can be read without torch.distributed, by weights_only too.
    """

    files: Files | None

    def __reduce_ex__(self, proto: Any) -> Any:
        if self.files is not None:
            self.files.here |= WRITTEN
        return self._local_tensor.__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Saved":
        with torch.no_grad():
            memo[id(self)] = _as_saved(self.clone(), self.files)
        return memo[id(self)]


def _as_saved(tensor: Any, files: Files | None) -> Any:
    tensor.__class__, tensor.files = _Saved, files
    return tensor


def publish(bucket: Bucket, state: dict[Tensor, Any], workers: Workers) -> None:
    """Show the flat state of a bucket as ``state[param][name]``, as views.

    ``worker`` says whose the per-worker state is. What an exchange keeps for its bucket is with the
    first parameter, ``exchange.NAME``.
    """
    worker, published = of_workers(workers), []
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
        if not index and not bucket.sharded:
            own |= {EXCHANGE + name: rows for name, rows in bucket.exchange.state.items()}
        state[slot.tensor].update(own)  # others' entries stay
        published += [(slot.tensor, name, value) for name, value in own.items()]
    bucket.published = published


@torch.no_grad()
def distributed_state(
    params: Sequence[torch.nn.Parameter],
    buckets: Sequence[Bucket],
    workers: Workers,
    own_state: Sequence[str],
    files: Files,
) -> tuple[States, States, Elementwise]:
    """Return an optimizer's state, sharing its memory, as DTensors where processes differ.

    Beside it the same, as much as is here and where it is: on a mesh of GPUs a DTensor has a copy
    of what is in main memory. And what exchanges keep of each parameter: the state shares that,
    and they do not.

    Args:
        own_state: names of per-worker state, for parameters of which this process has nothing.
        files: is told where the state of this process is written to one.
    """
    placements = Placements(workers, params[0], files)
    found: States = {}
    local: States = {}
    flats: Elementwise = []
    for bucket in buckets:
        for param, name, value in bucket.published:
            if name in bucket.shared:
                kept = placements.shared(value, param)
            elif name in bucket.counters:
                kept = value
            else:
                kept = placements.own(value, param if name in bucket.own else None)
            found.setdefault(param, {})[name] = kept
            local.setdefault(param, {})[name] = value
        if placements.shards is not None:
            exchange, first = bucket.exchange, bucket.slots[0].tensor
            flats.append(exchange.elementwise())
            for name, flat in flats[-1].items():
                for slot in bucket.slots:
                    local[slot.tensor][EXCHANGE + name] = slot.view(flat)
                    kept = placements.shared(slot.view(flat), slot.tensor)
                    found[slot.tensor][EXCHANGE + name] = kept
            at = "x".join(map(str, placements.shards.get_coordinate() or ()))
            for name, rows in exchange.state.items():
                if name not in flats[-1]:
                    local[first][f"{EXCHANGE}{name}.{at}"] = rows
                    found[first][f"{EXCHANGE}{name}.{at}"] = placements.of_shard(rows)
    for param in params:  # of some parameters this process has an empty shard
        if isinstance(param, DTensor) and param.requires_grad and param not in found:
            here, k = local_part(param), workers.local
            rows = here.new_zeros(k, *here.shape, dtype=torch.float32)
            local[param] = dict.fromkeys(own_state, rows)
            found[param] = {name: placements.own(rows, param) for name in own_state}
    return found, local, flats


def own_names(bucket: Bucket, names: Iterable[str]) -> list[str]:
    """Return which names of a parameter's state are of one worker alone."""
    own = {"worker", *bucket.own, *bucket.own_counters}
    return [name for name in names if name in own or str(name).startswith(EXCHANGE)]


def mark(optimizer: Any) -> list[int]:
    """Return numbers that identify a save: equal on all processes."""
    first = [view.flatten()[:64].cpu() for view in optimizer.common_state().values()]
    content = b"".join(view.view(torch.uint8).numpy().tobytes() for view in first)
    return [optimizer.param_groups[0]["steps"], zlib.crc32(content)]


@torch.no_grad()
def put_back(buckets: Sequence[Bucket], local: States, flats: Elementwise, saved: States) -> None:
    """Copy saved state into an optimizer; :func:`distributed_state` leads to its own."""
    for param, tensors in saved.items():
        for name, value in tensors.items():
            local_part(local[param][name]).copy_(local_part(value))
    sharded = (bucket.exchange for bucket in buckets if bucket.sharded)
    for exchange, values in zip(sharded, flats, strict=True):
        exchange.set_elementwise(values)
