"""Direct-send exchanges: worker j owns the j-th slice of the parameters.

(1) Everyone sends the owner of each slice its packed message about it; (2) the owner combines the n
messages; (3) everyone gets the packed answers of all owners. A worker sends
``(n - 1) * (up + down)`` bytes, where up and down are one slice in the two wires: for one-bit
messages 2 (n - 1) / n bits per parameter, 32 times less than a float32 ring all-reduce.

What is combined is combined in the order of the workers, 0 to n - 1, element by element, so the
answer does not depend on how workers are spread over processes.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dlion.exchange.channel import Channel
from dlion.streams import stream
from dlion.wire import Float32, Level, Sign, Sparse, Ternary, Wire, reference

TIES = ("zero", "plus", "alternate", "random", "previous")


class Exchange(ABC):
    """Messages of the local workers in, one combined answer out.

    Attributes:
        up, down: the wires towards the owner of a slice and back.
        numel: parameters per slice times n, at least the number asked for: what messages must hold.
        slice: parameters owned by one worker.
        headers: ``[n, header_bytes]`` uint8, the headers that came with the latest messages.
        state: tensors that a checkpoint must keep (empty for most exchanges).
    """

    def __init__(
        self, channel: Channel, numel: int, up: Wire, down: Wire, header_bytes: int = 0
    ) -> None:
        n = channel.workers.count
        self.channel, self.up, self.down = channel, up, down
        self.header_bytes = header_bytes
        self.slice = -(-numel // (n * up.group)) * up.group
        self.numel = n * self.slice
        self.headers: Tensor
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def post(self, i: int, values: Tensor, header: Tensor | None = None) -> None:
        """Put the message of local worker i, ``[numel]`` values of the up wire, in the outbox."""

    @abstractmethod
    def __call__(self, step: int) -> Tensor:
        """Exchange what was posted. Returns the combined answer, float32 ``[numel]``."""


class DirectSend(Exchange):
    """The exchange of fixed-size messages; subclasses say how an owner combines them."""

    def __init__(
        self, channel: Channel, numel: int, up: Wire, down: Wire, header_bytes: int = 0
    ) -> None:
        super().__init__(channel, numel, up, down, header_bytes)
        self._outbox: Tensor | None = None

    def post(self, i: int, values: Tensor, header: Tensor | None = None) -> None:
        k, n = self.channel.workers.local, self.channel.workers.count
        size = self.up.nbytes(self.slice)
        if self._outbox is None:
            shape = (k, n, size + self.header_bytes)
            self._outbox = torch.zeros(shape, dtype=torch.uint8, device=values.device)
        self._outbox[i, :, :size] = self.up.encode(values.view(n, self.slice))
        if header is not None:
            self._outbox[i, :, size:] = header

    def __call__(self, step: int) -> Tensor:
        assert self._outbox is not None, "post() comes first"
        size = self.up.nbytes(self.slice)
        received = self.channel.scatter(self._outbox)
        self.headers = received[:, 0, size:]
        answers = self.channel.gather(self.combine(received[..., :size], step))
        return self.read(answers).flatten()

    @abstractmethod
    def combine(self, messages: Tensor, step: int) -> Tensor:
        """The owner's work: ``[n, k, up bytes]`` -> packed answers ``[k, down bytes]``."""

    @abstractmethod
    def read(self, answers: Tensor) -> Tensor:
        """Packed answers ``[n, down bytes]`` -> float32 ``[n, slice]``."""


class DenseMean(DirectSend):
    """The mean of float32 messages, added in the order of the workers."""

    def __init__(self, channel: Channel, numel: int, header_bytes: int = 0) -> None:
        super().__init__(channel, numel, Float32(), Float32(), header_bytes)

    def combine(self, messages: Tensor, step: int) -> Tensor:
        total = self.up.decode(messages[0], self.slice).clone()
        for message in messages[1:]:
            total += self.up.decode(message, self.slice)
        return self.down.encode(total.div_(messages.shape[0]))

    def read(self, answers: Tensor) -> Tensor:
        return self.down.decode(answers, self.slice)


class LevelSum(DirectSend):
    """The sum of small integers ``0 .. levels - 1``, bit-sliced, or the sign of what it says.

    A value v stands for ``v - (levels - 1) / 2``: with two levels the message is a vote, with an
    odd number the middle level abstains.

    ``answer="level"`` sends the sum back in ``ceil(log2(n (levels - 1) + 1))`` bits; the answer is
    the mean, scaled to [-1, 1]. ``answer="sign"`` sends back its sign; ``ties`` says what a sum of
    exactly zero becomes, which only happens where ``n (levels - 1)`` is even:

    - ``zero``: no change. An answer then has three values and costs 1.6 bits instead of 1.
    - ``plus``: +1. Biased: coordinates that nobody knows about drift.
    - ``alternate``: +1 on even steps, -1 on odd ones.
    - ``random``: a fair coin from the owner's stream.
    - ``previous``: the owner's last answer (+1 at first); it keeps one bit per owned parameter.

    All but ``zero`` cost 1 bit down.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int = 2,
        answer: str = "sign",
        ties: str = "alternate",
        seed: int = 0,
        header_bytes: int = 0,
    ) -> None:
        n = channel.workers.count
        self.levels, self.answer, self.ties, self.seed = levels, answer, ties, seed
        self.largest = n * (levels - 1)
        self.can_tie = self.largest % 2 == 0
        up = Sign() if levels == 2 else Level(levels)
        down: Wire = Level(self.largest + 1)
        if answer == "sign":
            down = Ternary() if ties == "zero" and self.can_tie else Sign()
        super().__init__(channel, numel, up, down, header_bytes)

    def combine(self, messages: Tensor, step: int) -> Tensor:
        rows = messages.unflatten(-1, (int(self.up.bits), -1)).view(torch.int64)
        total = reference.sum_planes(rows, self.levels - 1)
        if self.answer == "level":
            return total.view(torch.uint8).flatten(-2)
        positive, tie = reference.compare_planes(total, self.largest // 2)
        if not self.can_tie:
            return positive.view(torch.uint8)
        if self.ties == "zero":
            negative = (~(positive | tie)).view(torch.uint8)
            votes = reference.unpack_bits(positive.view(torch.uint8), self.slice).to(torch.int8)
            return self.down.encode(
                votes - reference.unpack_bits(negative, self.slice).to(torch.int8)
            )
        return self._break_ties(positive, tie, step).view(torch.uint8)

    def _break_ties(self, positive: Tensor, tie: Tensor, step: int) -> Tensor:
        if self.ties == "plus":
            return positive | tie
        if self.ties == "alternate":
            return positive | tie if step % 2 == 0 else positive
        if self.ties == "random":
            coins = torch.empty_like(tie)
            for row, worker in zip(coins, self.channel.workers.ids, strict=True):
                owner = stream(self.seed, "ties", worker, step, device=row.device)
                row.random_(-(2**63), None, generator=owner)
            return positive | tie & coins
        last = self.state.get("previous", torch.full_like(tie, -1))
        self.state["previous"] = positive | tie & last
        return self.state["previous"]

    def read(self, answers: Tensor) -> Tensor:
        values = self.down.decode(answers, self.slice).to(torch.float32)
        if self.answer == "level":
            return values.mul_(2 / self.largest).sub_(1)
        return values if isinstance(self.down, Ternary) else values.mul_(2).sub_(1)


class TernarySum(DirectSend):
    """The mean of ``{-1, 0, 1}``: 1.6 bits up, the sum in ``ceil(log2(2 n + 1))`` bits down."""

    def __init__(self, channel: Channel, numel: int, header_bytes: int = 0) -> None:
        down = Level(2 * channel.workers.count + 1)
        super().__init__(channel, numel, Ternary(), down, header_bytes)

    def combine(self, messages: Tensor, step: int) -> Tensor:
        n = messages.shape[0]
        total = self.up.decode(messages, self.slice).sum(0, dtype=torch.int32)
        return self.down.encode(total.add_(n))

    def read(self, answers: Tensor) -> Tensor:
        n = answers.shape[0]
        return self.down.decode(answers, self.slice).sub_(n).to(torch.float32).div_(n)


class SparseMean(Exchange):
    """The mean of sparse messages: entries (index, value), absent ones count as zero.

    Sizes differ, so a header of 4 bytes per slice, the number of entries, travels before each
    message. The owner answers with the union of the entries or with float32 for all, whichever is
    smaller (-1 entries in the header).
    """

    down: Sparse

    def __init__(self, channel: Channel, numel: int, header_bytes: int = 0) -> None:
        super().__init__(channel, numel, Sparse(), Sparse(), header_bytes)
        self.dense = Float32()
        self._posts: dict[int, tuple[list[Tensor], Tensor, Tensor | None]] = {}

    def post(  # type: ignore[override]
        self, i: int, indices: Tensor, values: Tensor, header: Tensor | None = None
    ) -> None:
        """Put the entries ``[m]`` of local worker i in the outbox; indices ascend."""
        n = self.channel.workers.count
        edges = torch.arange(n + 1, device=indices.device) * self.slice
        counts = torch.searchsorted(indices, edges).diff()
        packed = self.up.encode(indices % self.slice, values)
        self._posts[i] = (list(packed.split((8 * counts).tolist())), counts, header)

    def __call__(self, step: int) -> Tensor:
        w = self.channel.workers
        posts = [self._posts.pop(i) for i in range(w.local)]
        received = self._scatter(posts)
        device = posts[0][1].device
        answers, counts = [], []
        for j in range(w.local):
            total = torch.zeros(self.slice, device=device)
            for i in range(w.count):
                indices, values = self.up.decode(received[i][j], received[i][j].numel() // 8)
                total[indices] += values  # no index occurs twice in one message
            answer, count = self._answer(total.div_(w.count))
            answers.append(answer)
            counts.append(count)
        header = torch.tensor(counts, dtype=torch.int32, device=device).view(torch.uint8)
        told = self.channel.gather(header.view(w.local, 4)).view(torch.int32).flatten().tolist()
        dense = self.dense.nbytes(self.slice)
        sizes = [dense if count < 0 else self.down.nbytes(count) for count in told]
        return self._read(self.channel.gather_ragged(answers, sizes), told)

    def _scatter(
        self, posts: list[tuple[list[Tensor], Tensor, Tensor | None]]
    ) -> list[list[Tensor]]:
        """Send the counts with the headers, then the entries they announce."""
        counts = torch.stack([count for _, count, _ in posts]).to(torch.int32)
        announce = counts.unsqueeze(-1).view(torch.uint8)
        if self.header_bytes:
            headers = torch.stack([header for _, _, header in posts])
            announce = torch.cat(
                [announce, headers.unsqueeze(1).expand(-1, counts.shape[1], -1)], dim=-1
            )
        told = self.channel.scatter(announce.contiguous())
        self.headers = told[:, 0, 4:]
        sizes = 8 * told[..., :4].contiguous().view(torch.int32).squeeze(-1)
        return self.channel.scatter_ragged([parts for parts, _, _ in posts], sizes)

    def _answer(self, total: Tensor) -> tuple[Tensor, int]:
        """The packed answer about one slice, and its number of entries (-1: all of them)."""
        indices = total.nonzero().squeeze(-1)
        if self.down.nbytes(indices.numel()) < self.dense.nbytes(self.slice):
            return self.down.encode(indices, total[indices]), indices.numel()
        return self.dense.encode(total), -1

    def _read(self, answers: list[Tensor], counts: list[int]) -> Tensor:
        result = torch.zeros(len(answers), self.slice, device=answers[0].device)
        for row, answer, count in zip(result, answers, counts, strict=True):
            if count < 0:
                row.copy_(self.dense.decode(answer, self.slice))
            else:
                indices, values = self.down.decode(answer, count)
                row[indices] = values
        return result.flatten()
