"""Start a lighthouse, the registry of the workers of an elastic run (torchft).

Whoever reaches it can join the run, see its page in a browser and end its workers: bind it to an
address that only they reach, of a VPN say. Ctrl-C ends it.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from dlion.elastic.joining import importing_torchft
from dlion.elastic.lighthouse import split_address
from dlion.errors import RunFailed, UserError
from dlion.suite.arguments import make_parser, number, whole
from dlion.suite.machine import die_with
from dlion.suite.training.signals import SIGNALS

HOST, PORT = "127.0.0.1", 29510
WAIT = 30.0  # seconds
_STARTING = 60.0  # seconds
_SILENCE = 1.0  # seconds, of workers of this machine: no link is between


def start(bind: str, min_workers: int = 1, silence: float = 2.0, wait: float = WAIT) -> Any:
    """Start a lighthouse in this process; return torchft's server.

    Args:
        bind: HOST:PORT.
        min_workers: workers without which no step begins.
        silence: seconds after which a worker that says nothing is dead. Workers speak ten times a
            second, behind whatever else their link carries.
        wait: seconds in which workers that are alive have to ask for the next step after a change,
            counted from the first one that asks. That may be one that joins in the middle of a step
            or a round: with less than these take, most would leave out the rest again and again.
            With more, all may wait for a new worker that is not ready, if another one dies.

    Raises:
        UserError: if torchft is not installed, or it cannot listen there.
    """
    with importing_torchft("a lighthouse needs"):
        from torchft.coordination import LighthouseServer
    try:
        return LighthouseServer(
            bind=bind,
            min_replicas=min_workers,
            join_timeout_ms=round(1000 * wait),
            heartbeat_timeout_ms=round(1000 * silence),
        )
    except RuntimeError as error:
        raise UserError(f"--bind {bind} is not possible: {error}") from error


@contextmanager
def serving(wait: float = _SILENCE) -> Iterator[str]:
    """Run a lighthouse for this machine in a process of its own; give its address.

    Args:
        wait: seconds that workers wait for others that are alive.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid(), wait), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_STARTING):
            raise RunFailed(f"the lighthouse has not started within {_STARTING:.0f} s")
        try:
            yield ours.recv()
        except EOFError:
            raise RunFailed("the lighthouse could not be started") from None
    finally:
        process.kill()
        process.join()


def _serve(ready: Connection, parent: int, wait: float) -> None:
    for each in SIGNALS:  # the launcher ends it, last of all
        signal.signal(each, signal.SIG_IGN)
    die_with(parent)
    lighthouse = start(f"{HOST}:0", silence=_SILENCE, wait=wait)
    ready.send(f"{HOST}:{lighthouse.address().rpartition(':')[2]}")
    signal.pause()


def main(arguments: list[str]) -> None:
    """Run until a signal ends it."""
    parser = make_parser("lighthouse", __doc__, "--bind 10.0.0.1:29510 --min-workers 2")
    parser.add_argument(
        "--bind",
        default=f"{HOST}:{PORT}",
        metavar="HOST:PORT",
        help="where to listen; default: %(default)s, for this machine alone",
    )
    parser.add_argument(
        "--min-workers",
        type=whole(1),
        default=1,
        metavar="N",
        help="workers without which no step begins; default: 1",
    )
    parser.add_argument(
        "--wait",
        type=number(1, 10**6),
        default=WAIT,
        metavar="SECONDS",
        help="how long workers that are alive may be busy before the others begin a step without"
        " them: longer than a step, or a round of local steps, takes; default: %(default)g",
    )
    options = parser.parse_args(arguments)
    split_address(options.bind, f"--bind {options.bind}")
    lighthouse = start(options.bind, options.min_workers, wait=options.wait)
    port = lighthouse.address().rpartition(":")[2]
    here = f"{options.bind.rpartition(':')[0]}:{port}"
    print(f"lighthouse at {here}; workers join with dlion.join({here!r})", flush=True)
    try:
        signal.pause()
    finally:
        lighthouse.shutdown()
