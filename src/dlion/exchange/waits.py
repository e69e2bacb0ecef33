"""Waiting for messages over gloo, which forgets some of those who wait."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch.distributed as dist

_NO_LIMIT = timedelta(0)  # but that of the group
_LOOK = timedelta(seconds=0.2)  # between two looks at whether to wait


class Waits:
    """Waits for messages of a gloo group, until :meth:`end` at the latest.

    When a connection ends, gloo tells those whose message has not begun. Who has sent or received a
    part of one is not told, and waits for the whole timeout (``Pair::signalException`` in gloo's
    ``transport/tcp/pair.cc`` leaves out ``rx_`` and the unbound buffers of ``tx_``). On a slow link
    most workers that die do so in the midst of a message. So a thread waits, which may be left. It
    stays until the timeout; if Python ends at that very moment, it aborts.

    Args:
        group: its destructor waits for gloo's threads, so nobody drops it before they are done.
    """

    def __init__(self, group: Any):
        self._group = group
        self._ended: Future[None] = Future()

    def wait_queued(self, request: Any) -> None:
        """Wait for a collective, which gloo's own thread runs; errors are those of :meth:`wait`."""
        try:
            while not request.is_completed() and not self._ended.done():
                with suppress(RuntimeError):  # not yet there; the last line says what has failed
                    request.wait(_LOOK)
        except BaseException:  # of a signal, see wait()
            request.wait()
            raise
        if not request.is_completed():
            self._start([request], _NO_LIMIT)
            raise dist.DistError("a peer has left, or stopped")
        request.wait()

    def wait(self, requests: Sequence[Any], limit: timedelta) -> None:
        """Wait for messages of ``send`` and ``recv``, each as long as ``limit``.

        Raises:
            RuntimeError: at the end of waiting, or for a message that failed.
        """
        there = self._start(requests, limit)
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

    def _start(self, requests: Sequence[Any], limit: timedelta) -> "Future[None]":
        """Start a thread that waits; it keeps the group."""
        there: Future[None] = Future()
        work = partial(self._wait, requests, limit)
        Thread(target=settle, args=(there, work), daemon=True).start()
        return there

    def _wait(self, requests: Sequence[Any], limit: timedelta) -> None:
        for request in requests:
            request.wait(limit)


def settle(result: Future[None], work: Callable[[], None]) -> None:
    """Do some work, and give a future its result."""
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
    finally:
        del result, work  # an error refers to this frame
