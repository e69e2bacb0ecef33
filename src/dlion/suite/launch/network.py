"""Emulates a slow Ethernet on one machine: a network namespace for each node, and a switch.

Each node, usually of one process, gets a namespace with one interface, a link to a bridge, and both
directions of the link are shaped by a token bucket (``tc tbf``), as by a switch port of that speed.
Processes of a node talk to each other over loopback. The bridge has a namespace as well: no
interface of the machine is touched, and removing the namespaces removes everything.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from dlion.errors import UserError

INTERFACE = "eth0"  # the name of every process's link, in its own namespace
_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_QUEUE = 1_000_000  # bytes that may wait at a port
_SUBNET = "10.177.0.0/16"
# Linux's default, which may not be this machine's: under BBR, flows that share a link leave parts
# of it idle (1.3 to 1.6 instead of 1.07 times the wire time at 10 Mbit/s).
_CONGESTION_CONTROL = "cubic"


def check_possible() -> None:
    """Refuse a machine that cannot emulate a network.

    Raises:
        UserError: naming what it lacks.
    """
    if sys.platform != "linux":
        raise UserError("an emulated network needs Linux: type network=none")
    if os.geteuid() != 0:
        raise UserError("an emulated network needs root: run as root, or type network=none")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"an emulated network needs iproute2, but {' and '.join(missing)} is not installed:"
            " apt install iproute2, or type network=none"
        )


class Network:
    """Network namespaces for the processes of a run, which exist while the context is entered.

    Their names hold the launcher's process id and start time, so that the next launcher recognises
    and removes those that a killed one left.

    Args:
        processes: number of processes in the run.
        rate: of each link, in bits per second.
        per_node: processes that share a link, those of neighbouring ranks.
    """

    def __init__(self, processes: int, rate: int, per_node: int = 1):
        self.nodes, self.rate, self.per_node = processes // per_node, rate, per_node
        self._prefix = f"dlion-{os.getpid()}-{_started(os.getpid())}-"

    def __enter__(self) -> "Network":
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def namespace(self, node: int) -> str:
        """Return the name of a node's namespace; a node of one process has the number of that."""
        return f"{self._prefix}{node}"

    def enter(self, rank: int) -> None:
        """Move this process into its namespace; it must not have a socket yet."""
        with (_NAMESPACES / self.namespace(rank // self.per_node)).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), file.name)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def set_rate(self, rate: int) -> None:
        """Change the rate of all links, in bits per second."""
        self.rate = rate
        burst = max(rate // 8 // 250, 16384)  # bytes: what may pass between two timer ticks
        for node in range(self.nodes):
            for name, device in (
                (self.namespace(node), INTERFACE),
                (f"{self._prefix}switch", f"port{node}"),
            ):
                shape = f"tbf rate {rate}bit burst {burst} limit {_QUEUE + burst}"
                _call("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape.split())

    def _build(self) -> None:
        switch = f"{self._prefix}switch"
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for node in range(self.nodes):
            name = self.namespace(node)
            _call("ip", "netns", "add", name)
            port = f"port{node} type veth peer name {INTERFACE} netns {name}"
            _call("ip", "-n", switch, "link", "add", *port.split())
            _call("ip", "-n", switch, "link", "set", f"port{node}", "master", "bridge", "up")
            high, low = divmod(node + 1, 250)
            address = f"10.177.{high}.{low + 1}/16"
            _call("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            route = f"{_SUBNET} dev {INTERFACE} congctl {_CONGESTION_CONTROL}"
            _call("ip", "-n", name, "route", "replace", *route.split())
        self.set_rate(self.rate)

    def _remove(self) -> None:
        _delete(name for name in _names() if name.startswith(self._prefix))


def remove_leftovers() -> None:
    """Remove the namespaces of launchers that are no longer alive."""
    for name in _names():
        match = re.fullmatch(r"dlion-(\d+)-(\d+)-\w+", name)
        if match and _started(int(match[1])) != int(match[2]):
            _delete([name])


def _names() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob("dlion-*"))


def _delete(names: Iterable[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none of that id."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"the emulated network could not be made: `{' '.join(command)}` said"
            f" {done.stderr.strip()}; network=none runs without it"
        )
