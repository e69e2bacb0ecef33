"""The mean of matrices, of which a low-rank approximation travels."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DenseMean, Exchange
from dlion.transfer import keep_for_this_stream

SMALLEST_NORM = 1e-8  # added to those of columns


class Matrix(NamedTuple):
    """A matrix of so many rows, elements ``start`` to ``stop`` of a flat buffer, row by row."""

    start: int
    stop: int
    rows: int

    @property
    def columns(self) -> int:
        return (self.stop - self.start) // self.rows

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, -1)


def is_smaller(rank: int, rows: int, columns: int) -> bool:
    """Whether P and Q of a matrix have fewer values than the matrix."""
    return rank * (rows + columns) < rows * columns


class LowRankMean(Exchange):
    """The mean of matrices by a step of power iteration; other tensors are averaged in full.

    Worker i sends ``P_i = M_i Q`` with Q ``[columns, rank]`` of the run before, at first normal
    random numbers. All make an orthonormal basis P^ of the mean of P_i, send ``Q_i = M_i^T P^``,
    and the answer is ``P^ Q^T`` with the mean Q of Q_i. So there are two means of float32, and the
    message of the second round depends on the answer of the first. A matrix whose P and Q are not
    smaller than itself is averaged as it is, in the first round.

    Every process computes P^ by itself, so all need the same kind of machine and number of threads.
    A matrix is read row by row as it lies in memory.

    Args:
        tensors: in ``numel``, a vector is one row; what lies between them is 0.
        ranks: columns of P and Q, for each of ``tensors``.
        draws: normal random numbers, the first Q of all ``tensors`` that are compressed.
        unit: compress all, and answer ``P^ Q^T`` whose Q has columns of norm 1.

    Attributes:
        matrices: those that are compressed.
        values: float32 values that a worker sends in a step, padding left out; it receives as many.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        tensors: list[Matrix],
        ranks: Sequence[int],
        draws: Tensor,
        unit: bool = False,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, **buffers)
        rank_of = {
            t: rank
            for t, rank in zip(tensors, ranks, strict=True)
            if unit or is_smaller(rank, t.rows, t.columns)
        }
        self.matrices, self._ranks = [*rank_of], [*rank_of.values()]
        self._unit = unit
        self._vectors = [tensor for tensor in tensors if tensor not in rank_of]
        self._first_sizes = [rank * matrix.rows for matrix, rank in rank_of.items()]
        self._first_sizes += [vector.stop - vector.start for vector in self._vectors]
        self._query_sizes = [rank * matrix.columns for matrix, rank in rank_of.items()]
        queries = sum(self._query_sizes)
        self.values = sum(self._first_sizes) + queries
        # a process of FSDP2 may have no whole tensor: its messages have headers all the same
        self._first = DenseMean(channel, max(1, sum(self._first_sizes)), **buffers)
        self._second = DenseMean(channel, queries, device=self.device)
        self._values: dict[int, Tensor] = {}  # of local workers, between the rounds
        self._bases: list[Tensor] = []
        self._query = draws.to(self.device).repeat(channel.workers.local, 1)
        if queries:
            self.state["query"] = self._query

    def encode_header(self, local: int, header: Tensor) -> None:
        self._first.encode_header(local, header)

    def encode(self, local: int, values: Tensor) -> None:
        """Write the first message of a local worker about ``[numel]`` values.

        They must stay as they are until ``run`` has written the second.
        """
        self._values[local] = values
        pairs = zip(self.matrices, self._split(self._query[0]), strict=True)
        vectors = [values[vector.start : vector.stop] for vector in self._vectors]
        _encode(self._first, local, [*(m.view(values) @ query for m, query in pairs), *vectors])

    def sent(self, local: int) -> Tensor:
        """Return the decoded latest messages of a local worker: float32 ``[numel]``.

        That is ``P^ Q_i^T`` of each matrix, and all of what is no matrix.
        """
        second = self._second.messages[local] if self.matrices else self._query[local]
        return self._expand(second, self._first.messages[local])

    def run(self, step: int) -> None:
        self._first.run(step)
        self.headers = self._first.headers
        products, _ = self._parts(self._first.decode())
        # orthonormal for any P; of zeros, too, which have left a zero Q and must not stay there
        pairs = zip(products, self._ranks, strict=True)
        self._bases = [torch.linalg.qr(p.view(-1, rank)).Q for p, rank in pairs]
        for local in self.channel.local_participants:
            self._write_second(local)
        if self.matrices:
            self._second.run(step)
            self._query.copy_(self._second.decode()[: self._query.shape[1]])
        if self._unit:
            self._product = self._query[0].clone()
            for query in self._split(self._query[0]):
                query /= query.norm(dim=0) + SMALLEST_NORM
            self._query[1:] = self._query[0]
        made = [self._product] if self._unit else []
        self.answer = [self._first.answer, *self._bases, *made]  # all that is made here and read

    def decode(self) -> Tensor:
        return self._expand(self._query[0], self._first.decode())

    def product(self) -> Tensor:
        """Return ``P^ Q^T`` as it was before Q's columns got a norm of 1: float32 ``[numel]``."""
        return self._expand(self._product, self._first.decode())

    def _write_second(self, local: int) -> None:
        """Write the second message of a local worker: ``M_i^T P^``."""
        values = self._values.pop(local)
        keep_for_this_stream(values)
        pairs = zip(self.matrices, self._bases, strict=True)
        if self.matrices:
            _encode(self._second, local, [m.view(values).T @ basis for m, basis in pairs])

    def _expand(self, second: Tensor, first: Tensor) -> Tensor:
        """Return the decoded messages or answers of both rounds: float32 ``[numel]``."""
        flat = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        for matrix, basis, query in zip(
            self.matrices, self._bases, self._split(second), strict=True
        ):
            torch.mm(basis, query.T, out=matrix.view(flat))
        for vector, part in zip(self._vectors, self._parts(first)[1], strict=True):
            flat[vector.start : vector.stop] = part
        return flat

    def _parts(self, first: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Cut a message or the answer of the first round: P of each matrix, and the vectors."""
        parts = first.flatten()[: sum(self._first_sizes)].split(self._first_sizes)
        return parts[: len(self.matrices)], parts[len(self.matrices) :]

    def _split(self, second: Tensor) -> list[Tensor]:
        """Cut a message or the answer of the second round: Q of each matrix."""
        parts = second.flatten()[: sum(self._query_sizes)].split(self._query_sizes)
        pairs = zip(parts, self._ranks, strict=True)
        return [part.view(-1, rank) for part, rank in pairs]


def _encode(exchange: DenseMean, local: int, parts: list[Tensor]) -> None:
    none = torch.zeros(0, dtype=torch.float32, device=exchange.device)
    message = torch.cat([none, *(part.flatten() for part in parts)])
    padding = (0, exchange.numel - len(message))
    exchange.encode(local, torch.nn.functional.pad(message, padding))
