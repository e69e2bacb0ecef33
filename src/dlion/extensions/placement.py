"""State that several processes have parts of, as DTensors, which know which part is where.

So torch.distributed.checkpoint saves what workers own, and gives it back on other processes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dlion.core.state import Placements
from dlion.extensions.protocol import Extension
from dlion.workers import Workers


class OnWorkers(Extension):
    """Saves what workers own as DTensors, where they are on several processes."""

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        if optimizer.workers.processes > 1:
            optimizer.placements = WorkerPlacements


class WorkerPlacements(Placements):
    """What workers own is along the processes that exchange messages.

    Attributes:
        workers: the mesh of these processes; None for one process.
    """

    def __init__(self, workers: Workers, param: Tensor):
        super().__init__(workers, param)
        self.workers: DeviceMesh | None = None
        if workers.processes > 1:
            device, group = param.device.type, workers.group or dist.group.WORLD
            assert group is not None
            self.workers = DeviceMesh.from_group(group, device, mesh_dim_names=("workers",))

    def own(self, rows: Tensor, param: Tensor | None = None) -> Tensor:
        if self.workers is None:
            return rows
        shape = (len(rows) * self.workers.size(), *rows.shape[1:])
        return placed(rows, self.workers, [Shard(0)], shape)


def placed(here: Tensor, mesh: DeviceMesh, over: list[Placement], shape: tuple[int, ...]) -> Tensor:
    """Return a DTensor of this shape, of which ``here`` is this process's part."""
    stride = torch.empty(shape, device="meta").stride()
    here = torch.from_dlpack(here)  # the same memory: pickle fails on a part of another tensor
    size = torch.Size(shape)
    return _saved(DTensor.from_local(here, mesh, over, run_check=False, shape=size, stride=stride))


class _Saved(DTensor):
    """A DTensor that is pickled as the plain tensor of this process.

    So files that torch.save writes can be read without torch.distributed, by weights_only too.
    """

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._local_tensor.__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Saved":
        with torch.no_grad():
            memo[id(self)] = _saved(self.clone())
        return memo[id(self)]


def _saved(tensor: Any) -> Any:
    tensor.__class__ = _Saved
    return tensor
