"""Who the workers are: processes x virtual workers. The one place where ranks are known."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Workers:
    """n workers, spread evenly over processes that each host ``local`` virtual workers.

    Worker ids run process by process: process r hosts workers ``r * local .. (r + 1) * local - 1``.

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
                f"rank={self.rank} is not one of {self.processes} processes: a process outside of a"
                " group cannot be one of its workers"
            )

    @property
    def count(self) -> int:
        """n, the number of all workers."""
        return self.processes * self.local

    @property
    def ids(self) -> range:
        """The workers hosted by this process."""
        return range(self.rank * self.local, (self.rank + 1) * self.local)

    def with_own_group(self) -> "Workers":
        """The same workers with a process group of their own, to talk while others do."""
        if self.processes == 1:
            return self
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        limit = None if self.timeout is None else timedelta(seconds=self.timeout)
        return replace(self, group=dist.new_group(ranks, limit, use_local_synchronization=True))

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
