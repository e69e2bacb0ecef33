"""Parameters that FSDP2 has sharded: an optimizer sees and moves the local part of each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dlion.workers import Workers

EXCHANGE = "exchange."  # before the names of what an exchange keeps, in saved state


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: itself, if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def check_sharding(
    tensors: Sequence[Tensor],
    workers: Workers,
    method: str,
    whole_matrices: bool,
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
    if whole_matrices and overlap:
        raise ValueError(
            f"{method} gathers matrices that FSDP has sharded, which overlap=True cannot do during"
            " a backward pass: give overlap=False"
        )
    if whole_matrices and mesh.ndim > 1:
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
