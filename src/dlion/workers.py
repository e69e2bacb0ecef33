"""Workers: processes x virtual workers. The one place where ranks are known."""

import hashlib
import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlion.compat import (
    backends,
    cpu_group,
    forget_world,
    give_back,
    group_timeout,
    own_group,
)
from dlion.errors import TrainingFailed


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
        given back on all of them (:meth:`give_back`) is used again.
        """
        if self.processes == 1:
            return self
        cpu = self.with_cpu_group().group
        return replace(self, group=own_group(self.group, self.ranks, self._timeout, cpu))

    def with_cpu_group(self) -> "Workers":
        """The same workers with a process group that carries CPU tensors: if theirs does, with it.

        Otherwise, as NCCL carries none, with one of gloo. All processes must call it together. The
        group is made once and shared by all who ask, so only one thread at a time may use it.
        """
        if self.processes == 1 or "cpu" in backends(self.group):
            return self
        return replace(self, group=cpu_group(self.ranks, self._timeout))

    def give_back(self) -> None:
        """Let others use the group of :meth:`with_own_group`; nothing may be under way on it."""
        give_back(self.group)

    @property
    def _timeout(self) -> timedelta | None:
        """How long groups that are made here wait."""
        given = self.timeout
        return group_timeout(self.group) if given is None else timedelta(seconds=given)

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
    forget_world()  # every optimizer comes here before it imports that module of torch
    return workers or Workers.current(group=process_group)
