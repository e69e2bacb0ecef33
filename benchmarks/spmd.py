"""Timing things that several processes do together, over an emulated or the machine's network."""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlion.exchange import nic
from dlion.launch.environment import join_process_group
from dlion.launch.local import run_processes
from dlion.launch.network import Network

Case = Callable[[], Any]
FAST = 1_000_000_000  # bits per second, while warming up


def run(
    processes: int,
    rate: int | None,
    make_cases: Callable[..., dict[str, Case]],
    *args: Any,
    **how: Any,
) -> dict[str, Any]:
    """Time the cases that ``make_cases(*args)`` gives in every process.

    Args:
        rate: of emulated links, bits per second; None: plain loopback.
        how: ``rounds``, ``warmups`` and ``seed`` of :func:`measure`.

    Returns:
        case -> ``{"seconds": [...], "nic_bytes": [...]}``, a value a round.
    """
    if rate is None:
        return run_processes(processes, _work, None, None, make_cases, args, how)
    with Network(processes, max(rate, FAST)) as network:
        return run_processes(
            processes, _work, network, rate, make_cases, args, how, network=network
        )


def _work(
    network: Network | None, rate: int | None, make_cases: Any, args: tuple, how: dict
) -> dict[str, Any]:
    torch.set_num_threads(1)
    join_process_group("gloo")

    def slow_down() -> None:
        if network is not None and rate is not None and dist.get_rank() == 0:
            network.set_rate(rate)
        dist.barrier()

    result = measure(make_cases(*args), slow_down, emulated=network is not None, **how)
    dist.barrier()
    dist.destroy_process_group()
    return result


def measure(
    cases: dict[str, Case],
    warmed_up: Callable[[], None],
    rounds: int,
    emulated: bool,
    seed: int = 0,
    warmups: int = 1,
) -> dict[str, Any]:
    """Time every case in every round, all in a new random order, from barrier to barrier.

    Some rounds before are not counted; after them ``warmed_up`` is called.
    """
    rng, order = random.Random(seed), list(cases)
    found: dict[str, Any] = {name: {"seconds": [], "nic_bytes": []} for name in cases}
    for round_ in range(-warmups, rounds):
        if round_ == 0:
            warmed_up()
        rng.shuffle(order)
        for name in order:
            dist.barrier()
            sent, start = nic.sent_bytes() if emulated else 0, time.perf_counter()
            cases[name]()
            dist.barrier()
            seconds = time.perf_counter() - start
            bytes_ = torch.tensor(float((nic.sent_bytes() if emulated else 0) - sent))
            dist.all_reduce(bytes_)
            if round_ >= 0:
                found[name]["seconds"].append(seconds)
                found[name]["nic_bytes"].append(bytes_.item() / dist.get_world_size())
    return found
