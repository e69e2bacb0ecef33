"""Time on the device and on the host, waits of the host, launches.

On the CPU there is one clock: device time is wall-clock time, and the rest is left out.
"""

import sys
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import ROOT, Row, interleaved, spread

NO_GPU = "no GPU: wall-clock time on the CPU"
NO_COUNTS = "no GPU: neither waits nor launches are counted"
WAIT = "called a synchronizing CUDA operation"  # torch's warning

Call = Callable[[], Any]


class Times(NamedTuple):
    """Seconds of a call, one value a round.

    Attributes:
        device: time on the device.
        host: time until the call returned, without waiting for the device; empty on the CPU.
        note: why the device time was not taken in a CUDA graph, None if it was.
    """

    device: list[float]
    host: list[float]
    note: str | None

    def row(self) -> Row:
        """Return the columns of a row: medians and quartiles."""
        host_us = spread([1e6 * value for value in self.host]) if self.host else None
        return {"seconds": spread(self.device), "host_us": host_us, "note": self.note}


def timed(cases: dict[str, Call], args: Namespace, calls: int) -> dict[str, Times]:
    """Time cases in random order.

    On a GPU the device time is that of a CUDA graph of ``calls`` calls, so that Python is not
    measured. The host time is that of the same calls without the graph, on an idle device.
    """
    if args.device == "cpu":
        seconds = interleaved(cases, args.rounds)
        return {name: Times(values, [], NO_GPU) for name, values in seconds.items()}
    pool = torch.cuda.graph_pool_handle()  # the graphs may share memory, as no result is read
    graphs = {name: _captured(case, calls, pool) for name, case in cases.items()}
    repeated = {name: _repeated(case, calls) for name, case in cases.items()}
    device = interleaved({name: graph for name, (graph, _) in graphs.items()}, args.rounds, _event)
    host = interleaved(repeated, args.rounds, _until_return)
    return {
        name: Times([s / calls for s in device[name]], [s / calls for s in host[name]], note)
        for name, (_, note) in graphs.items()
    }


def _captured(case: Call, calls: int, pool: Any) -> tuple[Call, str | None]:
    """Return the replay of a CUDA graph of ``calls`` calls; without one the calls, and why.

    torch's allocator is broken for good after a capture that waits for the device, so a case that
    does so is not captured.
    """
    graph, repeated = torch.cuda.CUDAGraph(), _repeated(case, calls)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # restores the stream, also after a failure
        case()  # compiles kernels, allocates states
        with waits() as places:
            case()
        if places:
            return repeated, f"no CUDA graph: waits at {', '.join(places)}"
        try:  # thread_local, as the watchdog of NCCL makes calls that a global capture forbids
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                repeated()
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return repeated, f"no CUDA graph: {reason}"
    return graph.replay, None


def _repeated(case: Call, calls: int) -> Call:
    def repeat() -> None:
        for _ in range(calls):
            case()

    return repeat


def _event(call: Call) -> float:
    """Return the seconds that a call takes on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _until_return(call: Call) -> float:
    """Return the seconds until a call returns, on an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_in_turn(cycles: dict[str, dict[str, Call]], args: Namespace) -> dict[str, Times]:
    """Time the calls of cycles, such as a backward pass and a step, which follow each other.

    Each call begins on an idle device, in all processes at once, and its device time ends when the
    device is idle again.

    Returns:
        The times of ``"CYCLE: CALL"``, or of ``CYCLE`` where a cycle has one call only.
    """

    def cycle(calls: dict[str, Call]) -> Any:
        return {name: _until_idle(call, args.device) for name, call in calls.items()}

    found = interleaved(cycles, args.rounds, cycle)
    times, cpu = {}, args.device == "cpu"
    for name, calls in cycles.items():
        for call in calls:
            device, host = zip(*(round_[call] for round_ in found[name]), strict=True)
            case = name if len(calls) == 1 else f"{name}: {call}"
            times[case] = Times([*device], [] if cpu else [*host], NO_GPU if cpu else None)
    return times


def _until_idle(call: Call, device: str) -> tuple[float, float]:
    """Return the seconds until the device is idle after a call, and until the call returned."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    if dist.get_world_size() > 1:
        dist.barrier()
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    wait()
    return time.perf_counter() - start, returned - start


def launches(call: Call, device: str) -> int | None:
    """Return the kernels that a call launches; None if the profiler sees none, or on the CPU."""
    if device == "cpu":
        call()
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if "LaunchKernel" in e.key) or None


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count where the host waits for the GPU, in any thread, as ``"THREAD FILE:LINE"``.

    THREAD is ``main``, ``exchange`` or ``hook``, a thread of autograd. torch warns of copies and
    reads that block. It does not warn of events, so their waits are counted here.
    """
    places: Counter[str] = Counter()
    wait_for_event = torch.cuda.Event.synchronize

    def warned(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if WAIT in str(message):
            places[_place(filename, line)] += 1

    def synchronize(event: torch.cuda.Event) -> None:
        caller = sys._getframe(1)
        places[_place(caller.f_code.co_filename, caller.f_lineno)] += 1
        wait_for_event(event)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned  # called in the thread that warns
        torch.cuda.Event.synchronize = synchronize
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.Event.synchronize = wait_for_event


def _place(filename: str, line: int) -> str:
    thread = threading.current_thread()
    known = "main" if thread is threading.main_thread() else thread.name.partition("_")[0]
    path = Path(filename)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"{known if known in ('main', 'exchange') else 'hook'} {shown}:{line}"
