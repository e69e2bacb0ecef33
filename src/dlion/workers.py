"""Who the workers are: processes x virtual workers. The one place where ranks are known."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FunctionType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn import functional


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
        timeout: seconds to wait for another process, in groups made here; None: torch's choice.
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

    @property
    def count(self) -> int:
        """n, the number of all workers."""
        return self.processes * self.local

    @property
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

        All processes must call it together. A group that was given back on all of them
        (:meth:`give_back`) is used again: making groups costs threads and sockets for good.
        """
        if self.processes == 1:
            return self
        world = dist.group.WORLD
        for key in [key for key in _pools if key[0] is not world]:  # of a world that has ended
            del _pools[key]
        pool = _pools.setdefault((world, tuple(self.ranks), self.timeout), _Pool())
        device = "cpu" if "cpu" in backends(self.group) else "cuda"
        free = torch.tensor([False, *pool.free], dtype=torch.int64, device=device)
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self.group)
        common = free[1:].nonzero().flatten().tolist()
        if not common:
            limit = None if self.timeout is None else timedelta(seconds=self.timeout)
            # a name that counts groups is the safer one, but all processes have to be there
            some = self.processes < dist.get_world_size()
            group = dist.new_group(self.ranks, limit, use_local_synchronization=some)
            pool.groups.append(group)  # pyrefly: ignore[bad-argument-type] - this process is in it
            pool.free.append(False)
            common = [len(pool.groups) - 1]
        pool.free[common[0]] = False
        return replace(self, group=pool.groups[common[0]])

    def give_back(self) -> None:
        """Let others use the group of :meth:`with_own_group`; nothing may be under way on it."""
        for pool in _pools.values():
            if self.group in pool.groups:
                pool.free[pool.groups.index(self.group)] = True

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
    """Return what carries tensors of a group, by type of device: ``{"cpu": "gloo", ...}``."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


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
        raise ValueError(f"{' and '.join(given)} both say who takes part: give one of them")
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
    return workers or Workers.current(group=process_group)


def _forget_world() -> None:
    """Take a process group out of default arguments of torch, which would keep it for good.

    torch.distributed.nn.functional, which every torch.optim.Optimizer imports, has ``group.WORLD``
    for a default: None if there is no group yet, else the group there is. Threads of such a group
    outlive destroy_process_group(), and one that frees its last tensor while Python ends aborts the
    process ("terminate called without an active exception").
    """
    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


_forget_world()


@dataclass
class _Pool:
    """Groups of the same processes, and which of them nobody uses here."""

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)


_pools: dict[tuple[dist.ProcessGroup | None, tuple[int, ...], float | None], _Pool] = {}
