"""Optimizers as several processes run them over pretended NCCL, and how often the host may wait.

The limits are of one step, of the second exchange: 12 tensors in 7 buckets, one worker a process
if nothing else is said. Edit them here when an optimizer needs more, or less.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlion import optim
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.cuda.device import Device, Sync
from tests.cuda.pretend import pretended_cuda

BUCKETS, TENSORS, EXCHANGES = 7, 12, 2
THREADS = ("hook", "exchange", "main")


class Limits(NamedTuple):
    """How often the host may wait in a step: in hooks, on the exchange's thread, elsewhere."""

    hook: int
    exchange: int
    main: int


class Configuration(NamedTuple):
    """An optimizer and its limits.

    Attributes:
        name: a short one.
        method: the name of its class.
        settings: other than the defaults.
        alone: limit of waits without overlap, all on the main thread.
        overlap: limits with overlap.
        local: workers of a process.
        node: whether two processes each are a node (``dense_group``).
    """

    name: str
    method: str
    settings: dict[str, Any]
    alone: int = 1
    overlap: Limits = Limits(0, 0, 1)
    local: int = 1
    node: bool = False


SPARSE = Limits(0, 2 * BUCKETS, 1)  # numbers of entries are sizes, which the host has to know
SKIPPING = Limits(BUCKETS, 0, 1)  # whether a gradient is left out is known before it is encoded

# before a local step the host has to know whether the gradients are finite
LOOKING = 2, Limits(0, 0, 2)

# of a class, where they are others than by default
SETTINGS = {"OneBitAdam": {"warmup_steps": 1}, "PowerSGD": {"rank": 2}}
LIMITS = {"GradDrop": (3, SPARSE), "DGC": (3, SPARSE), "DiLoCo": LOOKING, "SparseLoCo": LOOKING}


def plain(method: type[optim.DistributedOptimizer]) -> Configuration:
    """Return a class with its defaults; workers exchange every other step if not every step."""
    name = method.__name__
    every = {"local_steps": 2} if issubclass(method, optim.LocalUpdate) else {}
    return Configuration(name, name, every | SETTINGS.get(name, {}), *LIMITS.get(name, ()))


OF_TWO = [
    *map(plain, dict.fromkeys(method.cls for method in optim.METHODS.values())),
    Configuration("DLion avg", "DLion", {"aggregation": "avg"}),
    Configuration("DLion ties=random", "DLion", {"ties": "random"}),
    Configuration("DLion ties=zero", "DLion", {"ties": "zero"}),
    Configuration("DLion weighted", "DLion", {"weighted": True}),
    Configuration("DLion nonfinite=None", "DLion", {"nonfinite": None}),
    Configuration("DLion nonfinite=skip", "DLion", {"nonfinite": "skip"}, 2, SKIPPING),
    Configuration("LionCub max, sync", "LionCub", {"scale": "max", "momentum_sync": 1}),
    Configuration("DLionADM limit, weighted", "DLionADM", {"limit": 2.0, "weighted": True}),
    Configuration("DiLoCo sign", "DiLoCo", {"local_steps": 2, "wire": "sign"}, *LOOKING),
    Configuration("DiLoCo int8", "DiLoCo", {"local_steps": 2, "wire": "int8"}, *LOOKING),
]
OF_FOUR = [
    Configuration("DLion grid", "DLion", {"exchange": "grid"}),
    Configuration("DLion grid, 2 workers", "DLion", {"exchange": "grid"}, local=2),
    Configuration("DLion 2 workers", "DLion", {}, local=2),
    Configuration("LionCub grid", "LionCub", {"exchange": "grid"}),
    Configuration("DLion node", "DLion", {}, node=True),
    Configuration("DLion node float32", "DLion", {"dense_wire": "float32"}, node=True),
    Configuration("GMuon node", "GMuon", {}, node=True),
    Configuration("LionCub node", "LionCub", {}, node=True),
    Configuration("DiLoCo node", "DiLoCo", {"local_steps": 2}, *LOOKING, node=True),
]
ALL = {configuration.name: configuration for configuration in (*OF_TWO, *OF_FOUR)}
RUNS = [(name, overlap) for name in ALL for overlap in (False, True)]


class Measured(NamedTuple):
    """What one step of a configuration does; of several processes, what they do at most.

    Attributes:
        buckets: their number.
        launches: of kernels, copies and collectives.
        syncs: waits of the host, with their numbers.
        faults: mixed devices, races and memory freed too early, in any step of any process.
    """

    buckets: int
    launches: dict[str, int]
    syncs: list[tuple[Sync, int]]
    faults: list[str]

    def waits(self) -> Limits:
        """Return the waits by thread."""
        return Limits(*(sum(n for s, n in self.syncs if s.thread == name) for name in THREADS))

    def places(self, thread: str) -> str:
        """Return where a thread waits, for a message."""
        found = [f"{n} x {s.kind} at {s.place}" for s, n in self.syncs if s.thread == thread]
        return ", ".join(found)


def measure(runs: Iterable[tuple[str, bool]] = RUNS) -> dict[tuple[str, bool], Measured | str]:
    """Run configurations, each without or with overlap; return an error of those that failed.

    All take about half a minute of one core.
    """
    found: dict[tuple[str, bool], Measured | str] = {}
    for processes, configurations in ((2, OF_TWO), (4, OF_FOUR)):
        names = {configuration.name for configuration in configurations}
        here = [(name, overlap) for name, overlap in runs if name in names]
        for name, overlap, outcome in run_processes(processes, _work, here):
            found[name, overlap] = outcome if isinstance(outcome, str) else _measured(*outcome)
    return found


def _measured(buckets: int, launches: dict[str, int], syncs: list, faults: list[str]) -> Measured:
    """Make objects of what has come through JSON."""
    return Measured(buckets, launches, [(Sync(*sync), n) for sync, n in syncs], faults)


def _work(runs: Iterable[tuple[str, bool]]) -> list[tuple[str, bool, Any]]:
    """Run configurations in one of several processes."""
    torch.set_num_threads(1)
    join_process_group("gloo", timeout=60)
    try:
        return [(name, overlap, _together(ALL[name], overlap)) for name, overlap in runs]
    finally:
        dist.destroy_process_group()


def _together(configuration: Configuration, overlap: bool) -> Any:
    """Run a configuration in all processes, and put together what they have seen."""
    with pretended_cuda() as gpu:
        try:
            buckets, faults = _run(configuration, overlap, gpu), gpu.seen.faults
            here: Any = buckets, gpu.seen.launches, gpu.seen.syncs, faults
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    failed = [outcome for outcome in everyone if isinstance(outcome, str)]
    if failed:
        return failed[0]
    launches, syncs = Counter(), Counter()
    for _, some_launches, some_syncs, _ in everyone:
        launches |= some_launches
        syncs |= some_syncs
    faults = sorted({fault for outcome in everyone for fault in outcome[3]})
    return everyone[0][0], launches, [*syncs.items()], faults


def _run(configuration: Configuration, overlap: bool, gpu: Device) -> int:
    """Take some steps, and note waits and launches of the last; return the number of buckets."""
    params = [torch.nn.Parameter(values.cuda()) for values in _values(0)]
    named = [(f"layer{i}.weight", param) for i, param in enumerate(params)]
    settings: dict[str, Any] = {"overlap": overlap, "bucket_cap_mb": 0.03, "seed": 1}
    if configuration.node:
        ranks, places = ([0, 1], [2, 3]), ([0, 2], [1, 3])
        rank = dist.get_rank()
        settings["dense_group"] = [dist.new_group(node) for node in ranks][rank // 2]
        settings["process_group"] = [dist.new_group(place) for place in places][rank % 2]
    else:
        settings["workers"] = Workers.current(local=configuration.local)
    method = getattr(optim, configuration.method)
    optimizer = method(named, **settings, **configuration.settings)
    last = EXCHANGES * configuration.settings.get("local_steps", 1) - 1
    for step in range(last + 1):
        batches = [
            [grad.cuda() for grad in _values(1 + step * 64 + dist.get_rank() * 8 + local)]
            for local in range(configuration.local)
        ]
        if step == last:
            gpu.seen.launches.clear()
            gpu.seen.syncs.clear()
        for local, grads in enumerate(batches):
            torch.autograd.backward(params, grads)
            if local < configuration.local - 1:
                optimizer.collect(local)
        optimizer.step()
        if step < last:
            optimizer.zero_grad()
    return len(optimizer.buckets)


def _values(seed: int) -> Iterator[torch.Tensor]:
    for index in range(TENSORS):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        yield torch.randn(64, 33, generator=generator)
