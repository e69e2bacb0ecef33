"""Runs exchanges beside the backward pass, one after the other."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dlion.exchange import Exchange


class Courier:
    """Carries out exchanges in the order they are sent, on a thread of its own if they overlap.

    One thread, first in first out: collectives must be issued in the same order on every process.
    On CUDA that thread works on a stream of its own, which waits for the gradients and which the
    update waits for.
    """

    def __init__(self, overlap: bool):
        self.overlap = overlap
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._jobs: dict[int, Future[None] | Callable[[], None]] = {}
        self._done: dict[int, torch.cuda.Event] = {}

    def send(self, place: int, device: torch.device, exchanged: Callable[[], None]) -> None:
        """Begin the exchange of a bucket on ``device`` (without overlap: note it)."""
        if not self.overlap:
            self._jobs[place] = exchanged
            return
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(
                1, "exchange", initializer=torch.set_num_threads, initargs=(threads,)
            )
        ready = torch.cuda.Event() if device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(device))
        self._jobs[place] = self._thread.submit(self._carry, place, device, exchanged, ready)

    def wait(self, place: int, exchange: Exchange) -> None:
        """Until the exchanges sent up to this place are carried out; then ``exchange`` is used."""
        for earlier in sorted(key for key in self._jobs if key <= place):
            job = self._jobs.pop(earlier)
            if isinstance(job, Future):
                job.result()
            else:
                job()
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(exchange.answers[0].device)
        for earlier in range(place + 1):
            done = self._done.pop(earlier, None)
            if done is not None:
                done.wait(stream)
        for answer in exchange.answers:
            answer.record_stream(stream)

    @torch.no_grad()
    def _carry(
        self,
        place: int,
        device: torch.device,
        exchanged: Callable[[], None],
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is None:
            exchanged()
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            ready.wait()
            exchanged()
            done = torch.cuda.Event()
            done.record()
        self._done[place] = done
