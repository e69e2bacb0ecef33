"""Layout of parameters in buckets, in the order in which messages leave."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ALIGNMENT = 64  # elements: every parameter starts at a whole word of a one-bit message


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: itself, unless it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class Slot(NamedTuple):
    """The place of a parameter in a bucket.

    Attributes:
        tensor, name: the parameter and its name (``""`` where unnamed).
        shape: of what is here of it: all, unless it is a DTensor.
        start, stop: its elements in a flat buffer.
        order: its dimensions as they lie in memory, outermost first; None if that is their order.
    """

    tensor: torch.nn.Parameter
    name: str
    shape: torch.Size
    start: int
    stop: int
    order: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        """Rows of the parameter as a matrix [outermost in memory, rest]; 1 of a vector."""
        shape, order = self.shape, self.order or (0,)
        return shape[order[0]] if len(shape) > 1 else 1

    @property
    def shape_in_memory(self) -> torch.Size:
        """The shape with the dimensions as they lie in memory."""
        return torch.Size(self.shape[dim] for dim in self.order or range(len(self.shape)))

    def flatten(self, values: Tensor) -> Tensor:
        """Return values in the parameter's shape as a vector, in the parameter's memory order."""
        return (values if self.order is None else values.permute(self.order)).flatten()

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of flat buffers ``[..., padded]``, in its shape."""
        part, shape = flat[..., self.start : self.stop], self.shape
        if self.order is None:
            return part.view((*part.shape[:-1], *shape))
        leading = range(part.dim() - 1)
        part = part.unflatten(-1, [shape[dim] for dim in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return part.permute(*leading, *(len(leading) + dim for dim in back))

    def standalone(self, view: Tensor) -> Tensor:
        """Return the same memory behind a storage of its own.

        What saves tensors writes whole storages, and asks which tensors share one; a parameter is
        to look as it did before.
        """
        if view.device.type not in ("cpu", "cuda"):
            return view
        alone = torch.from_dlpack(self.flatten(view))
        return self._replace(start=0, stop=alone.numel()).view(alone)


class Member(NamedTuple):
    """A parameter, its name (``""`` where unnamed), and the parameter group that it is in."""

    tensor: torch.nn.Parameter
    name: str
    group: dict[str, Any]


def lay_out(members: Iterable[Member], starts: Iterable[int] = ()) -> tuple[list[Slot], int]:
    """Lay parameters out one after the other, from multiples of 64 on, or from ``starts`` on.

    Returns their slots, and the elements of all, gaps included.
    """
    slots: list[Slot] = []
    start, given = 0, iter(starts)
    for tensor, name, _ in members:
        start = next(given, start)
        here = local_part(tensor)
        slots.append(Slot(tensor, name, here.shape, start, start + here.numel(), _order(here)))
        start += -(-here.numel() // ALIGNMENT) * ALIGNMENT
    return slots, max(start, ALIGNMENT)  # of tensors of which nothing is here: a gap


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of a dense tensor's dimensions in memory, None if it is contiguous or has gaps."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
    return order if tensor.permute(order).is_contiguous() else None


def share(tensor: Tensor, whole: bool) -> int:
    """Return a tensor's elements here; ``whole``: its part for each process of its shard group."""
    if whole and isinstance(tensor, DTensor):
        return -(-tensor.numel() // tensor.device_mesh.size())
    return local_part(tensor).numel()


def by_bucket(
    members: Iterable[Member],
    bucket_cap_mb: float | None = None,
    whole: bool = False,
    kind: Callable[[Member], Hashable] = lambda member: None,
    together: Callable[[Member], bool] = lambda member: False,
) -> list[list[Member]]:
    """Return members by bucket, without those that have no elements.

    Those of a bucket have one ``kind``, dtype and device, and groups that have taken as many steps.

    Args:
        whole: a tensor is a member wherever other processes have elements of it.
        together: whether those of a member's kind are all in one bucket.
    """
    kinds: dict[Hashable, list[Member]] = {}
    for member in members:
        tensor, group = member.tensor, member.group
        if share(tensor, whole):
            same = (tensor.dtype, tensor.device, group.get("steps"), kind(member))
            kinds.setdefault(same, []).append(member)
    parts: list[list[Member]] = []
    for alike in sorted(kinds.values(), key=lambda alike: not kind(alike[0])):  # matrices first
        cap = None if together(alike[0]) else bucket_cap_mb
        parts += cut(alike, cap, whole)
    return parts


def cut(
    members: list[Member], bucket_cap_mb: float | None, whole: bool = False
) -> list[list[Member]]:
    """Members by bucket, in the order in which a backward pass is done with them.

    Of several groups one often has the vectors of all layers, which do not decay. As these are
    ready last, they go last, unless that makes more buckets.
    """
    if bucket_cap_mb is None:
        return [members]
    backward = members[::-1]
    parts = _cut(backward, bucket_cap_mb, whole)
    if any(member.group is not members[0].group for member in members):
        backward.sort(key=lambda member: member.tensor.dim() < 2)
        parts = min(_cut(backward, bucket_cap_mb, whole), parts, key=len)
    return parts


def _cut(rest: list[Member], bucket_cap_mb: float, whole: bool) -> list[list[Member]]:
    """Cut members into buckets in their order.

    The first bucket is a quarter as large, so that messages start early, and each at most half of
    what is left, so that little is left to send when the backward pass is over.
    """
    cap, parts = bucket_cap_mb * 1e6, []
    while rest:
        sizes = [4 * share(member.tensor, whole) for member in rest]
        room = min(cap, max(cap / 8, sum(sizes) / 2)) if parts else cap / 4
        count = max(1, sum(total <= room for total in itertools.accumulate(sizes)))
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


def members_of(groups: Iterable[dict[str, Any]]) -> Iterator[Member]:
    """Return the parameters of groups, in order."""
    for group in groups:
        names = itertools.chain(group.get("param_names") or (), itertools.repeat(""))
        for tensor, name in zip(group["params"], names, strict=False):
            yield Member(tensor, name, group)
