"""The largest entries of each chunk of a vector, gathered by everyone from everyone.

Nobody owns a slice here: a worker sends its whole message to n - 1 others and receives n - 1, so
what it sends and receives grows with n, and everyone adds all messages by itself.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, Exchange
from dlion.rivals import kernels
from dlion.rivals.exchange.low_rank import Matrix
from dlion.rivals.wire import TopK, ValueBits


class Block(NamedTuple):
    """So many chunks of so many values each, one after the other from ``start`` on."""

    start: int
    count: int
    size: int

    def of(self, vector: Tensor) -> Tensor:
        """Return its part of a vector, ``[count, size]``."""
        return vector[self.start : self.start + self.count * self.size].view(self.count, self.size)


class Group(NamedTuple):
    """All chunks of one size: their wire, where they are, and where in a message.

    Attributes:
        starts: int64 ``[chunks, 1]``.
        part: bytes of the message.
    """

    wire: TopK
    blocks: list[Block]
    starts: Tensor
    part: slice


def blocks_of(start: int, length: int, most: int) -> list[Block]:
    """Cut a length into as few chunks of at most so many values as can be, as equal as can be."""
    chunks = -(-length // most)
    size, longer = divmod(length, chunks)
    blocks = [Block(start, longer, size + 1)] if longer else []
    return [*blocks, Block(start + longer * (size + 1), chunks - longer, size)]


def bits_each_way(chunk: int, k: int, value_bits: ValueBits, workers: int) -> tuple[float, float]:
    """Bits a value of whole chunks that are sent to each worker, and received from all others."""
    wire = TopK(chunk, min(k, chunk), value_bits)
    sent = wire.bits * wire.k / chunk
    return sent, sent * (workers - 1)


class TopKMean(Exchange):
    """The mean of the k largest entries of each chunk; entries that a worker leaves out count as 0.

    A message has one size, known beforehand; an absent worker's has none. Messages are added in the
    order of the workers.

    Args:
        blocks: the chunks of a vector of ``numel`` values; what is in none is not sent.
        k: entries of each chunk, or all of a smaller one; or a function of a chunk's size.
        value_bits: of a value on the wire, see :class:`dlion.rivals.wire.TopK`.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        blocks: Iterable[Block],
        k: int | Callable[[int], int],
        value_bits: ValueBits,
        **buffers: Unpack[Buffers],
    ) -> None:
        by_size = defaultdict(list)
        for block in blocks:
            by_size[block.size].append(block)
        counts = {size: k(size) if callable(k) else min(k, size) for size in by_size}
        wires = {size: TopK(size, count, value_bits) for size, count in counts.items()}
        super().__init__(channel, numel, **buffers)
        self._groups: list[Group] = []
        end = 0
        for size, wire in wires.items():
            starts = [torch.arange(count) * size + start for start, count, _ in by_size[size]]
            rows = torch.cat(starts).unsqueeze(1).to(self.device)
            part = slice(end, end := end + wire.nbytes(len(rows)))
            self._groups.append(Group(wire, by_size[size], rows, part))
        shape = channel.workers.local, end + self.header_bytes
        self._outbox = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self._messages, self._headers = self._outbox.split([end, self.header_bytes], dim=1)
        self._total = torch.zeros(numel, dtype=torch.float32, device=self.device)

    def encode(self, local: int, values: Tensor) -> Tensor:
        """Write the message of a local worker; return its decoded value: float32 ``[numel]``."""
        for group in self._groups:
            chunks = torch.cat([block.of(values) for block in group.blocks])
            places = kernels.largest(chunks, group.wire.k)
            message = self._messages[local, group.part]
            message.copy_(group.wire.encode((places, chunks.gather(1, places))))
        return self.sent(local)

    def sent(self, local: int) -> Tensor:
        """Return the decoded latest message of a local worker: float32 ``[numel]``."""
        said = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        for group in self._groups:
            places, sent = self._entries(self._messages[local, group.part], group)
            said[places] = sent
        return said

    def encode_header(self, local: int, header: Tensor) -> None:
        self._headers[local] = header

    def run(self, step: int) -> None:
        channel, size = self.channel, self._outbox.shape[1]
        sizes = [
            size if worker in channel.participants else 0 for worker in range(channel.workers.count)
        ]
        parts = [row[: sizes[i]] for i, row in zip(channel.workers.ids, self._outbox, strict=True)]
        everyones = channel.gather_ragged(parts, sizes)
        rows = torch.stack([row for row in everyones if row.numel()])
        self.senders = len(rows)
        self.answer, self.headers = rows.split([size - self.header_bytes, self.header_bytes], dim=1)
        with channel.timer.vote:
            self._total.zero_()
            for message in self.answer:
                for group in self._groups:
                    places, sent = self._entries(message[group.part], group)
                    self._total[places] += sent  # no entry occurs twice in one message
            self._total /= self.senders

    def decode(self) -> Tensor:
        return self._total

    def _entries(self, message: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Return where in the vector the entries of a message belong, and their values."""
        indices, values = group.wire.decode(message, len(group.starts))
        return (group.starts + indices).flatten(), values.flatten()


class Tiles(NamedTuple):
    """Tiles of one size, next to each other in a matrix, ``rows * columns`` of them.

    Attributes:
        matrix: in a vector.
        top, left: the first row and the first column that they cover.
        rows, columns: of tiles.
        height, width: of a tile.
        block: where in a vector their coefficients are.
    """

    matrix: Matrix
    top: int
    left: int
    rows: int
    columns: int
    height: int
    width: int
    block: Block

    def of(self, vector: Tensor) -> Tensor:
        """Return the tiles of a vector, as a view ``[rows, columns, height, width]``."""
        bottom, right = self.top + self.rows * self.height, self.left + self.columns * self.width
        part = self.matrix.view(vector)[self.top : bottom, self.left : right]
        return part.unflatten(1, (-1, self.width)).unflatten(0, (-1, self.height)).transpose(1, 2)


def tiles_of(matrix: Matrix, side: int) -> list[Tiles]:
    """Cut a matrix into tiles of at most ``side`` rows and columns, as equal as can be."""
    start, found = matrix.start, []
    for top, rows, h in blocks_of(0, matrix.rows, side):
        for left, columns, w in blocks_of(0, matrix.columns, side):
            block = Block(start, rows * columns, h * w)
            found.append(Tiles(matrix, top, left, rows, columns, h, w, block))
            start += rows * columns * h * w
    return found


class CosineTopKMean(TopKMean):
    """The mean of matrices of which workers send the largest coefficients of a cosine transform.

    Each tile of at most ``side`` rows and columns is transformed by itself, along both dimensions;
    its coefficients are a chunk. The transform (DCT-II) is orthonormal. It is computed in float64
    and rounded to float32, so that no bit of it, nor a sign, depends on the order of the sums.

    Args:
        matrices: in ``numel``.
        side: of the largest tile.
        k, value_bits: as for :class:`TopKMean`.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        matrices: Iterable[Matrix],
        side: int,
        k: int,
        value_bits: ValueBits,
        **buffers: Unpack[Buffers],
    ) -> None:
        self._tiles = [tiles for matrix in matrices for tiles in tiles_of(matrix, side)]
        blocks = [tiles.block for tiles in self._tiles]
        super().__init__(channel, numel, blocks, k, value_bits, **buffers)
        sizes = {size for tiles in self._tiles for size in (tiles.height, tiles.width)}
        self._bases = {size: cosines(size).to(self.device) for size in sizes}

    def transform(self, values: Tensor) -> Tensor:
        """Return the coefficients of a vector, ``[numel]``, in the order of the chunks."""
        coefficients = torch.zeros_like(values)
        for tiles in self._tiles:
            rows, columns = self._bases[tiles.height], self._bases[tiles.width]
            found = (tiles.of(values).double() @ columns.T).mT @ rows.T  # transposed, either way
            tiles.block.of(coefficients).copy_(without_noise(found).view(-1, tiles.block.size))
        return coefficients

    def decode(self) -> Tensor:
        values = torch.zeros_like(self._total)
        for tiles in self._tiles:
            rows, columns = self._bases[tiles.height], self._bases[tiles.width]
            found = tiles.block.of(self._total).double().view(-1, tiles.width, tiles.height)
            tile = tiles.of(values)
            tile.copy_(without_noise((found @ rows).mT @ columns).view(tile.shape))
        return values


@cache
def cosines(size: int) -> Tensor:
    """Return the orthonormal basis of the DCT-II, float64 ``[size, size]``, a row each."""
    places = torch.arange(size, dtype=torch.float64, device="cpu")
    basis = (math.pi / size * places.unsqueeze(1) * (places + 0.5)).cos() * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def without_noise(tiles: Tensor) -> Tensor:
    """Return float64 tiles, ``[..., h, w]``, with 0 for differences of rounding size."""
    sizes = tiles.abs()
    return tiles.masked_fill(sizes < 1e-9 * sizes.amax((-2, -1), keepdim=True), 0)
