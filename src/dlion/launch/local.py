"""Start the processes of a run on this machine, and end them all when one fails.

Processes are forked where possible: they start in a tenth of a second and share the loaded data.
A fork is safe only while its parent has no threads of its own, so nothing here starts one; the
processes meet through a file, not through a server in the parent. (torch.distributed.launcher
hosts such a server and forks beside it: now and then a child inherits a lock that is held, and
never starts.)
"""

import ctypes
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessException

from dlion.errors import RunFailed, Stopped, TrainingFailed
from dlion.launch.environment import LOOPBACK
from dlion.launch.network import Network
from dlion.training.signals import SIGNALS, SignalNotice

# seconds: a worker that lost a peer waits, so that the peer's own failure is the one reported
PATIENCE = 2.0
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # tells of every kill
_LOST = re.compile("timed out|operation timeout|connection (closed|reset)", re.IGNORECASE)


def run_processes(
    processes: int, work: Callable[..., Any], *args: Any, network: Network | None = None
) -> Any:
    """Run ``work(*args)`` in so many processes; return what process 0 returned, as JSON carries it.

    In each, :func:`dlion.launch.environment.join_process_group` joins the others, over the emulated
    ``network`` (already entered here) if there is one, else over loopback.

    Raises:
        RunFailed: naming the process that failed first and its error. The others are ended.
        Stopped: if ``work`` raised it. SIGTERM is handed on to the processes, which may do so.
        KeyboardInterrupt: on SIGINT, or a second SIGTERM, when all are ended.
    """
    with SignalNotice() as notice, tempfile.TemporaryDirectory(prefix="dlion-") as directory:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until a child has its own handlers
        context = start_processes(
            _work,
            args=(os.getpid(), processes, Path(directory), network, work, args),
            nprocs=processes,
            join=False,
            start_method="fork" if sys.platform == "linux" else "spawn",
        )
        told: list[int] = []

        def tell(number: int) -> None:
            if number in told:  # whoever says it twice does not want to wait
                raise KeyboardInterrupt
            told.append(number)
            for process in context.processes:
                process.terminate()

        notice.tell = tell
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            ended, stopped = False, []
            while not ended:
                connection.wait(context.sentinels.keys())
                stopped = [i for i, p in enumerate(context.processes) if _is_stopped(p.pid)]
                ended = context.join(grace_period=0)  # after a failure nobody else can do more
        except ProcessException as error:
            signal_name = getattr(error, "signal_name", None)
            if signal_name == "SIGINT":  # Ctrl-C reaches the workers too
                raise KeyboardInterrupt from None
            if signal_name == "SIGTERM" and notice.came is not None:
                raise Stopped(None, notice.came) from None  # it had not begun to train
            raise RunFailed(
                _reason(error, Path(directory), stopped), notice.came is not None
            ) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        outcome = json.loads(_outcome_file(Path(directory), 0).read_text())
    if "stopped_after" in outcome:
        raise Stopped(outcome["stopped_after"], notice.came)
    return outcome["result"]


def _outcome_file(directory: Path, rank: int) -> Path:
    """Where process ``rank`` writes how it ended, as a JSON object of one of three shapes.

    ``{"result": what work returned}``, ``{"stopped_after": step}`` or ``{"failed": a sentence,
    "lost_peer": whether the others are to blame}``. A killed process leaves none.
    """
    return directory / f"outcome-{rank}.json"


def _reason(error: ProcessException, directory: Path, stopped: list[int]) -> str:
    """Why a run failed, in one sentence: a process that waited is not the one to blame."""
    rank, file = error.error_index, _outcome_file(directory, error.error_index)
    if not file.exists():
        if signal_name := getattr(error, "signal_name", None):
            return f"process {rank} was killed by {signal_name}"
        return f"process {rank} ended early"
    outcome = json.loads(file.read_text())
    if outcome["lost_peer"] and stopped:
        return f"process {stopped[0]} does not answer: it was stopped (SIGSTOP, or a debugger)"
    if outcome["lost_peer"]:  # one that has died is the first that the launcher hears of
        return (
            f"process {rank} failed: it has lost the others, who are still there: for longer than"
            f" timeout= one of them hangs, or a link is cut ({outcome['failed']})"
        )
    return f"process {rank} failed: {outcome['failed']}"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


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
    # the launcher's handlers were inherited; a worker told to end before it trains just ends
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a whole SLURM step may get them
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _die_with(parent)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "DLION_RENDEZVOUS": f"file://{directory}/rendezvous",
        # everything stays on this machine
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }
    if network is not None:
        network.enter(rank)
    file = _outcome_file(directory, rank)
    try:
        result = report_failure(work, *args)
        file.write_text(json.dumps({"result": result if rank == 0 else None}))
    except Stopped as stop:
        file.write_text(json.dumps({"stopped_after": stop.step}))
    except Exception as error:
        failure = {"failed": _sentence(error), "lost_peer": _lost_peer(error)}
        file.write_text(json.dumps(failure))
        raise


def report_failure(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)``; print where an error came from, unless it is that of a lost peer."""
    try:
        return work(*args)
    except Stopped:
        raise
    except Exception as error:
        if isinstance(error, dist.DistBackendError) or _lost_peer(error):
            time.sleep(PATIENCE)
        elif not isinstance(error, TrainingFailed):
            print(f"process {os.environ['RANK']}:", file=sys.stderr)
            traceback.print_exc()
        raise


def _lost_peer(error: Exception) -> bool:
    """Whether a collective waited in vain (gloo raises a plain RuntimeError, told by its text)."""
    return _LOST.search(str(error)) is not None


def _sentence(error: Exception) -> str:
    """The last line of an error, after its type unless it was written to be read."""
    if isinstance(error, TrainingFailed):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip().splitlines()[-1]


def _die_with(parent: int) -> None:
    """Have the kernel end this process should the launcher be killed."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
