"""Bytes from process to process: over gloo, or by the collectives of another backend."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.compat import all_gather_single
from dlion.workers import Workers

AT_ONCE = 256 * 1024  # bytes of all messages of a process; all of these measured, results/speed
IN_FLIGHT = 128 * 1024
TELLING = 64 * 1024  # bytes that tell a rate: 32 ms on a slow link, in which all have their turn

Tensors = Tensor | Sequence[Tensor]


class Waiting:
    """Waits for messages of a gloo group; a subclass may give up."""

    def wait_queued(self, request: Any) -> None:
        """Wait for a collective, which gloo's own thread runs."""
        request.wait()

    def wait(self, requests: Iterable[Any]) -> None:
        """Wait for messages of ``send`` and ``recv``."""
        for request in requests:
            request.wait()


class Collectives:
    """The collectives of a backend such as NCCL."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def all_to_all(self, outgoing: Tensors, incoming: Tensors) -> None:
        """Send ``outgoing[q]`` to process q and fill ``incoming[q]`` from it.

        Tensors, ``[P, ...]``, are of one size on all processes; other sequences may be ragged.
        """
        dist.all_to_all(list(incoming), list(outgoing), group=self._workers.group)

    def all_gather(self, part: Tensor, everything: Tensor) -> None:
        """Send ``part``, ``[...]``, to all processes, which get ``everything``, ``[P, ...]``."""
        all_gather_single(everything.view(-1), part.view(-1), self._workers.group)

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier(group=self._workers.group)


class Gloo(Collectives):
    """Messages over gloo, from process to process.

    Long messages go in rounds: in round i process r sends to r + i and receives from r - i, and
    rounds wait for each other once more than ``IN_FLIGHT`` bytes are under way. Gloo's own
    all-to-all starts all at once; on a switched Ethernet long messages then get in each other's way
    (1.45 instead of 1.1 times the wire time, results/speed), but short ones share one latency and
    one handing over to its thread. On slow links every message is long.

    Args:
        waiting: for the messages.

    Attributes:
        slow: whether messages leave one after the other; equal on all processes.
        fastest: bytes a second of the fastest messages since it was set to 0.
    """

    def __init__(self, workers: Workers, waiting: Waiting | None = None) -> None:
        super().__init__(workers)
        self._waiting = waiting or Waiting()
        self.slow, self.fastest = False, 0.0

    @property
    def _group(self) -> Any:
        """The group, for calls that torch.distributed would refuse to one that it did not make."""
        return self._workers.group or dist.group.WORLD

    def all_to_all(self, outgoing: Tensors, incoming: Tensors) -> None:
        even = torch.is_tensor(outgoing) and torch.is_tensor(incoming)
        size, start = sum(part.nbytes for part in outgoing), time.perf_counter()
        size -= outgoing[self._workers.rank].nbytes
        if incoming[0].is_cuda:  # gloo sends from main memory
            received = [torch.empty_like(part, device="cpu") for part in incoming]
            self._in_rounds([part.cpu() for part in outgoing], received)
            for part, copy in zip(incoming, received, strict=True):
                part.copy_(copy)
        elif even and size + outgoing[0].nbytes <= AT_ONCE and not self.slow:
            sent = outgoing.contiguous().view(-1)
            request = self._group.alltoall_base(incoming.view(-1), sent, [], [])
            self._waiting.wait_queued(request)
        else:
            self._in_rounds(outgoing, incoming)
        if size >= TELLING:  # waiting for others slows messages too, so the fastest ones tell
            self.fastest = max(self.fastest, size / (time.perf_counter() - start))

    def all_gather(self, part: Tensor, everything: Tensor) -> None:
        self.all_to_all(part.expand(everything.shape), everything)

    def barrier(self) -> None:
        self._waiting.wait_queued(self._group.barrier())

    def _in_rounds(self, outgoing: Tensors, incoming: Tensors) -> None:
        rank, processes = self._workers.rank, self._workers.processes
        incoming[rank].copy_(outgoing[rank])
        rounds: deque[tuple[int, list[Any]]] = deque()
        in_flight, limit = 0, 0 if self.slow else IN_FLIGHT
        for i in range(1, processes):
            to, source = (rank + i) % processes, (rank - i) % processes
            there, back = outgoing[to], incoming[source]
            requests = [self._group.recv([back], source, 0)] if back.numel() else []
            if there.numel():
                requests.append(self._group.send([there], to, 0))
            rounds.append((max(there.nbytes, back.nbytes), requests))
            in_flight += rounds[-1][0]
            while in_flight > limit:
                in_flight -= self._complete(*rounds.popleft())
        for round_ in rounds:
            self._complete(*round_)

    def _complete(self, size: int, requests: list[Any]) -> int:
        """Wait for the messages of a round; return its size."""
        self._waiting.wait(requests)
        return size
