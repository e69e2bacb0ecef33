"""Workers: processes x virtual workers. The one place where ranks are known."""

import atexit
import hashlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dlion.errors import TrainingFailed

_FREEING = 1.0  # seconds, at most, that threads take to free what they have carried


@dataclass(frozen=True)
class Workers:
    """n workers, spread evenly over processes that each host ``local`` virtual workers.

    Worker ids run process by process: process r hosts workers ``r * local .. (r + 1) * local - 1``.

    >>> Workers(rank=1, processes=2, local=4).ids
    range(4, 8)

    Attributes:
        rank: number of this process, 0 to ``processes - 1``.
        processes: number of processes.
        local: virtual workers in each process (1: ordinary distributed training).
        group: the process group; None means the default group, or no group for one process.
        timeout: seconds to wait for another process, in groups made here; None: as in ``group``.
    """

    rank: int = 0
    processes: int = 1
    local: int = 1
    group: dist.ProcessGroup | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.local < 1:
            raise ValueError(
                f"local={self.local} is not possible: a process hosts 1 worker or more"
            )
        if not 0 <= self.rank < self.processes:
            raise ValueError(
                f"rank={self.rank} is not possible in {self.processes} processes: a process outside"
                " of a group cannot be one of its workers"
            )

    @cached_property
    def count(self) -> int:
        """n, the number of all workers."""
        return self.processes * self.local

    @cached_property
    def ids(self) -> range:
        """The workers hosted by this process."""
        return range(self.rank * self.local, (self.rank + 1) * self.local)

    @property
    def ranks(self) -> list[int]:
        """The processes, by their numbers in the default group; 0 where there is none."""
        if self.processes > 1:
            return dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return [dist.get_rank() if dist.is_initialized() else 0]

    def with_own_group(self) -> "Workers":
        """The same workers with a process group of their own, to talk while others do.

        It has the backends of their group. All processes must call it together. A group that was
        given back on all of them (:meth:`give_back`) is used again: making groups costs threads and
        sockets for good.
        """
        if self.processes == 1:
            return self
        backend = dist.get_backend_config(self.group)
        pool = self._made_here().own.setdefault(backend, _Pool())
        free = torch.tensor([False, *pool.free], dtype=torch.int64)
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self.with_cpu_group().group)
        common = free[1:].nonzero().flatten().tolist()
        if not common:
            as_world = backend == dist.get_backend_config()
            pool.groups.append(self._new_group(None if as_world else backend))
            pool.free.append(False)
            common = [len(pool.groups) - 1]
        pool.free[common[0]] = False
        return replace(self, group=pool.groups[common[0]])

    def with_cpu_group(self) -> "Workers":
        """The same workers with a process group that carries CPU tensors: if theirs does, with it.

        Otherwise, as NCCL carries none, with one of gloo. All processes must call it together. The
        group is made once and shared by all who ask, so only one thread at a time may use it.
        """
        if self.processes == 1 or "cpu" in backends(self.group):
            return self
        groups = self._made_here()
        groups.cpu = groups.cpu or self._new_group("gloo")
        return replace(self, group=groups.cpu)

    def give_back(self) -> None:
        """Let others use the group of :meth:`with_own_group`; nothing may be under way on it."""
        for groups in [groups for there in _groups.values() for groups in there.values()]:
            for pool in groups.own.values():
                if self.group in pool.groups:
                    pool.free[pool.groups.index(self.group)] = True

    def _made_here(self) -> "_Groups":
        """Return the groups of these processes."""
        assert dist.group.WORLD is not None
        there = _groups.setdefault(dist.group.WORLD, {})
        return there.setdefault((tuple(self.ranks), self._limit), _Groups())

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        """Make a process group of these processes; ``backend`` None: that of all processes."""
        some = self.processes < dist.get_world_size()
        with _no_split(), _naming(self._next_name()) if some else nullcontext():
            group = dist.new_group(self.ranks, self._limit, backend, use_local_synchronization=some)
        assert isinstance(group, dist.ProcessGroup)  # as this process is in it
        return group

    def _next_name(self) -> str:
        """Return a name that no group has yet: these processes, and how many they have made."""
        assert dist.group.WORLD is not None
        made = _made.setdefault(dist.group.WORLD, Counter())
        which = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        made[which] += 1
        return f"dlion {which} {made[which]}"

    @property
    def _limit(self) -> timedelta | None:
        """Time that groups made here wait; torch would let them wait 10 or 30 minutes."""
        if self.timeout is not None:
            return timedelta(seconds=self.timeout)
        group = self.group or dist.group.WORLD
        assert group is not None
        for device in backends(group):
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            if options is not None:
                return options._timeout
        return None

    @classmethod
    def current(
        cls,
        local: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> "Workers":
        """Return the workers of the initialised process group, or else of this process alone."""
        if not dist.is_initialized():
            return cls(local=local)
        return cls(dist.get_rank(group), dist.get_world_size(group), local, group, timeout)


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group by type of device: ``{"cpu": "gloo", ...}``."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def check_gpus(workers: Workers, device: torch.device) -> None:
    """Refuse processes that share a GPU, where NCCL would carry their messages.

    All processes must call it together.

    Args:
        workers: whose processes.
        device: of this process's parameters.

    Raises:
        TrainingFailed: on all processes, naming two that share a GPU.
    """
    if workers.processes > 1 and backends(workers.group).get(device.type) == "nccl":
        check_different(workers, gpu_of(device))


def check_different(workers: Workers, gpu: str) -> None:
    """Refuse two processes with one ``gpu``, a name of :func:`gpu_of`."""
    own = torch.tensor([*hashlib.sha256(gpu.encode()).digest()], dtype=torch.uint8, device="cpu")
    gpus = [torch.empty_like(own) for _ in range(workers.processes)]
    dist.all_gather(gpus, own, group=workers.with_cpu_group().group)
    first: dict[tuple[int, ...], int] = {}
    for process, digest in zip(workers.ranks, gpus, strict=True):
        earlier = first.setdefault(tuple(digest.tolist()), process)
        if earlier != process:
            raise TrainingFailed(
                f"processes {earlier} and {process} share a GPU, which NCCL does not allow:"
                ' call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before moving anything'
                " to CUDA, or use gloo"
            )


def gpu_of(device: torch.device) -> str:
    """Return a name of a GPU that no other has; as NCCL does, it trusts NCCL_HOSTID."""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def voters(
    workers: Workers | None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> Workers:
    """Return the workers that one of these names, or else those of the default process group.

    Raises:
        ValueError: if several name them; if the mesh has several dimensions, or this process is not
            in the mesh or the group; if they are of one process of many.
    """
    ways = {"workers": workers, "process_group": process_group, "mesh": mesh}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both name the participants: give one of them")
    if mesh is not None:
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or [str(size) for size in mesh.shape]
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions ({', '.join(names)}): give the one along"
                f" which processes exchange messages, as mesh=mesh[{names[0]!r}]"
            )
        process_group = mesh.get_group()
    there = dist.get_world_size() if dist.is_initialized() else 1
    if workers is not None and workers.processes == 1 and workers.group is None and there > 1:
        raise ValueError(
            f"Workers(local={workers.local}) has one process, but there are {there}, each of which"
            f" would train alone: type Workers.current(local={workers.local}), or give it this"
            " process's own group, of torch.distributed.new_subgroups(1)"
        )
    _forget_world()  # every optimizer comes here before it imports that module of torch
    return workers or Workers.current(group=process_group)


def _forget_world() -> None:
    """Take a process group out of default arguments of torch, which would keep it for good.

    torch.distributed.nn.functional, which every torch.optim.Optimizer imports, has ``group.WORLD``
    for a default: None if there is no group yet, else the group there is. Threads of such a group
    outlive destroy_process_group(), and one that frees its last tensor while Python ends aborts the
    process ("terminate called without an active exception").
    """
    from torch.distributed.nn import functional  # above, our own import would do the same

    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


@atexit.register
def _let_gloo_finish() -> None:
    """Let gloo's threads free what they have carried, before Python ends, if a group is left.

    See :func:`_forget_world`: an error right after a collective may end Python that soon.
    """
    end, quiet = time.monotonic() + _FREEING, 0
    while quiet < 2 and (states := _gloo_threads()) and time.monotonic() < end:
        time.sleep(0.001)  # in which one that waits for Python's lock gets it
        quiet = 0 if states.strip("S") else quiet + 1


def _gloo_threads() -> str:
    """Return the states of gloo's threads, a letter each, as Linux tells them (``S``: sleeps)."""
    states = ""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            text = stat.read_text()
            states += text.rpartition(") ")[2][0] if "gloo" in text else ""
    return states


@contextmanager
def _no_split() -> Iterator[None]:
    """Let torch make a group without splitting the communicator of all processes.

    After ``init_process_group(device_id=...)`` torch makes each group by ncclCommSplit, for which
    all processes of the world have to come: those outside of the group do not, and the others would
    wait for ever.
    """
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Give a group this name, by which its processes find each other.

    torch would count the groups that a process is in (2.13), or has made (2.14): those of a group
    differ in that if one is in another group besides, and they would wait for each other in vain.
    """
    own = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = cast(Any, lambda ranks, use_hashed_name: name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = own


@dataclass
class _Pool:
    """Groups of the same processes, and the unused ones among them."""

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)


@dataclass
class _Groups:
    """Groups that were made of the same processes: their own, by backends, and that for CPUs."""

    own: dict[str, _Pool] = field(default_factory=dict)
    cpu: dist.ProcessGroup | None = None


# of a world, which goes with its groups, and of processes in it, by how long they wait
_groups: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], timedelta | None], _Groups]
] = WeakKeyDictionary()
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
