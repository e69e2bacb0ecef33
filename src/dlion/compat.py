"""Faults and gaps of torch that this package works around, a function each.

Each names the report where there is one, and the release without the fault (open: none yet).
"""

import atexit
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_FREEING = 1.0  # seconds, at most, that gloo's threads take to free what they have carried
# of a world, which go with it: names of groups, and groups with whether they are unused
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
_pools: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dict[dist.ProcessGroup, bool]]] = (
    WeakKeyDictionary()
)


def all_gather_single(
    everything: Tensor, part: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Gather tensors into one, under the name that the function has.

    torch 2.13 renamed all_gather_into_tensor, which warns since (pytorch #186123). Ends with the
    support of torch 2.12.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everything, part, group=group)


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long a group waits, None if it does not say.

    torch has no public way to ask, and new groups wait for 10 or 30 minutes whatever their world
    does. Seen in 2.11 to 2.13; no report known; open.
    """
    group = group or dist.group.WORLD
    assert group is not None
    for device in backends(group):
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            return options._timeout
    return None


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group by type of device: ``{"cpu": "gloo", ...}``.

    torch tells them as text alone.
    """
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def own_group(
    like: dist.ProcessGroup | None,
    ranks: Sequence[int],
    timeout: timedelta | None,
    cpu: dist.ProcessGroup | None,
) -> dist.ProcessGroup:
    """Return an unused group with the backends of ``like``; ``ranks`` call this together.

    One that all have given back is used again, and none is destroyed: NCCL's wait for each other in
    destroy_process_group, in one order on all processes (as in pytorch #190396, whose cause is
    mended), and optimizers end in any order. Open.

    Args:
        like: the group of ``ranks``; None: that of all processes.
        cpu: a group of ``ranks`` for CPU tensors, to agree on one.
    """
    backend = dist.get_backend_config(like)
    pool = _pool(ranks, timeout, backend)
    unused = torch.tensor([False, *pool.values()], dtype=torch.int64)
    dist.all_reduce(unused, dist.ReduceOp.MIN, group=cpu)
    group = next(
        (group for group, free in zip(pool, unused.tolist()[1:], strict=True) if free), None
    )
    as_world = backend == dist.get_backend_config()
    group = group or new_group(ranks, timeout, None if as_world else backend)
    pool[group] = False
    return group


def give_back(group: dist.ProcessGroup | None) -> None:
    """Let :func:`own_group` return this group again."""
    for pool in [pool for pools in _pools.values() for pool in pools.values()]:
        if group in pool:
            pool[group] = True


def cpu_group(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the gloo group of ``ranks``, who call this together; it is made once."""
    pool = _pool(ranks, timeout, "shared")
    group = next(iter(pool), None) or new_group(ranks, timeout, "gloo")
    pool[group] = False
    return group


def _pool(
    ranks: Sequence[int], timeout: timedelta | None, use: str
) -> dict[dist.ProcessGroup, bool]:
    """Return the groups that were made of ``ranks`` for a use, and which of them are unused."""
    assert dist.group.WORLD is not None
    pools = _pools.setdefault(dist.group.WORLD, {})
    return pools.setdefault((tuple(ranks), timeout, use), {})


def new_group(
    ranks: Sequence[int], timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, which alone call this together.

    ``backend``: None for that of all processes. See :func:`_no_split` and :func:`_naming`.
    """
    some = len(ranks) < dist.get_world_size()
    with _no_split(), _naming(_next_name(ranks)) if some else nullcontext():
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)  # as this process is in it
    return group


@contextmanager
def _no_split() -> Iterator[None]:
    """Let torch make a group without splitting the communicator of all processes.

    After ``init_process_group(device_id=...)`` torch makes each group by ncclCommSplit, for which
    all processes of the world have to come: those outside of the group do not, and the others wait
    for ever (pytorch #134314). Open.
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

    torch names a group after the number of those that a process is in (to 2.13) or has made (2.14):
    processes that differ in that wait for each other in vain (pytorch #173608). Open.
    """
    own = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = cast(Any, lambda ranks, use_hashed_name: name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = own


def _next_name(ranks: Sequence[int]) -> str:
    """Return a name that no group has yet: its processes, and how many they have made."""
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, Counter())
    which = hashlib.sha256(repr([*ranks]).encode()).hexdigest()
    made[which] += 1
    return f"dlion {which} {made[which]}"


def forget_world() -> None:
    """Take a process group out of default arguments of torch, which would keep it for good.

    torch.distributed.nn.functional, which every torch.optim.Optimizer imports, has ``group.WORLD``
    for a default: None if there is no group yet, else the group there is. Threads of such a group
    outlive destroy_process_group(), and one that frees its last tensor while Python ends aborts the
    process, see :func:`let_gloo_finish`. Seen in 2.11 to 2.13; no report known; open.
    """
    from torch.distributed.nn import functional  # above, our own import would do the same

    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


@atexit.register
def let_gloo_finish() -> None:
    """Let gloo's threads free what they have carried, before Python ends, if a group is left.

    A thread that frees a tensor asks for Python's lock; once Python ends that aborts the process
    ("terminate called without an active exception", pytorch #190489). An error right after a
    collective may end Python that soon. Open.
    """
    end, quiet = time.monotonic() + _FREEING, 0
    while quiet < 2 and (states := gloo_threads()) and time.monotonic() < end:
        time.sleep(0.001)  # in which one that waits for Python's lock gets it
        quiet = 0 if states.strip("S") else quiet + 1


def gloo_threads() -> str:
    """Return the states of gloo's threads, a letter each, as Linux tells them (``S``: sleeps)."""
    states = ""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            text = stat.read_text()
            states += text.rpartition(") ")[2][0] if "gloo" in text else ""
    return states
