"""Parameters that FSDP2 has sharded: an optimizer sees and moves the local part of each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dlion.checks import EXCHANGE
from dlion.core.bucket import Bucket, Full, Shown
from dlion.core.layout import ALIGNMENT, Slot, local_part
from dlion.exchange import Channel
from dlion.extensions.placement import WorkerPlacements, placed
from dlion.extensions.protocol import Extension
from dlion.workers import Workers


class Shards(Extension):
    """Lets an optimizer train what FSDP2 has sharded over one dimension of a mesh.

    Its workers are replicas then, and messages go along the other dimension::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = DLion(model.parameters(), lr=1e-4, mesh=mesh["replicate"])

    FSDP then averages gradients inside a replica alone, and each process exchanges messages about
    its shards with those that hold the same. Parameters stay where FSDP keeps them; state, and a
    copy of the parameters, is of the local shards. Methods that need whole matrices (GMuon,
    SignMuon, PowerSGD, DeMo, ...) gather them inside a replica, each on one of its processes. A
    scale or a number of entries that another method takes of each tensor it takes of each shard
    (LionCub, TernGrad, DGC, the first step size of DLionADM, ...), so for these methods results
    depend on the shards. Voters are replicas here, whose gradients have less noise than those of
    single processes: that is better where links between nodes are slow, and another method than a
    vote of all processes.
    """

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        optimizer = self.optimizer
        tensors = optimizer.params
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            overlap = not optimizer.schedule.at_step
            name, whole = optimizer.__class__.__name__, optimizer.needs_full_matrices
            check_sharding(tensors, optimizer.workers, name, whole, overlap)
            optimizer.bucket_type, optimizer.placements = ShardedBucket, ShardedPlacements


class ShardedPlacements(WorkerPlacements):
    """Where state is: what workers own on their processes, all of it on the shards'.

    Attributes:
        shards: the mesh over which parameters are sharded.
        both: that and the workers' mesh, workers first.
    """

    def __init__(self, workers: Workers, param: Tensor):
        super().__init__(workers, param)
        assert isinstance(param, DTensor)
        self.shards: DeviceMesh = param.device_mesh
        self.both = self.shards
        if self.workers is None:
            return
        own = self.shards.mesh.flatten()[None]
        everyones = Channel(replace(workers, local=1).with_cpu_group()).gather(own)
        ranks = everyones.view(workers.processes, *self.shards.shape)
        names = ("workers", *(self.shards.mesh_dim_names or map(str, range(self.shards.ndim))))
        groups: Any = [self.workers.get_group(), *self.shards.get_all_groups()]
        device = param.device.type
        self.both = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)

    def own(self, rows: Tensor, param: Tensor | None = None) -> Tensor:
        over: list[Placement] = [Shard(0)] if self.workers else []
        shape = rows.shape[1:] if param is None else param.shape
        placements = param.placements if isinstance(param, DTensor) else ()
        behind = [Shard(p.dim + 1) for p in placements if isinstance(p, Shard)]
        over += behind or [Replicate()] * self.shards.ndim
        count = self.workers.size() if self.workers else 1
        return placed(rows, self.both, over, (len(rows) * count, *shape))

    def shared(self, values: Tensor, param: Tensor) -> Tensor:
        assert isinstance(param, DTensor)
        return placed(values, param.device_mesh, list(param.placements), tuple(param.shape))

    def of_shard(self, rows: Tensor) -> Tensor:
        """Per-worker state that other shards have otherwise: ``[k, ...]`` -> ``[n, ...]``."""
        return super().own(rows)


class ShardedBucket(Bucket):
    """The local shards of parameters, of which ``params`` is a copy.

    What its exchange keeps for each parameter is saved as state of that parameter; the rest is
    saved for each place on the mesh of the shards.
    """

    @property
    def tensors(self) -> list[Tensor]:
        return [local_part(slot.tensor) for slot in self.slots]

    def raw_grads(self) -> list[Tensor | None]:
        return [None if grad is None else local_part(grad) for grad in super().raw_grads()]

    @cached_property
    def full(self) -> Full:
        return Gathered(self.slots, self.numel)

    def _stays(self, tensor: Tensor) -> bool:
        return True

    @property
    def exchange_state(self) -> dict[str, Tensor]:
        return {}

    def unpublished(
        self, placements: ShardedPlacements
    ) -> tuple[list[Shown], list[Callable[[], None]]]:
        """As in :class:`Bucket`; all processes call it together."""
        exchange, first = self.exchange, self.slots[0].tensor
        found: list[Shown] = []
        elementwise = exchange.elementwise()
        for name, flat in elementwise.items():
            for slot in self.slots:
                here, param = slot.view(flat), slot.tensor
                found.append((param, EXCHANGE + name, here, placements.shared(here, param)))
        at = "x".join(map(str, placements.shards.get_coordinate() or ()))
        for name, rows in exchange.state.items():
            if name not in elementwise:
                found.append((first, f"{EXCHANGE}{name}.{at}", rows, placements.of_shard(rows)))
        return found, [partial(exchange.set_elementwise, elementwise)]

    @staticmethod
    def absent(
        optimizer: Any, placements: ShardedPlacements
    ) -> dict[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        placed = {slot.tensor for bucket in optimizer.buckets for slot in bucket.slots}
        found: dict[Tensor, dict[str, tuple[Tensor, Tensor]]] = {}
        for param in optimizer.params:
            if param.requires_grad and param not in placed:
                empty = local_part(param)
                shape = (optimizer.owner.local, *empty.shape)
                rows = empty.new_zeros(shape, dtype=torch.float32)
                entry = rows, placements.own(rows, param)
                found[param] = dict.fromkeys(optimizer.own_state, entry)
        return found


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal things of these sizes to so many, as evenly as possible; return their places."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(index)
        loads[lightest] += sizes[index]
    return [sorted(part) for part in dealt]


class Gathered(Full):
    """The tensors of a bucket as wholes, each on one process of its shard group.

    The processes exchange parts in one all-to-all: each gets some of the tensors whole, computes
    with these, and gives the parts back. Tensors are dealt out, the largest first, to the process
    with the fewest elements. Processes of other replicas have the same tensors.
    """

    def __init__(self, slots: Sequence[Slot], numel: int):
        first, self._shards = slots[0].tensor, [*slots]
        assert isinstance(first, DTensor)
        self._mesh = first.device_mesh
        rank, count = self._mesh.get_local_rank(), self._mesh.size()
        self.shapes = [slot.tensor.shape for slot in slots]
        self._shapes = [_shapes(slot.tensor, count) for slot in slots]
        self._dealt = deal([slot.tensor.numel() for slot in slots], count)
        self.mine = self._dealt[rank]
        sizes = [[shape.numel() for shape in shapes] for shapes in self._shapes]
        self._out = [sum(sizes[index][rank] for index in part) for part in self._dealt]
        self._in = [sum(sizes[index][process] for index in self.mine) for process in range(count)]
        self.slots, self.numel = [], 0
        for index in self.mine:
            tensor, name = slots[index].tensor, slots[index].name
            stop = self.numel + tensor.numel()
            self.slots.append(Slot(tensor, name, tensor.shape, self.numel, stop, None))
            self.numel = -(-stop // ALIGNMENT) * ALIGNMENT
        self.numel = max(self.numel, ALIGNMENT)  # messages about nothing have headers, too

    def gather(self, flat: Tensor) -> Tensor:
        parts = [self._shards[index].view(flat) for part in self._dealt for index in part]
        arrived = self._swap(parts, self._out, self._in)
        pieces: dict[int, list[Tensor]] = {index: [] for index in self.mine}
        for process, part in enumerate(arrived.split(self._in)):
            shapes = {index: self._shapes[index][process] for index in self.mine}
            cut = part.split([shape.numel() for shape in shapes.values()])
            for (index, shape), piece in zip(shapes.items(), cut, strict=True):
                pieces[index].append(piece.view(shape))
        whole = flat.new_zeros(self.numel)
        for slot, found in zip(self.slots, pieces.values(), strict=True):
            torch.cat(found, _dim(slot.tensor), out=slot.view(whole))
        return whole

    def scatter(self, whole: Tensor, padded: int) -> Tensor:
        parts = [
            slot.view(whole).split(
                [shape[_dim(slot.tensor)] for shape in self._shapes[index]], _dim(slot.tensor)
            )
            for index, slot in zip(self.mine, self.slots, strict=True)
        ]
        by_process = [piece for pieces in zip(*parts, strict=True) for piece in pieces]
        arrived = self._swap([whole[:0], *by_process], self._in, self._out)
        flat = whole.new_zeros(padded)
        here = [self._shards[index] for part in self._dealt for index in part]
        cut = arrived.split([slot.stop - slot.start for slot in here])
        for slot, piece in zip(here, cut, strict=True):
            slot.view(flat).copy_(piece.view(slot.shape))
        return flat

    def anywhere(self, flags: Tensor) -> Tensor:
        found = flags.to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._mesh.get_group())
        return found.bool()

    def _swap(self, parts: Sequence[Tensor], sent: list[int], received: list[int]) -> Tensor:
        outbox = torch.cat([part.flatten() for part in parts])
        inbox = outbox.new_empty(sum(received))
        dist.all_to_all_single(inbox, outbox, received, sent, group=self._mesh.get_group())
        return inbox


def _dim(tensor: Tensor) -> int:
    """Return the dimension over which a tensor is sharded."""
    assert isinstance(tensor, DTensor)
    (placement,) = tensor.placements
    return placement.dim  # pyrefly: ignore[missing-attribute] - check_sharding wants shards


def _shapes(tensor: Tensor, count: int) -> list[torch.Size]:
    """Return the shape of every process's part of a sharded tensor."""
    dim = _dim(tensor)
    sizes = [len(part) for part in torch.empty(tensor.shape[dim], device="meta").chunk(count)]
    sizes += [0] * (count - len(sizes))
    return [torch.Size([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]) for size in sizes]


def check_sharding(
    tensors: Sequence[Tensor],
    workers: Workers,
    method: str,
    needs_full_matrices: bool,
    overlap: bool,
) -> None:
    """Refuse shards of which the method or the voters could make nothing.

    Raises:
        ValueError: if the method needs whole matrices and cannot gather them; if some parameters
            are sharded and others not, or over different meshes; if FSDP averages the gradients of
            the voters; if voters hold different shards.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        return
    mesh = sharded[0].device_mesh
    if len(sharded) < len(tensors):
        raise ValueError(
            f"{len(tensors) - len(sharded)} of {len(tensors)} parameters are not sharded, so"
            " their gradients are not averaged inside a worker: call fully_shard on the whole model"
        )
    if any(tensor.device_mesh != mesh for tensor in sharded):
        raise ValueError(
            "the parameters are sharded over different meshes: make an optimizer for those of each"
        )
    if any(not isinstance(placement, Shard) for t in sharded for placement in t.placements):
        raise ValueError(
            f"the parameters are replicated over a dimension of their mesh {_dimensions(mesh)},"
            " where gradients are averaged before any message is made: call fully_shard with the"
            " dimension of the shards alone (mesh['shard']) and give this optimizer the other"
            " (mesh=mesh['replicate'])"
        )
    if needs_full_matrices and overlap:
        raise ValueError(
            f"{method} gathers matrices that FSDP has sharded, which overlap=True cannot do during"
            " a backward pass: give overlap=False"
        )
    if needs_full_matrices and mesh.ndim > 1:
        raise ValueError(
            f"{method} gathers matrices inside one dimension of a mesh, and these are sharded over"
            f" {_dimensions(mesh)}: call fully_shard with a mesh of one dimension"
        )
    if len({*workers.ranks} & {*mesh.mesh.flatten().tolist()}) > 1:
        raise ValueError(
            "the processes that are to vote hold different shards of the parameters: give the mesh"
            " (or process_group) of the processes that hold the same, mesh=mesh['replicate']"
        )


def _dimensions(mesh: dist.DeviceMesh) -> str:
    return f"({', '.join(mesh.mesh_dim_names or map(str, mesh.shape))})"
