"""Exact sums on a grid of workers: far fewer messages than direct-send, and the same sums.

n workers stand on a grid ``m_1 x ... x m_D``, row by row, so that those of the last dimension are
neighbours. One dimension after the other, the last first, every worker sends to each of the others
in its line the sums so far about the slices that are owned in that one's direction, and adds what
it gets; after the first dimension it holds the sums of its whole grid about its own slice. The
answers come back through the dimensions in the opposite order. A worker sends
``2 sum_j (m_j - 1)`` messages instead of ``2 (n - 1)``.

Stage j is about ``1 / (m_{j+1} ... m_D)`` of the parameters, in as many bits as a sum of so many
workers needs: with 32 x 32 workers and one-bit messages 1.08 times the bytes of direct-send. Sums
of integers do not depend on their order and owners are those of direct-send, so answers, ties and
state are too, element by element. The first messages, which are the largest part, stay among
neighbours: where the workers of a node are numbered one after the other and are as many as the last
dimension, only sums leave the node.

Virtual workers of one process send and receive as if each had a process of its own.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Exchange
from dlion.exchange.vote import LevelMean, LevelSum, Vote
from dlion.transfer import index_of
from dlion.values import Called, Limits
from dlion.workers import Workers

Topology = Literal["direct", "grid", "auto"]
TOPOLOGIES = get_args(Topology)
Shape = Annotated[
    tuple[Annotated[int, Limits(ge=2)], ...],
    Limits(min_length=2),
    Called("the sizes of a grid, such as [4, 2]"),
]
SQUARE = 256  # workers, beyond which a third dimension saves more messages than it costs bytes
PROBE = 128 * 1024  # bytes that each worker sends to measure what a byte costs
REPEATS = 5


class Line(NamedTuple):
    """A dimension of a grid of workers: ``size`` in a line, their numbers ``stride`` apart."""

    size: int
    stride: int

    def workers(self, worker: int) -> range:
        """The workers in the line of one, by their places in it."""
        first = worker - worker // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


class OnGrid(LevelSum):
    """Sums of levels on a grid.

    Args:
        shape: sizes of the dimensions; their product is n.
        args, kwargs: of the exchange that it is mixed into.

    Attributes:
        sent_along: bytes that the workers here have sent along each dimension, by its stride.
    """

    direct = False

    def __init__(self, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        self._lines = [*map(Line, shape, strides)]
        self.sent_along: Counter[int] = Counter()

    def _collect(self) -> tuple[Sequence[Tensor], Tensor]:
        """Send the messages on their way to the owners of their slices, adding them.

        Those of absent workers are not looked at.

        Returns:
            the rows that each of k owners adds for the sums of all workers, uint8 ``[m, bytes]``,
            from the m workers in its line; and the headers of all participants.
        """
        participants, n = self.channel.participants, self.channel.workers.count
        rows = self.up.view(self._messages)
        held, headers = rows.transpose(1, 2), self._message_headers[:, :1]
        highest = self.levels - 1
        for line in reversed(self._lines):
            senders = Counter(worker // line.stride for worker in participants)
            below, highest = highest, (self.levels - 1) * max(senders.values())
            if line.stride > 1:
                with self.channel.timer.vote:
                    held = _add(rows, below, highest).unflatten(2, (-1, self.words))
            who = None if len(senders) == n // line.stride else frozenset(senders)
            rows, headers = self._send(held, headers, line, who)
        self.highest, senders = highest, index_of(tuple(participants), headers.device)
        return rows.flatten(2).view(torch.uint8).unbind(), headers[0].index_select(0, senders)

    def _broadcast(self) -> Tensor:
        held = self._answers.unsqueeze(1)
        for line in self._lines:
            parts = held.flatten(1).unsqueeze(1).expand(-1, line.size, -1).contiguous()
            received = self._along(parts, line)
            held = received.unflatten(2, held.shape[1:]).transpose(1, 2).flatten(1, 2)
        return held[0]

    def _send(
        self, held: Tensor, headers: Tensor, line: Line, senders: frozenset[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Send the slices of each direction along one dimension.

        Args:
            held: int64 ``[k, planes, slices, words]``.
            headers: uint8 ``[k, workers, bytes]`` of the workers whose sums are held.
            senders: as for :meth:`_along`: who has anything to send.

        Returns:
            ``[k, size, planes, slices / size * words]``, and all headers that were received.
        """
        parts = held.unflatten(2, (-1, line.size)).movedim(3, 1)
        k, m, *shape = parts.shape
        size = parts[0, 0].nbytes
        message = headers.new_empty(k, m, size + headers[0].nbytes)
        message[..., :size].view(torch.int64).unflatten(2, shape).copy_(parts)
        message[..., size:] = headers.flatten(1).unsqueeze(1)
        received = self._along(message, line, senders)
        rows = received[..., :size].view(torch.int64).unflatten(2, (shape[0], -1))
        return rows, received[..., size:].unflatten(2, headers.shape[1:]).flatten(1, 2)

    def _along(self, parts: Tensor, line: Line, senders: frozenset[int] | None = None) -> Tensor:
        """Send ``parts[i, c]`` from local worker i to the one in place c of its line.

        Args:
            parts: uint8 ``[k, size, s]``.
            senders: numbers of senders, divided by the stride; None: all. Equal everywhere.

        Returns:
            ``[k, size, s]``: what each local worker got from the places in its line, zeros from
            those who do not send.
        """
        w, (*_, s) = self.channel.workers, parts.shape
        route = _route(w.rank, w.processes, w.local, line, senders)
        leaves = sum(route.to) - route.to[w.rank]
        self.channel.count(route.sent * s, route.received * s, leaves * s)
        self.sent_along[line.stride] += route.sent * s
        outgoing = parts.flatten(0, 1)[index_of(route.there, parts.device)]
        incoming = outgoing.new_empty(len(route.back), s)
        self.channel.all_to_all(outgoing.split(route.to), incoming.split(route.sources))
        result = torch.empty_like(parts) if senders is None else torch.zeros_like(parts)
        result.view(-1, s).index_copy_(0, index_of(route.back, parts.device), incoming)
        return result


class GridVote(OnGrid, Vote):
    """A vote on a grid."""


class GridLevelMean(OnGrid, LevelMean):
    """A mean of levels on a grid."""


def make_sum(
    cls: type[Vote] | type[LevelMean],
    topology: Topology | Shape,
    channel: Channel,
    numel: int,
    levels: int = 2,
    *args: Any,
    **buffers: Any,
) -> Vote | LevelMean:
    """Return an exchange of levels, on a grid where that is asked for and there is one.

    Args:
        cls: of the direct exchange.
        topology: direct; grid: on that of ``grid_shape``; auto: the fastest, as measured once
            for a channel, by all processes together; or the sizes of the grid.
        channel, numel, levels, args, buffers: of the exchange.

    Raises:
        ValueError: if the sizes are of another number of workers.
    """
    shape = _choose(topology, channel, numel, levels - 1, buffers.get("device", "cpu"))
    if len(shape) < 2:
        return cls(channel, numel, levels, *args, **buffers)
    on_grid = GridVote if cls is Vote else GridLevelMean
    return on_grid(shape, channel, numel, levels, *args, **buffers)


def _choose(
    topology: Topology | Shape,
    channel: Channel,
    numel: int,
    largest: int,
    device: torch.device | str,
) -> tuple[int, ...]:
    """Return the shape of a grid; of fewer than two dimensions: none."""
    n = channel.workers.count
    if not isinstance(topology, str):
        if math.prod(topology) != n:
            raise ValueError(
                f"exchange={list(topology)} is not possible: a grid of {n} workers has sizes whose"
                f" product is {n}"
            )
        return tuple(topology)
    if topology == "grid":
        return grid_shape(n)
    if topology == "direct" or channel.workers.processes == 1:
        return ()
    if channel not in _costs:
        _costs[channel] = measure_costs(channel.workers, device)
    return _costs[channel].best(numel, largest)


def bytes_along(exchanges: Iterable[Exchange]) -> Counter[int]:
    """Return the bytes that the workers here have sent along each dimension, by its stride."""
    grids = [exchange for exchange in exchanges if isinstance(exchange, OnGrid)]
    return sum((exchange.sent_along for exchange in grids), Counter())


class _Route(NamedTuple):
    """The way of messages along a line.

    Attributes:
        there, back: places in ``[k * size]`` of the messages that are sent, in the order of the
            processes they go to, and of those received.
        to, sources: messages for each process, and from each.
        sent, received: messages of the workers here to and from others.
    """

    there: tuple[int, ...]
    back: tuple[int, ...]
    to: list[int]
    sources: list[int]
    sent: int
    received: int


@lru_cache(maxsize=256)
def _route(
    rank: int, processes: int, local: int, line: Line, senders: frozenset[int] | None
) -> _Route:
    """Return the way of messages between the workers of process ``rank`` and those in their lines.

    ``senders``: as for :meth:`OnGrid._along`.
    """
    own = [rank * local + i for i in range(local)]

    def sends(worker: int) -> bool:
        return senders is None or worker // line.stride in senders

    pairs = [(worker, other) for worker in own for other in line.workers(worker)]
    # of worker a to b, of a place: all in the order of senders, then receivers, within a process
    there = sorted((b // local, a, b, place) for place, (a, b) in enumerate(pairs) if sends(a))
    back = sorted((a // local, a, b, place) for place, (b, a) in enumerate(pairs) if sends(a))
    to, sources = (Counter(process for process, *_ in way) for way in (there, back))
    return _Route(
        there=tuple(place for *_, place in there),
        back=tuple(place for *_, place in back),
        to=[to[q] for q in range(processes)],
        sources=[sources[q] for q in range(processes)],
        sent=sum(a != b for _, a, b, _ in there),
        received=sum(a != b for _, a, b, _ in back),
    )


class Costs(NamedTuple):
    """Measured costs of exchanges between these workers.

    Attributes:
        rounds: seconds of an exchange of next to nothing, by the shape of its grid.
        byte: seconds for a byte that a worker sends.
    """

    rounds: dict[tuple[int, ...], float]
    byte: float

    def best(self, numel: int, largest: int) -> tuple[int, ...]:
        """Return the grid on which an exchange of so many parameters is the shortest.

        Args:
            numel: number of parameters.
            largest: the largest value in a message.
        """

        def seconds(shape: tuple[int, ...]) -> float:
            return self.rounds[shape] + self.byte * numel / 8 * bits_up(shape, largest)

        return min(self.rounds, key=seconds)


_costs: WeakKeyDictionary[Channel, Costs] = WeakKeyDictionary()


def measure_costs(workers: Workers, device: torch.device | str = "cpu") -> Costs:
    """Measure votes on grids of one, two and three dimensions; all processes call it together.

    All get the same result, medians averaged over processes. It takes some dozens of exchanges of
    short messages, and some of 128 KB a worker.
    """
    channel, n, k = Channel(workers), workers.count, workers.local
    shapes = list(dict.fromkeys(grid_shape(n, dimensions) for dimensions in (1, 2, 3)))
    votes = [make_sum(Vote, shape, channel, n, header_bytes=8, device=device) for shape in shapes]
    answers = [torch.zeros(k, size, dtype=torch.uint8, device=device) for size in (8, PROBE // n)]
    cases: list[Callable[[], Tensor]] = [partial(_vote, vote) for vote in votes]
    cases += [partial(channel.gather, answer) for answer in answers]
    seconds = torch.zeros(k, len(cases), 1 + REPEATS, dtype=torch.float64)
    for turn in range(1 + REPEATS):
        for index, case in enumerate(cases):
            channel.barrier()
            start = time.perf_counter()
            case().cpu()  # waits for a GPU
            seconds[:, index, turn] = time.perf_counter() - start
    medians = seconds[..., 1:].median(-1).values
    everyones = Channel(workers.with_cpu_group()).gather(medians)
    *rounds, short, long = everyones.mean(0).tolist()
    byte = max(0.0, long - short) / ((n - 1) * answers[1].shape[1])
    return Costs(dict(zip(shapes, rounds, strict=True)), byte)


def _vote(exchange: Vote | LevelMean) -> Tensor:
    exchange.run(0)
    return exchange.answer


def bits_up(shape: tuple[int, ...], largest: int) -> float:
    """Return the bits per parameter that a worker sends on the way to the owners.

    ``largest``: of a value in a message. Back they are those of direct-send on any grid.
    """
    bits, workers = 0.0, 1
    for size in reversed(shape):
        bits += (size - 1) / (workers * size) * (largest * workers).bit_length()
        workers *= size
    return bits


def grid_shape(n: int, dimensions: int | None = None) -> tuple[int, ...]:
    """Return the grid of n workers with the fewest messages, ascending sizes; one for a prime n.

    The last dimension, whose messages are of one bit a vote, is the largest, which saves bytes.

    Args:
        n: the number of workers.
        dimensions: at most so many; None: two up to 256 workers, three beyond.
    """
    most = dimensions or (2 if n <= SQUARE else 3)
    return min(_factorings(n, most), key=lambda sizes: (sum(sizes) - len(sizes), len(sizes)))


def _factorings(n: int, most: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Yield the ascending tuples of at most so many factors, from ``least`` on, of n."""
    yield (n,)
    if most > 1:
        for first in range(least, math.isqrt(n) + 1):
            if n % first == 0:
                for rest in _factorings(n // first, most - 1, first):
                    yield (first, *rest)


def _add(rows: Tensor, largest: int, limit: int) -> Tensor:
    """Add ``[k, m, planes, words]`` over m: ``[k, q, words]``, with the planes ``limit`` needs.

    ``largest``: of a value in a row; ``limit``: of a sum, which some rows may be absent from.
    """
    sums = rows.new_empty(len(rows), (rows.shape[1] * largest).bit_length(), rows.shape[3])
    for values, total in zip(rows, sums, strict=True):
        kernels.sum_planes(values, largest, total)
    return sums[:, : limit.bit_length()]
