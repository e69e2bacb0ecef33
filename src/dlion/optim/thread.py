"""Runs exchanges beside the backward pass, one after the other."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

Exchanged = Callable[[], list[Tensor]]


class ExchangeThread:
    """Carries out exchanges in the order they are sent, on a thread of its own if they overlap.

    One thread, first in first out: collectives must be issued in the same order on every process.
    On CUDA that thread works on a stream of its own, which waits for the gradients and which the
    update waits for.
    """

    def __init__(self, overlap: bool):
        self.overlap = overlap
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._jobs: dict[int, Future[list[Tensor]] | Exchanged] = {}
        self._done: dict[int, torch.cuda.Event] = {}

    def send(self, place: int, device: torch.device, exchanged: Exchanged) -> None:
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

    def receive(self, place: int) -> list[Tensor]:
        """The answers of an exchange, when they are there."""
        job = self._jobs.pop(place)
        if not isinstance(job, Future):
            return job()
        answers = job.result()
        done = self._done.pop(place, None)
        if done is not None:
            stream = torch.cuda.current_stream(answers[0].device)
            done.wait(stream)
            for answer in answers:
                answer.record_stream(stream)
        return answers

    @torch.no_grad()
    def _carry(
        self,
        place: int,
        device: torch.device,
        exchanged: Exchanged,
        ready: torch.cuda.Event | None,
    ) -> list[Tensor]:
        if ready is None:
            return exchanged()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            ready.wait()
            answers = exchanged()
            done = torch.cuda.Event()
            done.record()
        self._done[place] = done
        return answers
