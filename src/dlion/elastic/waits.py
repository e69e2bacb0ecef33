"""Waiting for messages over gloo, which forgets some of those who wait."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch.distributed as dist

from dlion.exchange.transport import Waiting

_LOOK = timedelta(seconds=0.2)  # between two looks at whether to wait


class Waits(Waiting):
    """Waits for messages of a gloo group, until :meth:`end` at the latest.

    When a connection ends, gloo tells those whose message has not begun. Who has sent or received a
    part of one is not told, and waits for the whole timeout (``Pair::signalException`` in gloo's
    ``transport/tcp/pair.cc`` leaves out ``rx_`` and the unbound buffers of ``tx_``). On a slow link
    most workers that die do so in the midst of a message. So a thread waits, which may be left. It
    stays until the timeout; if Python ends at that very moment, it aborts.

    Args:
        group: its destructor waits for gloo's threads, so nobody drops it before they are done.
        limit: for a message. Gloo's own is what it was when the group was made.
    """

    def __init__(self, group: Any, limit: timedelta):
        self._group, self._limit = group, limit
        self._ended: Future[None] = Future()

    def wait_queued(self, request: Any) -> None:
        """Wait for a collective, which gloo's own thread runs; errors are those of :meth:`wait`."""
        try:
            while not request.is_completed() and not self._ended.done():
                with suppress(RuntimeError):  # not yet there; what failed is raised below
                    request.wait(_LOOK)
        except BaseException:  # of a signal, see wait()
            request.wait()
            raise
        if request.is_completed():
            request.wait()
        else:
            self.wait([request])  # which raises: waiting has ended

    def wait(self, requests: Iterable[Any]) -> None:
        """Wait for messages of ``send`` and ``recv``.

        Raises:
            RuntimeError: at the end of waiting, or for a message that failed.
        """
        there = in_thread(partial(self._wait, requests))
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

    def _wait(self, requests: Iterable[Any]) -> None:
        for request in requests:
            request.wait(self._limit)


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Start some work in a thread that may be left behind; return its result."""
    result: Future[None] = Future()
    Thread(target=_settle, args=(result, work), daemon=True).start()
    return result


def _settle(result: Future[None], work: Callable[[], None]) -> None:
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
    finally:
        del result, work  # an error refers to this frame
