"""Start the processes of a run on this machine, and end them all when one fails."""

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dlion.errors import RunFailed

# a worker that lost a peer waits so long, so that the peer's own failure is the one reported
PATIENCE = 2.0  # seconds


def run_processes(processes: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)`` in so many processes; returns what process 0 returned.

    Raises:
        RunFailed: naming the process that failed first and its error. The others are ended.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # everything stays on this machine; only the interface named by the user may be another
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id=f"dlion-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
        # forked workers start in a tenth of a second and share the loaded data
        start_method="fork" if sys.platform == "linux" else "spawn",
    )
    try:
        return elastic_launch(config, _work)(os.getpid(), work, args)[0]
    except ChildFailedError as failure:
        if any(first.exitcode == -signal.SIGINT for first in failure.failures.values()):
            raise KeyboardInterrupt from None
        raise RunFailed(_describe(failure)) from None


def _describe(failure: ChildFailedError) -> str:
    rank, first = min(failure.failures.items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0:
        return f"process {rank} was killed by {signal.Signals(-first.exitcode).name}"
    message = first.message
    if isinstance(message, dict):
        message = message["message"]
    return f"process {rank} failed: {message}"


@record
def _work(parent: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # the launcher's handlers were inherited; a worker told to end just ends
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    return report_failure(work, *args)


def report_failure(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)``; print where an error came from, after those of lost peers."""
    try:
        return work(*args)
    except Exception as error:
        if isinstance(error, dist.DistBackendError) or "Connection" in str(error):
            time.sleep(PATIENCE)
        elif "RANK" in os.environ:
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
