"""Waiting for messages over gloo, which forgets some of those who wait."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist


class Waits:
    """Waits for messages of a gloo group, until :meth:`end` at the latest.

    When a connection ends, gloo tells those whose message has not begun. Who has sent or received a
    part of one is not told, and waits for the whole timeout (``Pair::signalException`` in gloo's
    ``transport/tcp/pair.cc`` leaves out ``rx_`` and the unbound buffers of ``tx_``). On a slow link
    most workers that die do so in the midst of a message. So threads wait, which may be left. Such
    a one stays until the timeout; if Python ends at that very moment, it aborts.

    Args:
        group: its destructor waits for gloo's threads, so nobody drops it before they are done.
    """

    def __init__(self, group: Any):
        self._group = group
        self._ended: Future[None] = Future()
        self._threads: list[SimpleQueue[Any]] = []  # what they have to do
        self._idle: list[SimpleQueue[Any]] = []

    def wait(self, requests: Sequence[Any], limit: timedelta) -> None:
        """Wait for each of the ``requests`` as long as ``limit``; 0: as long as gloo does.

        Raises:
            RuntimeError: at the end of waiting, or for a message that failed.
        """

        def work() -> None:
            for request in requests:
                request.wait(limit)

        there: Future[None] = Future()
        self._idle_thread().put((there, work))
        try:
            try:
                wait((there, self._ended), return_when=FIRST_COMPLETED)
            except BaseException:  # of a signal: Python may abort if it ends while a thread waits
                wait((there, self._ended), return_when=FIRST_COMPLETED)
                raise
            if not there.done():
                raise dist.DistError("a peer has left, or stopped")
            there.result()
        finally:
            del there  # an error refers to this frame

    def end(self) -> None:
        """Let all who wait go on, with an error."""
        with suppress(InvalidStateError):  # it has ended
            self._ended.set_result(None)
        for jobs in self._threads:
            jobs.put(None)

    def _idle_thread(self) -> "SimpleQueue[Any]":
        with suppress(IndexError):
            return self._idle.pop()
        jobs: SimpleQueue[Any] = SimpleQueue()
        self._threads.append(jobs)
        Thread(target=self._work, args=(jobs,), daemon=True).start()
        return jobs

    def _work(self, jobs: "SimpleQueue[Any]") -> None:
        while not self._ended.done() and (job := jobs.get()):
            settle(*job)
            del job  # and its messages
            self._idle.append(jobs)


def settle(result: Future[None], work: Callable[[], None]) -> None:
    """Do some work, and give a future its result."""
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
    finally:
        del result, work  # an error refers to this frame
