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
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange.channel import Channel, Line
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


class Grid:
    """The stages of an exchange of bit planes on a grid.

    Args:
        channel: to the other workers.
        shape: sizes of the dimensions; their product is n.
        largest: the largest value in a message.

    Attributes:
        highest: the largest value in the rows that were collected last.
    """

    def __init__(self, channel: Channel, shape: tuple[int, ...], largest: int = 1) -> None:
        self.channel, self.shape, self.largest, self.highest = channel, shape, largest, largest
        self.lines: list[Line] = []  # the last dimension first
        stride = 1
        for size in reversed(shape):
            self.lines.append(Line(size, stride))
            stride *= size

    def collect(self, messages: Tensor, headers: Tensor) -> tuple[Tensor, Tensor]:
        """Send the messages of the local workers on their way to the owners of their slices.

        Args:
            messages: int64 ``[k, n, planes, words]``; those of absent workers are not looked at.
            headers: uint8 ``[k, bytes]``, whole words.

        Returns:
            the rows that owners add to have the sums of all workers, planes as uint8 ``[m, k, s]``,
            from the m workers in the line of each owner; and the headers of all participants.
        """
        participants = self.channel.participants
        held, headers = messages.transpose(1, 2), headers.unsqueeze(1)
        rows, highest = messages, self.largest  # of the dimension before
        for line in self.lines:
            senders = Counter(worker // line.stride for worker in participants)
            below, highest = highest, self.largest * max(senders.values())
            if line.stride > 1:
                with self.channel.timer.vote:
                    held = _add(rows, below, highest).unflatten(2, (-1, messages.shape[3]))
            all_send = len(senders) == self.channel.workers.count // line.stride
            who = None if all_send else set(senders)
            rows, headers = self._send(held, headers, line, who)
        self.highest, senders = highest, index_of(tuple(participants), headers.device)
        rows = rows.flatten(2).view(torch.uint8).transpose(0, 1)
        return rows, headers[0].index_select(0, senders)

    def broadcast(self, answers: Tensor) -> Tensor:
        """Send each local worker's answer to everyone: uint8 ``[k, s]`` -> ``[n, s]``."""
        held = answers.unsqueeze(1)
        for line in reversed(self.lines):
            parts = held.flatten(1).unsqueeze(1).expand(-1, line.size, -1).contiguous()
            received = self.channel.along(parts, line)
            held = received.unflatten(2, held.shape[1:]).transpose(1, 2).flatten(1, 2)
        return held[0]

    def _send(
        self, held: Tensor, headers: Tensor, line: Line, senders: set[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Send the slices of each direction along one dimension.

        Args:
            held: int64 ``[k, planes, slices, words]``.
            headers: uint8 ``[k, workers, bytes]`` of the workers whose sums are held.
            senders: as for :meth:`Channel.along`: who has anything to send.

        Returns:
            ``[k, size, planes, slices / size * words]``, and all headers that were received.
        """
        parts = held.unflatten(2, (-1, line.size)).movedim(3, 1)
        k, m, *shape = parts.shape
        size = parts[0, 0].nbytes
        message = headers.new_empty(k, m, size + headers[0].nbytes)
        message[..., :size].view(torch.int64).unflatten(2, shape).copy_(parts)
        message[..., size:] = headers.flatten(1).unsqueeze(1)
        received = self.channel.along(message, line, senders)
        rows = received[..., :size].view(torch.int64).unflatten(2, (shape[0], -1))
        return rows, received[..., size:].unflatten(2, headers.shape[1:]).flatten(1, 2)


class GridChoice:
    """The grids of an optimizer's exchanges, as ``exchange=`` asks for them."""

    def __init__(self, wanted: Topology | Shape) -> None:
        self._wanted = wanted
        self._costs: Costs | None = None

    def sizes(
        self, workers: Workers, device: torch.device, numel: int, largest: int
    ) -> tuple[int, ...]:
        """Return the sizes of one exchange's grid, see :meth:`Costs.best`; fewer than two: direct.

        All processes call it together, as ``auto`` measures at the first call.
        """
        wanted, n = self._wanted, workers.count
        if not isinstance(wanted, str):
            if math.prod(wanted) != n:
                raise ValueError(
                    f"exchange={list(wanted)} is not possible: a grid of {n} workers has"
                    f" sizes whose product is {n}"
                )
            return tuple(wanted)
        if wanted == "grid":
            return grid_shape(n)
        if wanted == "direct" or workers.processes == 1:
            return ()
        self._costs = self._costs or measure_costs(workers, device)
        return self._costs.best(numel, largest)


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


def measure_costs(workers: Workers, device: torch.device | str = "cpu") -> Costs:
    """Measure exchanges on grids of one, two and three dimensions; all processes call it together.

    All get the same result, medians averaged over processes. It takes some dozens of exchanges of
    short messages, and some of 128 KB a worker.
    """
    channel, n, k = Channel(workers), workers.count, workers.local
    tiny = torch.zeros(k, n, 1, 1, dtype=torch.int64, device=device)
    answer, share = tiny[:, 0, 0].view(torch.uint8), PROBE // n
    large = answer.new_zeros(k, share)

    def direct() -> Tensor:
        channel.scatter(tiny.flatten(1).view(torch.uint8).view(k, n, -1))
        return channel.gather(answer)

    def on_grid(grid: Grid) -> Tensor:
        grid.collect(tiny, answer)
        return grid.broadcast(answer)

    shapes = list(dict.fromkeys(grid_shape(n, dimensions) for dimensions in (1, 2, 3)))
    grids = (Grid(channel, shape) for shape in shapes[1:])
    cases = [direct, *(partial(on_grid, grid) for grid in grids)]
    cases += [partial(channel.gather, answer), partial(channel.gather, large)]
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
    byte = max(0.0, long - short) / ((n - 1) * share)
    return Costs(dict(zip(shapes, rounds, strict=True)), byte)


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
