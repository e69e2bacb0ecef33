"""Whole tensors of what FSDP2 has sharded: each on one process of its shard group."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlion.core.layout import ALIGNMENT, Slot, deal


class Whole:
    """The tensors of a bucket, whole: for methods to which a part of a matrix is of no use.

    Where parameters are not sharded, flat buffers are returned as they are. Where FSDP2 has sharded
    them, processes of a shard group exchange parts in one all-to-all: each gets some of the tensors
    whole, computes with these, and gives the parts back. Tensors are dealt out, the largest first,
    to the process with the fewest elements. Processes of other replicas have the same tensors.

    Args:
        slots: parameters of a bucket.
        numel: elements of the bucket, gaps included.

    Attributes:
        shapes: of all tensors, wherever they are whole, in the order of memory.
        mine: which of them are whole here.
        slots: these, in a flat buffer as :meth:`gather` returns it.
        numel: elements of that buffer, gaps included.
    """

    def __init__(self, slots: Sequence[Slot], numel: int):
        self.slots, self.numel, self._shards = [*slots], numel, [*slots]
        self.shapes = [_in_memory(slot) for slot in slots]
        self.mine = [*range(len(slots))]
        first = slots[0].tensor
        self._mesh = first.device_mesh if isinstance(first, DTensor) else None
        if self._mesh is None:
            return
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
        """Return whole tensors, float32 ``[numel]``, of the bucket's flat buffer."""
        if self._mesh is None:
            return flat
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
        """Return the bucket's flat buffer, ``[padded]``, of whole tensors; gaps are zero."""
        if self._mesh is None:
            return whole
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
        """Return for each tensor whether a flag is set on any process, bool ``[T]``."""
        if self._mesh is None:
            return flags
        found = flags.to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._mesh.get_group())
        return found.bool()

    def _swap(self, parts: Sequence[Tensor], sent: list[int], received: list[int]) -> Tensor:
        assert self._mesh is not None
        outbox = torch.cat([part.flatten() for part in parts])
        inbox = outbox.new_empty(sum(received))
        dist.all_to_all_single(inbox, outbox, received, sent, group=self._mesh.get_group())
        return inbox


def _in_memory(slot: Slot) -> torch.Size:
    return torch.Size(slot.shape[dim] for dim in slot.order or range(len(slot.shape)))


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
