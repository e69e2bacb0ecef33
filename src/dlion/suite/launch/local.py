"""Starts the processes of a run on this machine, and ends all of them when one fails.

Processes are forked where possible: they start in a tenth of a second and share the loaded data.
A fork is safe only while its parent has no threads of its own, so nothing here starts one; the
processes meet through a file, not through a server in the parent. (torch.distributed.launcher
hosts such a server and forks beside it: now and then a child inherits a held lock and never
starts.)
"""

import fcntl
import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import ProcessContext, start_processes
from torch.multiprocessing.spawn import ProcessException

from dlion.errors import Finished, RunFailed, Stopped, TrainingFailed, UserError
from dlion.suite.launch.environment import LOOPBACK
from dlion.suite.launch.network import Network
from dlion.suite.launch.process_killer import ProcessKiller
from dlion.suite.machine import die_with
from dlion.suite.terminal import end_now
from dlion.suite.training.signals import SIGNALS, SignalNotice, woken_by_signals

# seconds that a process waits after it lost a peer, so that the peer's failure is reported first
PATIENCE = 2.0
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it logs every kill
_METHOD = "fork" if sys.platform == "linux" else "spawn"
_REFUSED = 2  # exit code of a process that would end in the same way if it were started again
_SENTENCES = (TrainingFailed, UserError)  # their messages are enough
# words of gloo, of NCCL, and of the thread of torch that watches NCCL and aborts the process
_LOST = re.compile(
    "timed out|operation timeout|connection (closed|reset)|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)
_ABORTED = re.compile(rb"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(.+)")
_LOOK = 1.0  # seconds between two looks at processes that are left as the run has ended
_PATIENT = 5  # such looks at one that is stopped, until it is killed
_REMEMBERED = 1 << 16  # bytes of what a process has written to standard error


def run_processes(
    processes: int,
    work: Callable[..., Any],
    *args: Any,
    network: Network | None = None,
    watched: bool = False,
    apart: bool = False,
    interface: str | None = LOOPBACK,
    restarts: int = 0,
    again: tuple[Any, ...] = (),
    killer: ProcessKiller | None = None,
) -> Any:
    """Run ``work(*args)`` in several processes.

    ``work`` can call :func:`dlion.suite.launch.meeting.join_process_group`.

    Args:
        processes: how many to start.
        work: the function to run.
        args: its arguments.
        network: connects the processes, and is entered already; None: loopback does.
        watched: whether torch's NCCL watchdog may abort them. Its reason is in their standard
            error, which then goes through this process.
        interface: that gloo uses; None: as the environment says, or gloo chooses.
        apart: whether the others continue when a process ends: they are workers that come and go.
        restarts: with ``apart``, how often a process is started again that was killed or crashed.
        again: arguments of ``work`` in such a process.
        killer: kills processes; with ``apart`` those are started again besides.

    Returns:
        The result of process 0, or with ``apart`` of the first that has one, after a round trip
        through JSON.

    Raises:
        RunFailed: naming the process that failed first and its error, when all have ended.
        Stopped: if ``work`` raised it. Any of SIGNALS is passed on to the processes as SIGTERM,
            after which they may do so.
        Finished: if it returned a result after such a signal.
        KeyboardInterrupt: on a second SIGINT or SIGTERM, when all have ended.
    """
    children: list[BaseProcess] = []
    signals: list[int] = []

    def tell_children() -> None:
        for child in children:
            child.terminate()

    def pass_on(number: int) -> None:
        if number in signals:
            if number in (signal.SIGINT, signal.SIGTERM):  # a second one means: do not wait
                raise KeyboardInterrupt
            return  # others may come from several senders: the kernel and the shell, say
        signals.append(number)
        if number == signal.SIGINT:
            print("ending after this step; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        tell_children()

    killer = killer or ProcessKiller(0, 0, 0)
    errors = _Errors(processes if watched else 0)
    folder = tempfile.TemporaryDirectory(prefix="dlion-processes-", ignore_cleanup_errors=True)
    with SignalNotice(pass_on) as notice, folder as name, _kept(name), errors:
        directory = Path(name)  # in which processes meet, and say how they ended
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until a child has its own handlers
        others = multiprocessing.active_children()
        try:
            with _temporary_files_in(directory):  # in which torch puts errors, pickled
                here = (os.getpid(), processes, directory, network, errors, apart, interface, work)
                context = _start(processes, *here, args)
            errors.started()
            children += context.processes
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            if signals:  # the mask is this thread's: another may have taken one before
                tell_children()
            if apart:
                start_again = partial(_start_again, children, (*here, again))
                options = (context.processes, directory, notice, start_again, restarts, killer)
                _Supervisor(*options).wait()
            else:
                _wait(context, directory, notice, errors, killer)
        finally:
            for child in {*multiprocessing.active_children()} - {*others}:
                child.kill()
                child.join()
            errors.pass_on()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        outcome = _outcome(directory, processes if apart else 1, notice)
    if "stopped_after" in outcome:
        raise Stopped(outcome["stopped_after"], notice.first)
    if notice.first is not None:
        raise Finished(outcome["result"], notice.first)
    return outcome["result"]


def _start(processes: int, *args: Any) -> ProcessContext:
    """Start processes that run ``_work(rank, *args)``."""
    try:
        return start_processes(_work, args, processes, join=False, start_method=_METHOD)
    except OSError as error:
        raise RunFailed(
            f"not all of {processes} processes could be started ({error.strerror}): type"
            " processes=N with fewer"
        ) from error


@contextmanager
def _kept(directory: str) -> Iterator[None]:
    """Keep systemd from a temporary directory, which it removes after ten days unless it is locked.

    Source: tmpfiles.d(5), on the age of files.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """Let temporary files be made in a private directory."""
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


class _Errors:
    """Standard error of processes: read here, passed on, and remembered.

    Args:
        processes: how many; 0: they keep that of this process.
    """

    def __init__(self, processes: int):
        pipes = [os.pipe() for _ in range(processes)]
        self.readers = {reader: rank for rank, (reader, _) in enumerate(pipes)}
        for reader in self.readers:
            os.set_blocking(reader, False)
        self._writers = [writer for _, writer in pipes]
        self._latest = [b""] * processes

    def __enter__(self) -> "_Errors":
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in (*self.readers, *self._writers):
            os.close(descriptor)

    def enter(self, rank: int) -> None:
        """Let this process, a new one, write into its pipe."""
        if self._writers:
            os.dup2(self._writers[rank], 2)
        self.__exit__()  # a copy of another's writer would hide its end from the launcher

    def started(self) -> None:
        """Leave the pipes to the processes, all of which have been started."""
        for writer in self._writers:
            os.close(writer)
        self._writers.clear()

    def pass_on(self) -> None:
        """Write pending output to the standard error of this process."""
        for reader, rank in list(self.readers.items()):
            with suppress(BlockingIOError):
                while piece := os.read(reader, _REMEMBERED):
                    self._latest[rank] = (self._latest[rank] + piece)[-_REMEMBERED:]
                    with suppress(OSError):
                        os.write(2, piece)
                del self.readers[reader]  # nobody writes any more
                os.close(reader)

    def of_watchdog(self, rank: int) -> str | None:
        """Return why torch's watchdog has aborted a process, if it has."""
        said = _ABORTED.search(self._latest[rank]) if self._latest else None
        return said and said[1].decode(errors="replace")


def _wait(
    context: ProcessContext,
    directory: Path,
    notice: SignalNotice,
    errors: _Errors,
    killer: ProcessKiller,
) -> None:
    """Wait until all processes have succeeded or one has failed.

    Raises:
        RunFailed, Stopped, KeyboardInterrupt: as :func:`run_processes` does.
    """
    ended, suspended = False, []
    try:
        while not ended:
            with woken_by_signals() as woken:
                until = killer.kill_due(dict(enumerate(context.processes)))
                connection.wait([*context.sentinels, *errors.readers, woken], until)
            errors.pass_on()
            suspended = [i for i, p in enumerate(context.processes) if _is_suspended(p.pid)]
            # after a failure the others cannot continue
            ended = context.join(timeout=0, grace_period=0)
    except ProcessException as error:
        signal_name = getattr(error, "signal_name", None)
        if signal_name == "SIGTERM" and notice.first is not None:
            raise Stopped(None, notice.first) from None  # it had not begun to train
        errors.pass_on()
        aborted = errors.of_watchdog(error.error_index) if signal_name == "SIGABRT" else None
        failures = _failures(len(context.processes), directory)
        if aborted is not None:
            failures[error.error_index] = (aborted, bool(_LOST.search(aborted)))
        reason = _reason(error.error_index, signal_name, suspended, failures)
        raise RunFailed(reason, leaving=notice.first is not None) from None


def _start_again(children: list[BaseProcess], args: tuple[Any, ...], rank: int) -> BaseProcess:
    """Run ``_work(rank, *args)`` in one more of ``children``."""
    context = multiprocessing.get_context(_METHOD)
    process = context.Process(target=_work, args=(rank, *args))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it has its own handlers
    process.start()
    children.append(process)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


class _Supervisor:
    """Waits for processes that come and go; says why each failed, and how many are left."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        directory: Path,
        notice: SignalNotice,
        start_again: Callable[[int], BaseProcess],
        restarts: int,
        killer: ProcessKiller,
    ):
        self._count, self._directory, self._notice = len(processes), directory, notice
        self._start_again, self._restarts, self._killer = start_again, restarts, killer
        self._left = dict(enumerate(processes))
        self._late: dict[int, BaseProcess] = {}  # those that were started again
        self._stopped: Counter[int] = Counter()  # looks at which each was stopped, since the end
        self._finished = False  # whether one has reached the last step: who has not joined need not

    def wait(self) -> None:
        """Wait until all have ended."""
        left, killer = self._left, self._killer
        while left:
            with woken_by_signals() as woken:
                sentinels = [process.sentinel for process in left.values()]
                until = _LOOK if self._finished else killer.kill_due(left)
                connection.wait([*sentinels, woken], until)
            if self._finished:
                self._end_suspended()
            if self._notice.first is not None:
                killer.end()
            for rank in killer.returning():
                if rank not in left:
                    del killer.away[rank]
                    self._bring_back(rank)
            for rank, process in [*left.items()]:
                process.join(0)
                if process.exitcode is not None:
                    del left[rank]
                    self._note_end(rank, process.exitcode)

    def _end_suspended(self) -> None:
        """Kill who was stopped as the run ended: nobody waits for it."""
        for rank, process in self._left.items():
            self._stopped[rank] = (self._stopped[rank] + 1) * _is_suspended(process.pid)
            if self._stopped[rank] == _PATIENT:
                self._late[rank] = process
                print(
                    f"process {rank} is stopped (SIGSTOP, or a debugger) as the run has ended: it"
                    " is killed",
                    file=sys.stderr,
                    flush=True,
                )
                process.kill()

    def _bring_back(self, rank: int) -> None:
        self._left[rank] = self._late[rank] = self._start_again(rank)

    def _note_end(self, rank: int, exit_code: int) -> None:
        told = exit_code == 0 and _read_outcome(self._directory, rank).get("signal")
        if exit_code == 0 and not told:
            self._finished = True
            self._killer.end()
            for process in self._late.values():
                process.terminate()
            return
        awaited = not (self._finished and rank in self._late)
        if self._notice.first is None and self._left and awaited:
            if told:  # alone, by earlyoom say
                why = f"process {rank} has left, as {signal.Signals(told).name} asked"
            else:
                name = signal.Signals(-exit_code).name if exit_code < 0 else None
                why = _reason(rank, name, [], _failures(self._count, self._directory))
            _outcome_file(self._directory, rank).unlink(missing_ok=True)
            print(f"{why}; {self._go_on(rank, exit_code)}", file=sys.stderr, flush=True)

    def _go_on(self, rank: int, exit_code: int) -> str:
        """Start one that has ended again, if it may be; return what is said of it."""
        continuing = f"{len(self._left)} here continue"
        if rank in self._killer.away:
            return f"{continuing}, and it returns"
        if exit_code in (0, _REFUSED) or not self._restarts:
            return continuing
        self._restarts -= 1
        self._bring_back(rank)
        return "it is started again"


def _outcome(directory: Path, processes: int, notice: SignalNotice) -> dict[str, Any]:
    """Return how the first of so many processes ended that has a result, or else has stopped.

    Raises:
        RunFailed: if all have failed.
        Stopped: if a signal has ended them before they began to train.
    """
    found = [_read_outcome(directory, rank) for rank in range(processes)]
    for kind in ("result", "stopped_after"):
        for outcome in found:
            if kind in outcome:
                return outcome
    if notice.first is not None:
        raise Stopped(None, notice.first)
    failures = _failures(processes, directory)
    rank = min(failures, default=0)
    raise RunFailed(_reason(rank, None, [], failures))


def _outcome_file(directory: Path, rank: int) -> Path:
    """Return the file with the outcome of process ``rank``: JSON of one of three shapes.

    They are ``{"result": what work returned}``, ``{"stopped_after": step, "signal": the number of
    one that this process got, or null}`` and ``{"failed": a sentence, "lost_peer": whether it
    waited for another process in vain}``. A killed process leaves no file.
    """
    return directory / f"outcome-{rank}.json"


def _read_outcome(directory: Path, rank: int) -> dict[str, Any]:
    """Return how process ``rank`` has ended; empty if it was killed, even while it wrote."""
    with suppress(OSError, ValueError):
        return json.loads(_outcome_file(directory, rank).read_text())
    return {}


def _failures(processes: int, directory: Path) -> dict[int, tuple[str, bool]]:
    """Return the sentence of each failed process, and whether it lost a peer."""
    outcomes = {rank: _read_outcome(directory, rank) for rank in range(processes)}
    return {
        rank: (outcome["failed"], outcome["lost_peer"])
        for rank, outcome in outcomes.items()
        if "failed" in outcome
    }


def _reason(
    rank: int, signal_name: str | None, suspended: list[int], failures: dict[int, tuple[str, bool]]
) -> str:
    """Return one sentence about why process ``rank`` failed, or the peer for which it waited."""
    if rank not in failures:
        how = f"was killed by {signal_name}" if signal_name else "ended early"
        return f"process {rank} {how}"
    sentence, lost_peer = failures[rank]
    if not lost_peer:
        return f"process {rank} failed: {sentence}"
    for other, (cause, lost_too) in failures.items():  # it has failed, but not ended
        if not lost_too:
            return f"process {other} failed: {cause}"
    if suspended:
        return f"process {suspended[0]} does not answer: it was stopped (SIGSTOP, or a debugger)"
    return (  # not a dead one, which would have been reported first
        f"process {rank} failed: no message from the others within timeout=:"
        f" one of them hangs, or the network is down ({sentence})"
    )


def _is_suspended(pid: int) -> bool:
    """Whether a process is stopped or traced; never where /proc does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt inside, as SIGINT does, so that contexts are exited."""
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
    errors: _Errors,
    apart: bool,
    interface: str | None,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Set up a new process, run ``work(*args)`` in it, and write its outcome."""
    # the launcher's handlers were inherited; a terminal or a SLURM step signals all processes, but
    # what is to happen is the launcher's to say, by a SIGTERM that before training ends the process
    for number in SIGNALS:  # one that is ignored for a moment is lost, even if it is blocked
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with(parent)
    gc.freeze()  # what the launcher has imported is not looked through again, nor copied
    errors.enter(rank)
    tempfile.tempdir = None  # what is temporary here goes where it always does
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "DLION_RENDEZVOUS": str(directory / "rendezvous"),
    }
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if network is not None:
        network.enter(rank)
    file = _outcome_file(directory, rank)
    try:
        result = _report_failure(work, *args)
        file.write_text(json.dumps({"result": result}))
    except Stopped as stop:
        file.write_text(json.dumps({"stopped_after": stop.step, "signal": stop.signal}))
    except Exception as error:
        failure = {"failed": sentence_of(error), "lost_peer": lost_peer(error)}
        file.write_text(json.dumps(failure))
        end_now(_REFUSED if isinstance(error, _SENTENCES) else 1)
    if apart:
        end_now(0)  # a thread of torchft may still ask a lighthouse that is gone


def run_one_process(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)`` as one of the processes that torchrun or SLURM has started.

    Raises:
        RunFailed: naming this process and its error, which was printed if it is worth that.
    """
    try:
        return _report_failure(work, *args)
    except (Stopped, *_SENTENCES):
        raise
    except Exception as error:
        raise RunFailed(f"process {os.environ['RANK']} failed: {sentence_of(error)}") from error


def _report_failure(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)``; print the traceback of an error, unless it is that of a lost peer."""
    try:
        return work(*args)
    except Stopped:
        raise
    except Exception as error:
        if isinstance(error, dist.DistBackendError) or lost_peer(error):
            time.sleep(PATIENCE)
        elif not isinstance(error, _SENTENCES):
            print(f"process {os.environ['RANK']}:", file=sys.stderr)
            traceback.print_exc()
        raise


def lost_peer(error: Exception) -> bool:
    """Whether a collective waited in vain; only the text tells gloo's RuntimeError from others."""
    if isinstance(error, _SENTENCES) or not _LOST.search(str(error)):
        return False
    of_torch = isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError)
    return of_torch or "gloo" in str(error)


def sentence_of(error: Exception) -> str:
    """Return the last line of an error, with its type unless it was written to be read."""
    if isinstance(error, _SENTENCES):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
