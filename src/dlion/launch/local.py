"""Start the processes of a run on this machine, and end them all when one fails.

Processes are forked where possible: they start in a tenth of a second and share the loaded data.
A fork is safe only while its parent has no threads of its own, so nothing here starts one; the
processes meet through a file, not through a server in the parent. (torch.distributed.launcher
hosts such a server and forks beside it: now and then a child inherits a lock that is held, and
never starts.)
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from dlion.errors import RunFailed
from dlion.launch.network import Network

# seconds: a worker that lost a peer waits, so that the peer's own failure is the one reported
PATIENCE = 2.0
# seconds from being told to end to being killed
GRACE = 3.0


def run_processes(
    processes: int, work: Callable[..., Any], *args: Any, network: Network | None = None
) -> Any:
    """Run ``work(*args)`` in so many processes; returns what process 0 returned.

    In each, :func:`dlion.launch.environment.join_process_group` joins the others, over the emulated
    ``network`` (already entered here) if there is one, else over loopback.

    Raises:
        RunFailed: naming the process that failed first and its error. The others are ended.
        KeyboardInterrupt: on SIGINT and SIGTERM, when all are ended.
    """
    with interruptible(), tempfile.TemporaryDirectory(prefix="dlion-") as directory:
        context = start_processes(
            _work,
            args=(os.getpid(), processes, Path(directory), network, work, args),
            nprocs=processes,
            join=False,
            start_method="fork" if sys.platform == "linux" else "spawn",
        )
        try:
            while not context.join(grace_period=GRACE):
                pass
        except ProcessRaisedException as error:
            reason = str(error).strip().splitlines()[-1]
            raise RunFailed(f"process {error.error_index} failed: {reason}") from None
        except ProcessExitedException as error:
            if error.signal_name == "SIGINT":  # Ctrl-C reaches the workers too
                raise KeyboardInterrupt from None
            how = f"was killed by {error.signal_name}" if error.signal_name else "ended early"
            raise RunFailed(f"process {error.error_index} {how}") from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads((Path(directory) / "result").read_text())


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in here, as SIGINT does, so that things are put away."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _work(
    rank: int,
    parent: int,
    processes: int,
    directory: Path,
    network: Network | None,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # the launcher's handlers were inherited; a worker told to end just ends
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "DLION_RENDEZVOUS": f"file://{directory}/rendezvous",
        # everything stays on this machine
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    if network is not None:
        network.enter(rank)
    result = report_failure(work, *args)
    if rank == 0:
        (directory / "result").write_text(json.dumps(result))


def report_failure(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)``; print where an error came from, unless it is that of a lost peer."""
    try:
        return work(*args)
    except Exception as error:
        if isinstance(error, dist.DistBackendError) or "Connection" in str(error):
            time.sleep(PATIENCE)
        else:
            print(f"process {os.environ['RANK']}:", file=sys.stderr)
            traceback.print_exc()
        raise


def _die_with(parent: int) -> None:
    """Have the kernel end this process should the launcher be killed."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
