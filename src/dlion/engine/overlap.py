"""Runs exchanges beside the backward pass, one after the other."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dlion.engine.bucket import Bucket
from dlion.exchange import run_together


class ExchangeThread:
    """Runs the exchanges of buckets in the order they are submitted.

    With ``overlap`` they run on a thread of its own, first in first out, as collectives must be
    issued in the same order on every process. On CUDA that thread works on a stream of its own for
    each device, which waits for the messages and which the update waits for. Without ``overlap`` an
    exchange runs when it is waited for.
    """

    def __init__(self, overlap: bool):
        self.overlap = overlap
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: dict[Bucket, Future[torch.cuda.Event | None]] = {}

    def submit(self, bucket: Bucket) -> None:
        """Begin the exchange of a bucket whose messages are complete."""
        if not self.overlap:
            return
        if self._executor is None:
            threads = torch.get_num_threads()
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=torch.set_num_threads, initargs=(threads,)
            )
        ready = torch.cuda.Event() if bucket.device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(bucket.device))
        self._running[bucket] = self._executor.submit(self._run, bucket, ready)

    def wait(self, buckets: Sequence[Bucket]) -> None:
        """Return when the exchanges of submitted buckets are over; raise what they raised."""
        if not self.overlap:
            run_together([bucket.stages() for bucket in buckets])
            return
        for bucket in buckets:
            done = self._running.pop(bucket).result()
            if done is not None:
                stream = torch.cuda.current_stream(bucket.device)
                done.wait(stream)
                for result in (*bucket.exchange.answer, bucket.exchange.headers):
                    result.record_stream(stream)

    def finish(self) -> None:
        """Let what is under way end on this host, whatever becomes of it."""
        for future in self._running.values():
            future.exception()

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        self.finish()
        self._running.clear()

    def close(self) -> bool:
        """End the thread; return whether nothing was under way."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        return all(future.done() for future in self._running.values())

    @torch.no_grad()
    def _run(self, bucket: Bucket, ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if ready is None:
            bucket.prepare()
            bucket.run_exchange()
            return None
        if bucket.device not in self._streams:
            self._streams[bucket.device] = torch.cuda.Stream(bucket.device)
        stream = self._streams[bucket.device]
        with torch.cuda.device(bucket.device), torch.cuda.stream(stream):
            ready.wait()
            bucket.prepare()
            bucket.run_exchange()
            done = torch.cuda.Event()
            done.record()
        return done
