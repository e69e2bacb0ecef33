"""How a worker meets the others of an elastic run: torchft's manager, store, group and transport.

What torchft 0.2, gloo and torch do otherwise than an elastic run needs is put right here.
"""

import io
import logging
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.elastic.lighthouse import START, bracketed, check_lighthouse, split_address
from dlion.elastic.waits import Waits
from dlion.errors import UserError
from dlion.workers import Workers

RETRY = 0.5  # seconds between two looks at who is there
_CONNECTING = 5.0  # seconds
_LONGEST = 10**6  # seconds
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
_MEETING = 2.0  # seconds in which a new worker has to connect to the others
_AGAIN = 0.5  # seconds, at least, in which it has to do so again
_ADDRESS = 256  # bytes, at most, of an address
_PART = 1 << 20  # bytes of a state that must arrive within the timeout
_INSTALL = "type pip install 'dlion[elastic]'"


def join(
    lighthouse: str,
    min_workers: int = 1,
    name: str = "",
    address: str | None = None,
    timeout: float = 30.0,
    patience: float = 60.0,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Connect to a lighthouse; return the ``torchft.Manager`` that optimizers take as ``manager``.

    ::

        manager = dlion.join("10.0.0.1:29510", min_workers=2)
        optimizer = dlion.DLion(model.parameters(), lr=1e-4, manager=manager)

    The lighthouse is a process that ``dlion lighthouse`` (or ``torchft_lighthouse``) starts. What a
    loop keeps besides (a schedule, buffers of a model) joins too, once it is registered with
    ``manager.register_state_dict_fn(name, load, save)``; it must consist of tensors, numbers,
    texts, lists and dictionaries, as nothing else is unpickled.

    Call it last, when model and data are ready: a worker that is alive and busy may be waited for.

    Args:
        lighthouse: its HOST:PORT.
        min_workers: with fewer, all wait.
        name: workers are numbered in the order of their names, then at random.
        address: of this machine, for the other workers; None: the one that it reaches the
            lighthouse from. Gloo, which carries messages, listens on its interface, unless the
            environment variable GLOO_SOCKET_IFNAME names another.
        timeout: seconds that a worker may hang, and still say that it is alive, before the others
            continue without it.
        patience: seconds to wait for a lighthouse that does not answer, for min_workers, or for
            workers that are busy: longer than a step, or a round of local steps, takes.
        group: of the processes that are one worker, over which FSDP2 shards the model, or the
            ``dense_group`` of the optimizer. They live and die together, as torchrun's do. All call
            this, with the same arguments.

    Raises:
        UserError: if torchft is not installed, or there is no lighthouse.
    """
    with importing_torchft("elastic workers need"):
        from torchft import Manager
    typed = f"lighthouse={lighthouse}"
    host, port = split_address(lighthouse, typed)
    if min_workers < 1:
        raise UserError(f"min_workers={min_workers} is not possible: give 1 or more")
    for which, seconds in (("timeout", timeout), ("patience", patience)):
        if not 0 < seconds <= _LONGEST:
            raise UserError(f"{which}={seconds} is not possible: give 0 to {_LONGEST} seconds")
    for logger in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # what matters is raised
    place = Workers() if group is None else Workers.current(group=group).with_cpu_group()
    try:
        own = check_lighthouse(lighthouse, typed)
        address = (address or own).strip("[]")
        _choose_interface(address)
        store = _make_store(address, place)
    except OSError as error:
        raise UserError(
            f"this machine cannot listen at {address} ({error}): give one of its own as address="
        ) from error
    ring = _make_group(timeout)
    try:
        with _listening_on(address):
            manager = Manager(
                pg=ring,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=min_workers,
                use_async_quorum=False,
                timeout=timedelta(seconds=timeout),
                quorum_timeout=timedelta(seconds=patience),
                quorum_retries=math.ceil(patience / RETRY),  # of a lighthouse that began again
                connect_timeout=timedelta(seconds=_CONNECTING),
                rank=place.rank,
                world_size=place.processes,
                store_addr=store.host,
                store_port=store.port,
                lighthouse_addr=f"http://{bracketed(host)}:{port}",
                replica_id=name,
                hostname=bracketed(address),
                checkpoint_transport=cast(Any, GroupTransport(ring)),
            )
    except (RuntimeError, TimeoutError) as error:
        raise UserError(f"{typed}: no lighthouse there: {START}") from error
    manager._client = cast(Any, _Client(manager, store))
    manager.lighthouse = host, port  # pyrefly: ignore[missing-attribute]
    manager.inside = place.group  # pyrefly: ignore[missing-attribute]
    ring.own_store = store  # it lives as long as the group
    return manager


def _make_store(address: str, place: Workers) -> dist.TCPStore:
    """Make the store of a worker, in the first of its processes."""
    listening = None
    where = torch.zeros(_ADDRESS, dtype=torch.uint8)
    if place.rank == 0:
        # a store that listens on every interface would be one door more
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        text = f"{address}:{listener.getsockname()[1]}".encode()
        listening = listener.detach()
        where = torch.frombuffer(bytearray(text.ljust(_ADDRESS)), dtype=torch.uint8)
    if place.group is not None:
        dist.broadcast(where, group=place.group, group_src=0)
    host, _, port = bytes(where.tolist()).decode().strip().rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        is_master=listening is not None,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


@contextmanager
def _listening_on(address: str) -> Iterator[None]:
    """Let managers made inside listen on one address; torchft 0.2 has them listen on all."""
    from torchft import manager

    server = manager.ManagerServer

    def serve(**options: Any) -> Any:
        port = options.pop("bind").rpartition(":")[2]
        return server(**options, bind=f"{bracketed(address)}:{port}")

    manager.ManagerServer = cast(Any, serve)
    try:
        yield
    finally:
        manager.ManagerServer = server


class _Client:
    """Torchft's client for quorums, with two repairs for torchft 0.2.

    State comes through the group: a joiner would ask the worker whose state it takes where it is,
    and if that one has stopped, wait for ``timeout``; until it asks for the next quorum there may
    be none. And the quorums of a lighthouse that began again have the numbers of earlier ones:
    torchft would go on with the connections of such a one, which may be closed.

    Attributes:
        members: the workers of the latest quorum.
    """

    def __init__(self, manager: Any, store: dist.TCPStore):
        self._manager, self._client = manager, manager._client
        self._own = store.get("manager_addr").decode()
        self.members: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **request: Any) -> Any:
        quorum = self._client._quorum(**request)
        quorum.recover_src_manager_address = self._own
        if self._manager._pg._pg is None:
            self._manager._quorum_id = -1  # which makes torchft connect them
        self.members = quorum.replica_ids
        return quorum


def _make_group(timeout: float) -> Any:
    """Return torchft's gloo group, with three repairs for torchft 0.2, gloo and torch.

    A worker that dies while others connect is waited for in vain, as long as for a message: here it
    is four times as long as connecting took before, and twice that if as many workers fail again.
    If the store is a dead worker's, torch asks for it again for two seconds, and writes a trace of
    fifty lines; if that worker has stopped, torch waits for an answer for ever. And abort() closes
    nothing as long as anyone has the group, a thread that waits for a message say; peers would wait
    until ``timeout``.
    """
    from torchft import ProcessGroupGloo

    class Group(ProcessGroupGloo):
        usual = limit = _MEETING  # seconds
        failed = 0  # workers that could not all connect
        sockets: frozenset[tuple[int, int]] = frozenset()  # of the connections between workers
        waits = Waits(None, timedelta(seconds=timeout))

        def configure(self, *args: Any, **kwargs: Any) -> None:
            store, _, _, workers, *_ = args
            again = workers == self.failed
            self.limit = min(timeout, 2 * self.limit) if again else self.usual
            self.set_timeout(timedelta(seconds=self.limit))
            self.failed, began, others = workers, time.monotonic(), _open_sockets()
            host, port = split_address(store.partition("/")[0], store)
            with socket.create_connection((host, port), self.limit) as probe:
                there = _peer(probe)
            over, before = Event(), _open_sockets(every=True)
            Thread(target=_forsake, args=(over, self.limit, there, before), daemon=True).start()
            try:
                super().configure(*args, **kwargs)
            finally:
                over.set()
                self.sockets = _open_sockets() - others
            self.failed, self.usual = 0, max(_AGAIN, 4 * (time.monotonic() - began))
            gloo = cast(Any, self.parent)._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(timedelta(seconds=timeout))
            self.waits = Waits(self.parent, timedelta(seconds=timeout))

        @property
        def parted(self) -> bool:
            """Whether a connection has ended, whose descriptor gloo has closed."""
            return not self.sockets <= _open_sockets()

        def abort(self, errored: bool = True) -> None:
            for descriptor, inode in self.sockets:
                _shut_down(descriptor, inode)
            self.sockets = frozenset()
            self.waits.end()
            super().abort(errored)

    return Group(timeout=timedelta(seconds=timeout))


def _forsake(
    over: Event, limit: float, store: list[Any], others: frozenset[tuple[int, int]]
) -> None:
    """Shut down connections to a store, made since, every ``limit`` seconds until it is over."""
    while not over.wait(limit):
        for descriptor, inode in _open_sockets(every=True) - others:
            _shut_down(descriptor, inode, store)


def _open_sockets(every: bool = False) -> frozenset[tuple[int, int]]:
    """Return descriptor and inode of the sockets of this process that programs would inherit.

    Gloo's are such, unlike those that Python, Rust and torch's store open, on other threads say.

    Args:
        every: all sockets.
    """
    found = set()
    for link in Path("/dev/fd").iterdir():
        with suppress(OSError):  # that of iterdir itself
            status = os.fstat(int(link.name))
            if stat.S_ISSOCK(status.st_mode) and (every or os.get_inheritable(int(link.name))):
                found.add((int(link.name), status.st_ino))
    return frozenset(found)


def _shut_down(descriptor: int, inode: int, peer: list[Any] | None = None) -> None:
    """Shut down a connection, to a peer if one is given, unless its descriptor is another's now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        there = _peer(connection)  # fails for what listens
        if os.fstat(connection.fileno()).st_ino == inode and peer in (None, there):
            connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> list[Any]:
    """Return host and port at the other end; torch connects to IPv4 as IPv6 does."""
    host, *port = connection.getpeername()[:2] or [""]  # nothing, of a socket of this machine
    return [host.removeprefix("::ffff:"), *port]


class GroupTransport:
    """Sends state to joining workers through the process group, and executes nothing of it.

    torchft's own HTTPTransport opens a port on every interface and unpickles what it gets; this
    uses the connections that messages use, and ``torch.load(weights_only=True)``.

    Attributes:
        sent_bytes: to workers that have joined, but for those that were there before any step.
        watched: makes a context in which peers that have stopped are not waited for.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent_bytes = 0
        self.watched: Callable[[], AbstractContextManager[None]] = nullcontext

    def metadata(self) -> str:
        return ""

    def send_checkpoint(
        self, dst_ranks: Iterable[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        data = packed(state_dict)
        with self.watched():
            for rank in dst_ranks:
                for part in (torch.tensor([len(data)]), *data.split(_PART)):
                    self._group.waits.wait([self._group.parent.send([part], rank, 0)])
                self.sent_bytes += len(data) if step else 0

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        with self.watched():
            size = torch.empty(1, dtype=torch.int64)
            self._group.waits.wait([self._group.parent.recv([size], src_rank, 0)])
            data = torch.empty(int(size), dtype=torch.uint8)
            for part in data.split(_PART):
                self._group.waits.wait([self._group.parent.recv([part], src_rank, 0)])
        return unpacked(data)

    def disallow_checkpoint(self) -> None:
        """Nothing is under way once :meth:`send_checkpoint` has returned."""

    def shutdown(self, wait: bool = True) -> None:
        """There is nothing to end."""


def packed(state: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def _choose_interface(address: str) -> None:
    """Let gloo listen where this machine has an address, unless the environment names another.

    Gloo would take the address of this machine's own name: Debian's is 127.0.1.1.
    """
    there = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wrong := [name for name in chosen.split(",") if name and name not in there]:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={chosen}: this machine has no interface {wrong[0]}: choose from"
            f" {', '.join(there)}"
        )
    if not chosen and (name := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty if there is none."""
    import fcntl  # `import dlion` works where it is missing

    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket() as asking:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    with suppress(OSError):  # IPv6: Linux lists all
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if digits == wanted:
                return name
    return ""


def check_torchft(who: str) -> None:
    """Refuse to go on without torchft, which is not imported for that."""
    if find_spec("torchft") is None:
        raise UserError(f"{who} torchft, which is not installed: {_INSTALL}")


@contextmanager
def importing_torchft(who: str) -> Iterator[None]:
    """Turn a package that an import inside lacks into a sentence that begins with ``who``."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft writes ten lines a step otherwise
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{who} {error.name}, which is not installed: {_INSTALL}") from error
