"""Transport of bytes between workers, and the one place where they are counted."""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.elastic.waits import Waits
from dlion.timer import Timer
from dlion.transfer import index_of
from dlion.workers import Workers, backends

AT_ONCE = 256 * 1024  # bytes of all messages of a process; all of these measured, results/speed
IN_FLIGHT = 128 * 1024
SLOW = 2_000_000  # bytes a second, below which messages leave one after the other
TELLING = 64 * 1024  # bytes that tell it: 32 ms, in which even one of many processes has its turn
ROWS = 256  # that are added at a time; torch adds fewer than 2**15 values on one thread

Tensors = Tensor | Sequence[Tensor]


@dataclass
class Traffic:
    """Bytes counted at the collectives, all virtual workers of this process together.

    A message from a virtual worker to another counts as if it had travelled, even inside one
    process: ``sent_bytes`` and ``received_bytes`` belong to the n workers, not to their spread.
    ``process_sent_bytes`` is what this process really handed to the network. ``sent_along`` has the
    part of ``sent_bytes`` that went along a dimension of a grid, by its stride.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    process_sent_bytes: int = 0
    collectives: int = 0
    sent_along: Counter[int] = field(default_factory=Counter)


class Line(NamedTuple):
    """A dimension of a grid of workers: ``size`` in a line, their numbers ``stride`` apart."""

    size: int
    stride: int

    def workers(self, worker: int) -> range:
        """The workers in the line of one, by their places in it."""
        first = worker - worker // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


class Channel:
    """The collectives the exchanges are made of, in terms of workers instead of processes.

    Of n workers k are hosted here; m take part in this step (:meth:`set_participants`; by default
    all), k' of those hosted here. Tensors are uint8 and contiguous, but :meth:`gather` takes any.

    Everything goes directly from process to process. Over gloo, long messages go in rounds: in
    round i process r sends to r + i and receives from r - i, and rounds wait for each other once
    more than ``IN_FLIGHT`` bytes are under way. Gloo's own all-to-all starts all at once; on a
    switched Ethernet long messages then get in each other's way (1.45 instead of 1.1 times the wire
    time, results/speed), but short ones share one latency and one handing over to its thread. On
    slow links every message is long (:meth:`adapt`).

    Attributes:
        alone: whether messages stay in this process, as there is no other. Set to False they go
            through the collectives of a group of one process: how NCCL is tried on one GPU.
        slow: whether the links were slow here, as far as messages before :meth:`adapt` told.
    """

    def __init__(self, workers: Workers):
        self.workers = workers
        self.traffic = Traffic()
        self.timer = Timer()
        self.alone = workers.processes == 1
        self._backends = backends(workers.group) if dist.is_initialized() else {}
        self.slow = self._one_by_one = False
        self._fastest = 0.0  # bytes a second
        self._waits: Waits | None = None
        self.set_participants(None)

    def move(self, workers: Workers, waits: Waits | None = None) -> None:
        """Continue with other workers, on a gloo group that torch need not know.

        Args:
            waits: for its messages, if workers may leave.
        """
        self.workers, self.alone = workers, workers.processes == 1
        self._backends = dict.fromkeys(("cpu", "cuda"), "gloo")
        self.slow = self._one_by_one = False
        self._fastest, self._waits = 0.0, waits
        self.set_participants(None)

    def adapt(self, slow: bool) -> None:
        """Say whether the links of some process are ``slow``; equal everywhere."""
        self._one_by_one = slow
        self.slow, self._fastest = 0 < self._fastest < SLOW, 0.0

    def set_participants(self, participants: Sequence[int] | None) -> None:
        """Say which workers take part from now on, ascending; None: all. Equal everywhere.

        Attributes set by it:
            participants: all of them.
            local_participants: the local indices of those hosted here.
        """
        w = self.workers
        self.participants = list(range(w.count) if participants is None else participants)
        self.local_participants = [
            worker - w.ids.start for worker in self.participants if worker in w.ids
        ]
        of = [worker // w.local for worker in self.participants]
        self._senders_of = [of.count(q) for q in range(w.processes)]  # senders of each process

    @property
    def _group(self) -> Any:
        """The group, for calls that torch.distributed would refuse to one that it did not make."""
        return self.workers.group or dist.group.WORLD

    @property
    def owned(self) -> slice:
        """The workers hosted here, among all."""
        return slice(self.workers.ids.start, self.workers.ids.stop)

    def scatter(self, parts: Tensor, out: Tensor | None = None) -> Tensor:
        """Send ``parts[i, j]`` from the i-th local participant to worker j.

        Args:
            parts: ``[k', n, s]``.
            out: where to put the result, ``[n, k, s]``, if all take part and there are several
                processes.

        Returns:
            ``[m, k, s]``: what each participant sent to each local worker.
        """
        w, m = self.workers, len(self.participants)
        k, (senders, n, s) = w.local, parts.shape
        leaves = self._count(
            sent=senders * (n - 1) * s,
            received=(m * k - senders) * s,
            process=senders * (n - k) * s,
        )
        if self.alone:
            return parts
        if m < n:
            rows = parts.view(senders, w.processes, k * s).transpose(0, 1).flatten(1).contiguous()
            incoming = parts.new_empty(m * k * s)
            sizes = [c * k * s for c in self._senders_of]
            self._all_to_all(list(rows), incoming.split(sizes), leaves)
            return incoming.view(m, k, s)
        outgoing = parts.view(k, w.processes, k, s).transpose(0, 1).contiguous()
        incoming = torch.empty_like(outgoing) if out is None else out.view(outgoing.shape)
        self._all_to_all(outgoing, incoming, leaves)
        return incoming.view(n, k, s)

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Send ``part[i]`` from local worker i to everyone: ``[k, ...]`` -> ``[n, ...]``.

        Args:
            part: of any dtype, on a device whose tensors the group carries.
            out: uint8 ``[n, s]``, where to put the result of a uint8 part (unused within one
                process).
        """
        w, (k, *shape) = self.workers, part.shape
        s = part[0].nbytes
        sent = part.contiguous().view(torch.uint8).view(k, s)
        others = w.count - 1
        leaves = self._count(k * others * s, k * others * s, k * s * (w.processes - 1))
        if self.alone:
            return part
        everything = sent.new_empty(w.count, s) if out is None else out
        if self._backends[sent.device.type] == "gloo":
            parts = sent.expand(w.processes, k, s)
            self._all_to_all(parts, everything.view(w.processes, k, s), leaves)
        else:
            # torch 2.13 has renamed it, and warns
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            with self._travel(leaves):
                gather(everything.view(-1), sent.view(-1), group=w.group)
        return everything.view(part.dtype).view(w.count, *shape)

    def along(self, parts: Tensor, line: Line, senders: Collection[int] | None = None) -> Tensor:
        """Send ``parts[i, c]`` from local worker i to the one in place c of its line.

        Args:
            parts: ``[k, size, s]``.
            line: a dimension of the grid of all workers.
            senders: numbers of senders, divided by the stride; None: all. Equal everywhere.

        Returns:
            ``[k, size, s]``: what each local worker got from the places in its line, zeros from
            those who do not send.
        """
        w, s = self.workers, parts.shape[2]
        route = _route(w.rank, w.local, line, senders and frozenset(senders))
        leaves = self._count(route.sent * s, route.received * s, route.leaves * s)
        self.traffic.sent_along[line.stride] += route.sent * s
        flat = parts.flatten(0, 1)
        result = torch.empty_like(flat) if senders is None else torch.zeros_like(flat)
        outgoing = {  # views of single rows, else copies
            q: flat[index_of(places, flat.device)] if len(places) > 1 else flat[places[0]]
            for q, places in route.outgoing.items()
        }
        incoming = {
            q: flat.new_empty(len(places), s) if len(places) > 1 else result[places[0]]
            for q, places in route.incoming.items()
        }
        with self._travel(leaves):
            if self.alone or self._backends[flat.device.type] == "gloo":
                self._in_rounds(outgoing, incoming)
            else:
                nothing, everyone = flat[:0], range(w.processes)
                there, back = ([p.get(q, nothing) for q in everyone] for p in (outgoing, incoming))
                dist.all_to_all(back, there, group=w.group)
        for q, places in route.incoming.items():
            if len(places) > 1:
                result[index_of(places, flat.device)] = incoming[q]
        return result.view(parts.shape)

    def scatter_ragged(
        self, parts: list[list[Tensor]], sizes: Tensor, device: torch.device | str
    ) -> list[list[Tensor]]:
        """Like :meth:`scatter` for parts of differing size.

        Args:
            parts: ``parts[i][j]``, 1-D, from the i-th local participant to worker j.
            sizes: ``[m, k]``, the bytes that local worker j will receive from each participant.
                (They are known beforehand: the exchange sends them in a header.)
            device: of the parts, which a process without participants has none of.

        Returns:
            ``[i][j]``: what the i-th participant sent to local worker j.
        """
        w = self.workers
        k, blocks = w.local, range(w.processes)
        own = w.ids
        lengths = [[part.numel() for part in row] for row in parts]
        to_self = sum(row[own[i]] for i, row in zip(self.local_participants, lengths, strict=True))
        leaves = sum(size for row in lengths for j, size in enumerate(row) if j not in own)
        self._count(
            sent=sum(map(sum, lengths)) - to_self,
            received=int(sizes.sum()) - to_self,
            process=leaves,
        )
        if self.alone:
            return parts
        ordered = [p for q in blocks for row in parts for p in row[q * k : (q + 1) * k]]
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        outgoing = torch.cat([nothing, *ordered])
        send = [sum(sum(row[q * k : (q + 1) * k]) for row in lengths) for q in blocks]
        receive = [int(rows.sum()) for rows in sizes.split(self._senders_of)]
        incoming = outgoing.new_empty(sum(receive))
        self._all_to_all(outgoing.split(send), incoming.split(receive), leaves)
        pieces = iter(incoming.split(sizes.flatten().tolist()))
        return [[next(pieces) for _ in range(k)] for _ in self.participants]

    def gather_ragged(self, part: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Like :meth:`gather` for parts of differing size; ``sizes``: bytes from each worker."""
        w = self.workers
        n, own = w.count, w.ids
        mine = sum(sizes[i] for i in own)
        leaves = self._count(
            sent=(n - 1) * mine,
            received=w.local * sum(sizes) - mine,
            process=(w.processes - 1) * mine,
        )
        if self.alone:
            return part
        outgoing = torch.cat(part)
        receive = [sum(sizes[q * w.local : (q + 1) * w.local]) for q in range(w.processes)]
        incoming = outgoing.new_empty(sum(receive))
        self._all_to_all([outgoing] * w.processes, incoming.split(receive), leaves)
        return list(incoming.split(sizes))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` everywhere with that of process ``source``."""
        w = self.workers
        peers = (w.processes - 1) * tensor.nbytes if w.rank == source else 0
        received = tensor.nbytes if w.rank != source else 0
        self._count(sent=peers, received=received, process=peers)
        if w.processes > 1:
            dist.broadcast(tensor, group=w.group, group_src=source)

    def _all_to_all(self, outgoing: Tensors, incoming: Tensors, leaves: int) -> None:
        """Send ``outgoing[q]`` to process q and fill ``incoming[q]`` from it.

        Tensors, ``[P, ...]``, are of one size on all processes; other sequences may be ragged.
        ``leaves``: the bytes that are for other processes.
        """
        w = self.workers
        with self._travel(leaves):
            if self._backends[outgoing[0].device.type] != "gloo":
                dist.all_to_all(list(incoming), list(outgoing), group=w.group)
            elif (
                torch.is_tensor(outgoing)
                and torch.is_tensor(incoming)
                and not outgoing.is_cuda
                and outgoing.nbytes <= AT_ONCE
                and not self._one_by_one
            ):
                sent = outgoing.contiguous().view(-1)
                self._wait_queued(self._group.alltoall_base(incoming.view(-1), sent, [], []))
            else:
                self._in_rounds(dict(enumerate(outgoing)), dict(enumerate(incoming)))

    @contextmanager
    def _travel(self, size: int) -> Iterator[None]:
        """Time messages, of so many bytes in all, that leave this process."""
        start = time.perf_counter()
        with self.timer.travel:
            yield
        if size >= TELLING:  # waiting for others slows messages too, so the fastest ones tell
            # (of NCCL, which returns before anything has travelled, all look fast)
            self._fastest = max(self._fastest, size / (time.perf_counter() - start))

    def _in_rounds(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """As :meth:`_all_to_all`, by process; there need not be something for every one."""
        w, received = self.workers, incoming
        if w.processes > 1 and any(part.is_cuda for part in incoming.values()):
            outgoing = {q: part.cpu() for q, part in outgoing.items()}  # gloo sends from there
            incoming = {q: torch.empty_like(part, device="cpu") for q, part in received.items()}
        if w.rank in incoming:
            incoming[w.rank].copy_(outgoing[w.rank])
        rounds: deque[tuple[int, list[Any]]] = deque()
        in_flight, limit = 0, 0 if self._one_by_one else IN_FLIGHT
        distances = {(q - w.rank) % w.processes for q in outgoing}
        distances |= {(w.rank - q) % w.processes for q in incoming}
        for i in sorted(distances - {0}):
            to, source = (w.rank + i) % w.processes, (w.rank - i) % w.processes
            requests: list[Any] = []
            size = 0
            if source in incoming and incoming[source].numel():
                requests.append(self._group.recv([incoming[source]], source, 0))
                size = incoming[source].numel()
            if to in outgoing and outgoing[to].numel():
                requests.append(self._group.send([outgoing[to]], to, 0))
                size = max(size, outgoing[to].numel())
            rounds.append((size, requests))
            in_flight += size
            while in_flight > limit:
                in_flight -= self._complete(*rounds.popleft())
        for round_ in rounds:
            self._complete(*round_)
        if received is not incoming:
            for q, part in received.items():
                part.copy_(incoming[q])

    def _complete(self, size: int, requests: list[Any]) -> int:
        """Wait for the messages of a round; return its size."""
        if self._waits is not None:
            self._waits.wait(requests)
        else:
            for request in requests:
                request.wait()
        return size

    def _wait_queued(self, request: Any) -> None:
        if self._waits is not None:
            self._waits.wait_queued(request)
        else:
            request.wait()

    def barrier(self) -> None:
        """Wait until all processes are here, and have received all earlier messages."""
        if self.alone:
            return
        if self._backends.get("cpu") == "gloo":
            self._wait_queued(self._group.barrier())
        else:
            dist.barrier(group=self.workers.group)

    def _count(self, sent: int, received: int, process: int) -> int:
        """Add to the traffic; return the bytes that leave this process."""
        self.traffic.sent_bytes += sent
        self.traffic.received_bytes += received
        self.traffic.process_sent_bytes += process
        self.traffic.collectives += 1
        return process


class _Route(NamedTuple):
    """The way of messages along a line.

    Attributes:
        outgoing, incoming: by process, the places in ``[k * size]`` of what goes there, and of what
            comes from there; in the order of senders and receivers.
        sent, received: messages of the workers here to and from others.
        leaves: those to other processes.
    """

    outgoing: dict[int, tuple[int, ...]]
    incoming: dict[int, tuple[int, ...]]
    sent: int
    received: int
    leaves: int


@lru_cache(maxsize=256)
def _route(rank: int, local: int, line: Line, senders: frozenset[int] | None) -> _Route:
    """Return the way of messages between the workers of process ``rank`` and those in their lines.

    ``senders``: as for :meth:`Channel.along`.
    """
    there: list[tuple[int, int, int]] = []
    back: list[tuple[int, int, int]] = []
    for i in range(local):
        worker = rank * local + i
        for place, other in enumerate(line.workers(worker), i * line.size):
            if senders is None or worker // line.stride in senders:
                there.append((worker, other, place))
            if senders is None or other // line.stride in senders:
                back.append((other, worker, place))
    outgoing: dict[int, list[int]] = {}
    incoming: dict[int, list[int]] = {}
    for _, receiver, place in sorted(there):
        outgoing.setdefault(receiver // local, []).append(place)
    for sender, _, place in sorted(back):
        incoming.setdefault(sender // local, []).append(place)
    sent, received = (sum(a != b for a, b, _ in way) for way in (there, back))
    leaves = len(there) - len(outgoing.get(rank, []))
    gone, come = ({q: tuple(places) for q, places in way.items()} for way in (outgoing, incoming))
    return _Route(gone, come, sent, received, leaves)


def is_broken(error: RuntimeError) -> bool:
    """Whether a collective failed; only the text tells gloo's errors from others."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def sum_in_order(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dimension, ``[n, ...]`` -> ``[...]``, added from worker 0 to n - 1.

    Floating-point sums depend on their order; what workers send is added in this one everywhere,
    so that no result depends on how they are spread over processes. ``out``: where to put it.
    """
    total = torch.empty_like(rows[0]) if out is None else out
    total.copy_(rows[0])
    for row in rows[1:]:
        total += row
    return total


def sums_of_rows(values: Tensor) -> Tensor:
    """The sums of ``|v|`` of rows of 64 in float64, ``[m, 64]`` -> ``[m]``, for any threads.

    On a CPU some rows at a time, as torch would first make a float64 copy of all.
    """
    blocks = (values,) if values.is_cuda else values.split(ROWS)
    return torch.cat([block.abs().sum(-1, dtype=torch.float64) for block in blocks])
