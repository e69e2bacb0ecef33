"""Extensions of the step: what PyTorch, and bad days, ask of an optimizer. One file each."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlion.checks import checked
from dlion.extensions.protocol import Extension
from dlion.workers import Workers

DenseWire = Literal["bf16", "float32"]
NonfiniteWay = Literal["stop", "skip"]


class Options(TypedDict, total=False):
    """Keyword arguments of every optimizer that attach extensions, see :func:`standard`."""

    manager: Any
    dense_group: dist.ProcessGroup | None
    dense_wire: DenseWire
    overlap: bool
    nonfinite: NonfiniteWay | None
    stochastic_rounding: bool


class Common(Options, total=False):
    """Keyword arguments of every optimizer, see :class:`dlion.DistributedOptimizer`."""

    workers: Workers | None
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    seed: int
    bucket_cap_mb: float | Literal["auto"] | None
    extensions: Sequence[Extension]


@checked
def standard(
    others: Sequence[Extension],
    manager: Any = None,
    dense_group: dist.ProcessGroup | None = None,
    dense_wire: DenseWire = "bf16",
    overlap: bool = False,
    nonfinite: NonfiniteWay | None = "stop",
    stochastic_rounding: bool = False,
) -> list[Extension]:
    """Return the extensions of an optimizer.

    Args:
        others: the method's and the user's own.
        manager: of torchft, from :func:`dlion.join`: workers come and go during training.
            ``zero_grad()`` then begins a step: it asks who is there (``workers.rank``,
            ``workers.count``), and a new worker gets parameters, shared state and hyperparameters
            of a peer; its own momenta begin at zero. ``step()`` commits only if all have all
            answers; otherwise it changes nothing, ``committed`` is False, and the loop resumes at
            ``zero_grad()``. A learning rate schedule is to step only where ``committed`` is true.
        dense_group: processes (of a node, say) that are one worker together: they average their
            gradients in ``dense_wire``, and one of them exchanges messages for all. Then
            process_group or mesh is of the processes that have the same place in other nodes; with
            manager this is the group that ``join()`` was given.
            This is another method than a vote of all processes, as nodes are the voters (fewer,
            with less noise in their gradients), and better where a node's own links are so much
            faster than those between nodes that a mean costs less than the bytes it saves.
        dense_wire: bf16, or float32.
        overlap: let messages leave during the (last virtual worker's) backward pass, bucket by
            bucket, each as soon as its gradients and the bucket before it are there; give
            ``bucket_cap_mb`` too. Then what changes gradients between ``backward()`` and
            ``step()``, clipping say, comes too late and is refused, and all but the last of several
            backward passes per step must run in ``no_sync()``. The result is bit-identical
            (for equal buckets, where a method draws random numbers). Over NCCL beside FSDP2 two
            communicators are then in use at once, which NCCL allows as long as the kernels of both
            fit on the GPU.
        nonfinite: what to do about a parameter whose gradient's norm is NaN or infinite. ``stop``
            raises TrainingFailed on all workers before the parameters of that bucket are updated
            (state may hold the gradient by then: resume from a checkpoint only); ``skip`` treats it
            as a parameter without a gradient there, in that step, and warns once; None sends it as
            it is, which a sign hides: a momentum that has taken up NaN keeps it, and its parameters
            stop moving or move at random. With methods of local steps ``stop`` raises on
            the worker alone, and the others fail at the exchange that waits for it. With
            ``manager`` it always raises on the worker alone, and the others continue. With
            ``overlap`` on a GPU, ``skip`` makes the backward pass wait for the norms of each
            bucket; nothing else does.
        stochastic_rounding: round updated bfloat16 parameters up or down at random, so that the
            mean of many small steps is right. All workers draw the same. Rounding to the nearest,
            which is torch's, loses a step below 1/512 of its parameter (a warning says so); a sign
            step is as small for all. It takes no memory but float32 values of a bucket during its
            update. Parameters of other dtypes, and methods of local steps, which keep float32
            parameters, are not concerned.
    """
    from dlion.extensions.grad_scaler import GradScaling
    from dlion.extensions.lockstep import Lockstep
    from dlion.extensions.pacing import Pacing
    from dlion.extensions.placement import OnWorkers
    from dlion.extensions.rounding import Rounding
    from dlion.extensions.shards import Shards

    found: list[Extension] = [Shards(), Lockstep(), OnWorkers(), Pacing()]
    if dense_group is not None:
        from dlion.extensions.dense_group import DenseGroup

        found.append(DenseGroup(dense_group, dense_wire, elastic=manager is not None))
    if manager is None:
        found.append(GradScaling())
    if nonfinite is not None:
        from dlion.extensions.nonfinite import Nonfinite

        found.append(Nonfinite(nonfinite))
    found.append(Rounding(stochastic_rounding))
    if overlap:
        from dlion.extensions.overlap import Overlap

        found.append(Overlap(deferred=dense_group is not None))
    found += others
    if manager is not None:
        from dlion.elastic.worker import Elastic

        found.append(Elastic(manager, dense_group))
    return found
