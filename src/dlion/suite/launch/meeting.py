"""Rendezvous of a run's processes, safe from others on the same machines."""

import contextlib
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from dlion.elastic.joining import interface_of
from dlion.errors import Stopped, TrainingFailed
from dlion.suite.terminal import patience
from dlion.workers import gpu_of

_CHOICE = 8  # ports from MASTER_PORT on: process 0 takes the first that is free
_PATIENCE = 2.0  # seconds in which whoever listens at a port must say which run it belongs to
_INTERFACE = "interface"  # of process 0, through which others have come; empty: not known
_JOINED = "joined"  # the number of processes that have found process 0
_FAILED, _LOST = "failed", "lost"  # the first process that failed, that lost another
_LEFT = "left"  # the number of processes that have told why they failed
_ENDING = 5.0  # seconds that a process which fails waits for others that do
_board: dist.Store | None = None  # of the run, for all of its processes


class OthersFailed(TrainingFailed):
    """Another process has failed before the run began, and has told why."""


@contextmanager
def process_group(backend: str, timeout: float) -> Iterator[None]:
    """Join the process group of the run, as :func:`join_process_group` does, and leave it again.

    After a failure this process leaves without waiting for others, which may be gone or hang: NCCL
    would first complete what is under way.
    """
    join_process_group(backend, timeout)
    try:
        yield
    except Stopped:
        dist.destroy_process_group()
        raise
    except BaseException:
        leaving = Thread(target=_destroy, daemon=True)
        leaving.start()
        leaving.join(_PATIENCE)
        raise
    dist.destroy_process_group()


def _destroy() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def join_process_group(backend: str, timeout: float = 600) -> None:
    """Initialise the process group of the run; wait ``timeout`` seconds for other processes.

    Args:
        backend: ``gloo``; or ``nccl`` for the current GPU's tensors, and gloo for those of the CPU.
        timeout: seconds.

    Raises:
        TrainingFailed: if process 0 finds no free port, they do not find each other in time, or two
            of them have the same GPU under NCCL.
    """
    env = os.environ
    rank, processes = int(env["RANK"]), int(env["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    store: dist.Store
    if "DLION_RENDEZVOUS" in env:  # a file, from dlion.suite.launch.local
        store = dist.FileStore(env["DLION_RENDEZVOUS"], processes)
    else:
        with patience(f"waiting for other processes: {_said(env)}", 5 if rank == 0 else 10):
            store = _meet(env, rank, processes, limit)
    store.set_timeout(limit)
    device = None
    if backend == "nccl":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
        claim_gpu(store, rank, gpu_of(device))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=processes, timeout=limit, device_id=device
    )


def claim_gpu(store: dist.Store, rank: int, gpu: str) -> None:
    """Take a GPU for process ``rank``.

    Raises:
        TrainingFailed: naming the process that has taken it before.
    """
    owner = int(store.compare_set(f"gpu {gpu}", "", str(rank)))
    if owner != rank:
        raise TrainingFailed(
            f"processes {owner} and {rank} share a GPU, which backend=nccl does not allow: start"
            " one process for each GPU (virtual workers share it), or type backend=gloo"
        )


def _meet(env: Mapping[str, str], rank: int, processes: int, limit: timedelta) -> dist.Store:
    """Return the store of the run, which process 0 hosts.

    (The store of torchrun's agent keeps the addresses of processes that died in an earlier attempt,
    and agents on several machines do not agree which attempt this is.)

    Process 0 listens at a port that all know, and tells whoever asks there the name of the run and
    the port of its store. So a stranger at that port is recognised, be it silent or another run's
    process 0. (A TCPStore waits for a silent one for ever, and shares its keys with any run.)
    """
    global _board
    if rank == 0:
        guide, answer, _board = _host(env, limit)
        with guide:
            here = _answer(guide, answer, _board, processes, limit)
        name = interface_of(here)
        _board.set(_INTERFACE, name)
    else:
        _board, here = _find(env, limit)
        _board.add(_JOINED, 1)
        if _board.check([_FAILED]):
            raise OthersFailed("another process has failed before this run began")
        # beside process 0, which knows what leads to others
        name = _board.get(_INTERFACE).decode() if _is_loopback(here) else interface_of(here)
    if name:  # gloo would take the address of this machine's own name: Debian's is 127.0.1.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return dist.PrefixStore(_run(env), _board)


def tell_once(tell: Callable[[], object], reason: str, lost: bool) -> None:
    """Tell why this process fails, unless another of the run tells the same, and let them ask.

    torchrun ends all processes as soon as one has: none may leave before it is told. Of those that
    have met nobody, process 0 tells.

    Args:
        tell: tells it.
        reason: that others may have as well.
        lost: whether the reason is that others have ended: who has another one tells that.
    """
    env, limit = os.environ, timedelta(seconds=_ENDING)
    rank, processes = int(env["RANK"]), int(env["WORLD_SIZE"])
    if _board is None and rank == 0:
        tell()
        _soon(_announce_failure, env, reason, processes, limit)
        return
    board = _board or _soon(lambda: _find(env, limit)[0])
    first = _soon(_is_first, board, rank, reason, lost)
    if first is not False:  # None: process 0 has gone
        tell()
    if first is not None:
        _soon(_leave, board, rank, processes)


def _announce_failure(
    env: Mapping[str, str], reason: str, processes: int, limit: timedelta
) -> None:
    """Let the others know that process 0 has failed before the run began."""
    guide, answer, board = _host(env, limit)
    board.set(_FAILED, f"0 {reason}")
    with guide:
        _answer(guide, answer, board, processes, limit, _LEFT)


def _is_first(board: dist.Store, rank: int, reason: str, lost: bool) -> bool:
    """Whether no other process has failed with the same reason."""
    if lost and board.check([_FAILED]):
        return False
    key, mine = (_LOST, f"{rank}") if lost else (_FAILED, f"{rank} {reason}")
    first = board.compare_set(key, "", mine).decode()
    return first == mine or (not lost and first.partition(" ")[2] != reason)


def _leave(board: dist.Store, rank: int, processes: int) -> None:
    """Note that this process may end; process 0, which hosts the board, lets the others ask."""
    left = board.add(_LEFT, 1)
    while rank == 0 and left < processes:
        time.sleep(0.1)
        left = board.add(_LEFT, 0)


def _soon(action: Callable[..., Any], *args: Any) -> Any:
    """Return ``action(*args)``; None if it fails, or takes longer than processes wait."""
    results: list[Any] = []

    def act() -> None:
        with contextlib.suppress(Exception):
            results.append(action(*args))

    acting = Thread(target=act, daemon=True)
    acting.start()
    acting.join(_ENDING)
    return results[0] if results else None


def _host(env: Mapping[str, str], limit: timedelta) -> tuple[socket.socket, bytes, dist.Store]:
    """Open the store of the run, and the socket at which process 0 answers where it is."""
    host, ports = _place(env)
    guide, listener = _listen(host, ports), _listen(host, range(1))  # 0: any free port
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "::1" if host == "::1" else "127.0.0.1",  # others may know it by another name
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes the socket
    )
    return guide, _greeting(_run(env)) + b"%d\n" % port, store


def _find(env: Mapping[str, str], limit: timedelta) -> tuple[dist.Store, str]:
    """Return the store of the run, and this machine's address from which it was found."""
    host, ports = _place(env)
    port, here = _ask(host, ports, _run(env), limit)
    return dist.TCPStore(host, port, timeout=limit, wait_for_workers=False), here


def _place(env: Mapping[str, str]) -> tuple[str, range]:
    """Return the machine of process 0 and the ports at which it may answer."""
    taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the first, by torchrun's agent
    first = min(int(env["MASTER_PORT"]) + taken, (1 << 16) - 1)
    # [::1], as in an address with a port
    host = env["MASTER_ADDR"].removeprefix("[").removesuffix("]")
    return host, range(first, min(first + _CHOICE, 1 << 16))


def _run(env: Mapping[str, str]) -> str:
    return env.get("DLION_RUN", "run")


def _said(env: Mapping[str, str]) -> str:
    """Return what says that there are other processes, and what to type."""
    return env.get("DLION_STARTED", "start all of them in that time")


def _listen(host: str, ports: range) -> socket.socket:
    """Listen at the first free port; on loopback alone for a run on this machine."""
    for port in ports:
        try:
            if host in ("127.0.0.1", "localhost"):
                return socket.create_server(("127.0.0.1", port), backlog=1024)
            if host == "::1":
                return socket.create_server((host, port), family=socket.AF_INET6, backlog=1024)
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(
                ("", port), family=family, backlog=1024, dualstack_ipv6=both
            )
        except OSError as error:
            reason = os.strerror(error.errno or 0)
    raise TrainingFailed(
        f"process 0 cannot listen at port {_words(ports)} ({reason}): set MASTER_PORT to a free one"
    )


def _answer(
    guide: socket.socket,
    answer: bytes,
    store: dist.Store,
    processes: int,
    limit: timedelta,
    done: str = _JOINED,
) -> str:
    """Send the answer to everyone who connects, until all other processes are ``done``.

    Returns:
        The address of this machine at which processes of others have come, if there are any.
    """
    guide.settimeout(0.1)
    here = ""
    deadline = time.monotonic() + limit.total_seconds()
    while (joined := store.add(done, 0)) < processes - 1:
        if done == _JOINED and store.check([_FAILED]):
            raise OthersFailed("another process has failed before this run began")
        if time.monotonic() > deadline:
            raise TrainingFailed(
                f"{joined + 1} of {processes} processes were there after timeout="
                f"{limit.total_seconds():g} s: {_said(os.environ)}"
            )
        with contextlib.suppress(OSError):  # nobody for a while, or one who has left
            client, _ = guide.accept()
            with client:
                client.sendall(answer)
                address = _address(client)
                here = here if _is_loopback(address) else address
    return here


def _ask(host: str, ports: range, run: str, limit: timedelta) -> tuple[int, str]:
    """Return the port of the run's store, which process 0 tells at one of ``ports``.

    And the address of this machine from which it was asked.
    """
    _resolve(host)
    deadline = time.monotonic() + limit.total_seconds()
    patience = min(_PATIENCE, limit.total_seconds())
    while time.monotonic() < deadline:
        for port in ports:
            with (
                contextlib.suppress(OSError),  # nobody is there yet, or does not answer
                socket.create_connection((host, port), timeout=patience) as guide,
            ):
                answer = re.fullmatch(_greeting(run) + rb"(\d+)\n", guide.recv(200))
                if answer:
                    return int(answer[1]), _address(guide)
        time.sleep(0.1)
    raise TrainingFailed(
        f"process 0 was not found at {host}, port {_words(ports)}, within timeout="
        f"{limit.total_seconds():g} s: {_said(os.environ)}; if another program listens at that"
        " port, set MASTER_PORT to a free one"
    )


def _address(connected: socket.socket) -> str:
    """Return this machine's address of a connection."""
    return connected.getsockname()[0].removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _resolve(host: str, patience: float = 10) -> None:
    """Refuse a name of no machine at once, instead of waiting for one to have it.

    Raises:
        TrainingFailed: in that case. A name server that does not answer is asked again for
            ``patience`` seconds.
    """
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError as error:
        raise TrainingFailed(f"MASTER_ADDR={host} is not a name of a machine: set it") from error
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN or patience < 1:
            raise TrainingFailed(
                f"MASTER_ADDR={host} is not the name of a machine that this one knows"
                f" ({error.strerror}): set it to the name or address of the machine of process 0"
            ) from error
        time.sleep(1)
        _resolve(host, patience - 1)


def _greeting(run: str) -> bytes:
    """Return the greeting of a run's process 0 before its port, of a fixed length."""
    return f"dlion {hashlib.sha256(run.encode()).hexdigest()} ".encode()


def _words(ports: range) -> str:
    return f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
