"""Timing what several processes do together, over emulated links or loopback."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Parser, in_random_order, show_seconds

from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.launch.network import Network
from dlion.suite.training.meter import interface_bytes

Cases = dict[str, Callable[[], Any]]
Measured = dict[str, dict[str, list[float]]]
WARMUP_RATE = 1_000_000_000  # bits per second: warm-ups need not wait for a slow link
PATIENCE = 10  # seconds of a round after which progress is shown


def time_together(
    processes: int,
    rate: int | None,
    make_cases: Callable[..., Cases],
    *args: Any,
    rounds: int,
    warmups: int = 1,
    per_node: int = 1,
    slow_from_start: bool = False,
) -> Measured:
    """Time the cases that ``make_cases(*args)`` returns in every process.

    Args:
        rate: of the emulated links, bits per second; None: loopback.
        rounds, warmups: how often every case is timed, and run before that.
        per_node: processes that share a link.
        slow_from_start: warm-ups, and the making of the cases, have the slow links too.

    Returns:
        case -> ``{"seconds": [...], "nic_bytes": [...]}``, a value for each round; bytes are those
        of a node's interface, 0 on loopback.
    """
    work = (make_cases, args, rounds, warmups)
    if rate is None:
        return run_processes(processes, _work, None, None, *work)
    begin = rate if slow_from_start else max(rate, WARMUP_RATE)
    with Network(processes, begin, per_node) as network:
        return run_processes(processes, _work, network, rate, *work, network=network)


def _work(
    network: Network | None,
    rate: int | None,
    make_cases: Callable[..., Cases],
    args: tuple[Any, ...],
    rounds: int,
    warmups: int,
) -> Measured:
    torch.set_num_threads(1)
    join_process_group("gloo")
    first = dist.get_rank() == 0

    def slow_down() -> None:
        if network is not None and rate is not None and first:
            network.set_rate(rate)
        dist.barrier()

    measured = _measure(make_cases(*args), slow_down, rounds, warmups, network is not None, first)
    dist.barrier()
    dist.destroy_process_group()
    return measured


def _measure(
    cases: Cases,
    slow_down: Callable[[], None],
    rounds: int,
    warmups: int,
    emulated: bool,
    talks: bool,
) -> Measured:
    """Time every case in every round, from barrier to barrier; ``slow_down`` ends the warm-ups."""
    measured: Measured = {name: {"seconds": [], "nic_bytes": []} for name in cases}
    current, begun = -warmups, time.monotonic()
    for round_, name in in_random_order(cases, rounds, warmups):
        if round_ != current:
            if round_ == 0:
                slow_down()
                begun = time.monotonic()
            elif round_ > 0 and talks:
                _show_progress(round_, rounds, time.monotonic() - begun)
            current = round_
        dist.barrier()
        before, start = interface_bytes() if emulated else 0, time.perf_counter()
        cases[name]()
        dist.barrier()
        seconds = time.perf_counter() - start
        sent = torch.tensor(float((interface_bytes() if emulated else 0) - before))
        dist.all_reduce(sent)
        if round_ >= 0:
            measured[name]["seconds"].append(seconds)
            measured[name]["nic_bytes"].append(sent.item() / dist.get_world_size())
    return measured


def _show_progress(done: int, rounds: int, seconds: float) -> None:
    if seconds > PATIENCE * done:
        left = show_seconds(seconds / done * (rounds - done))
        print(f"  round {done} of {rounds}; about {left} left of this point", file=sys.stderr)


if __name__ == "__main__":
    Parser(__doc__, output=None).error(
        "spmd.py measures nothing by itself: start exchange.py or end_to_end.py"
    )
