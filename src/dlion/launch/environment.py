"""Where this process stands: started by torchrun, by SLURM, or alone."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class Place:
    """One process among those that somebody else started.

    Attributes:
        rank, processes: its number and how many there are.
        local_rank: its number on this machine.
        local_processes: how many there are on this machine (under SLURM: on the step's first one).
        source: ``torchrun`` or ``slurm``.
    """

    rank: int
    processes: int
    local_rank: int
    local_processes: int
    source: str


def detect() -> Place | None:
    """The place of this process, or None if train.py is to start the processes itself.

    torchrun is told by RANK and WORLD_SIZE. SLURM by a step of more than one task: SLURM_PROCID and
    SLURM_NTASKS alone are set in batch scripts too.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, processes = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_WORLD_SIZE") or processes)
        return Place(rank, processes, int(env.get("LOCAL_RANK", rank)), local, "torchrun")
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" in env and tasks > 1:
        first = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # of 8(x4) or 8,4
        local = int(first[0]) if first else tasks
        return Place(int(env["SLURM_PROCID"]), tasks, int(env["SLURM_LOCALID"]), local, "slurm")
    return None


def set_rendezvous(place: Place) -> None:
    """Fill in MASTER_ADDR and MASTER_PORT where the launcher did not, and torchrun's names.

    What stays on one machine stays on loopback, unless GLOO_SOCKET_IFNAME names an interface.
    """
    env = os.environ
    env["RANK"], env["WORLD_SIZE"] = str(place.rank), str(place.processes)
    env["LOCAL_RANK"] = str(place.local_rank)
    one_node = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    if place.source == "slurm":
        one_node = env.get("SLURM_STEP_NUM_NODES", "1") == "1"
        # a port of the job's own: steps of several jobs may share a machine
        job = 100 * int(env.get("SLURM_JOB_ID", 0)) + int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(20000 + job % 20000))
        env.setdefault("MASTER_ADDR", "127.0.0.1" if one_node else _first_host())
    if one_node:
        env.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def restarted() -> bool:
    """Whether SLURM or torchrun runs this for another time, as the last one was cut off."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(int(os.environ.get(name, "0")) > 0 for name in names)


def join_process_group(backend: str, timeout: float = 600) -> None:
    """Join the other processes of the run, whoever started them; wait ``timeout`` seconds."""
    env = os.environ
    where, rank, processes = env.get("DLION_RENDEZVOUS", "env://"), env["RANK"], env["WORLD_SIZE"]
    limit = timedelta(seconds=timeout)
    if where == "env://" and _is_host(env):
        store = _loopback_store(env, limit)
    else:
        store, *_ = next(dist.rendezvous(where, int(rank), int(processes), timeout=limit))
    store.set_timeout(limit)
    # torchrun keeps its store for the next attempt, with the addresses of processes that died
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(rank),
        world_size=int(processes),
        timeout=limit,
    )


def _is_host(env: Mapping[str, str]) -> bool:
    """Whether this process serves the rendezvous, and for this machine alone."""
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return env["RANK"] == "0" and not served and env["MASTER_ADDR"] in ("127.0.0.1", "localhost")


def _loopback_store(env: Mapping[str, str], timeout: timedelta) -> dist.TCPStore:
    """As torch's own, which listens on all interfaces; the socket is the store's from now on."""
    listener = socket.create_server(("127.0.0.1", int(env["MASTER_PORT"])), backlog=1024)
    return dist.TCPStore(
        "127.0.0.1",
        int(env["MASTER_PORT"]),
        int(env["WORLD_SIZE"]),
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _first_host() -> str:
    """The first name in a SLURM node list such as ``gpu[03-05,7],login1``."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    head = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    assert head is not None
    return head[1] + (head[2] or "")
