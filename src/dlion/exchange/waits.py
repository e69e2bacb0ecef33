"""Waiting for messages over gloo, which forgets some of those who wait."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch.distributed as dist


class Waits:
    """Waits for messages of a gloo group, until :meth:`end` at the latest.

    When a connection ends, gloo tells those whose message has not begun. Who has sent or received a
    part of one is not told, and waits for the whole timeout (``Pair::signalException`` in gloo's
    ``transport/tcp/pair.cc`` leaves out ``rx_`` and the unbound buffers of ``tx_``). On a slow link
    most workers that die do so in the midst of a message. So a thread waits, which may be left.

    Args:
        group: kept as long as a thread waits; who drops it last waits for its threads.
    """

    def __init__(self, group: Any):
        self._group = group
        self._ended: Future[None] = Future()

    def wait(self, requests: Sequence[Any], limit: timedelta) -> None:
        """Wait for each of the ``requests`` of this group, as long as ``limit``; 0: its timeout.

        Raises:
            RuntimeError: at the end of waiting, or for a message that failed.
        """
        there = settled(partial(self._wait, requests, limit))
        wait((there, self._ended), return_when=FIRST_COMPLETED)
        if not there.done():
            raise dist.DistError("a peer has left, or stopped")
        there.result()

    def _wait(self, requests: Sequence[Any], limit: timedelta) -> None:
        for request in requests:
            request.wait(limit)

    def end(self) -> None:
        """Let all who wait go on, with an error."""
        with suppress(InvalidStateError):  # it has ended
            self._ended.set_result(None)


def settled(work: Callable[[], None]) -> Future[None]:
    """Do some work in a thread that can be left behind; return its result."""
    result: Future[None] = Future()

    def settle() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    Thread(target=settle, daemon=True).start()
    return result
