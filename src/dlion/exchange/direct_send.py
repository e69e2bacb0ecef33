"""Direct-send exchanges: worker j owns the j-th slice of the parameters.

(1) Everyone sends the owner of each slice its packed message about it; (2) the owner combines the n
messages; (3) everyone gets the packed answers of all owners. A worker sends
``(n - 1) * (up + down)`` bytes, where up and down are one slice in the two wires: for one-bit
messages 2 (n - 1) / n bits per parameter, 32 times less than a float32 ring all-reduce.

What is combined is combined in the order of the workers, 0 to n - 1, element by element, so the
answer does not depend on how workers are spread over processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dlion import kernels
from dlion.errors import TrainingFailed
from dlion.exchange.channel import Channel, sum_in_order
from dlion.streams import stream
from dlion.wire import Float32, Level, Sign, Sparse, Ternary, Wire

AGREEMENT = 0.75  # of every worker with the outcome, before anything is known
TIES = ("zero", "plus", "alternate", "random", "previous")


class Exchange(ABC):
    """Messages of the local workers in, one combined answer out.

    Attributes:
        up, down: the wires towards the owner of a slice and back.
        numel: parameters per slice times n, at least the number asked for: what messages must hold.
        slice: parameters owned by one worker.
        headers: ``[m, header_bytes]`` uint8, the headers that came with the latest messages, of
            the m workers that spoke (``channel.attend``).
        state: tensors that a checkpoint must keep (empty for most exchanges).
    """

    def __init__(self, channel: Channel, numel: int, header_bytes: int = 0) -> None:
        n = channel.workers.count
        self.channel, self.header_bytes = channel, header_bytes
        self.up, self.down = self.wires(n)
        self.slice = -(-numel // (n * self.up.group)) * self.up.group
        self.numel = n * self.slice
        self.headers: Tensor
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def wires(self, n: int) -> tuple[Wire, Wire]:
        """Towards the owner of a slice and back, for n workers."""

    @abstractmethod
    def post(self, i: int, values: Tensor) -> None:
        """Put the message of local worker i, ``[numel]`` values of the up wire, in the outbox."""

    @abstractmethod
    def post_header(self, i: int, header: Tensor) -> None:
        """What goes with each of its parts: uint8 ``[header_bytes]``."""

    @abstractmethod
    def deliver(self, step: int) -> list[Tensor]:
        """Exchange what was posted. Returns the packed answers of the n owners.

        They are valid until the next delivery.
        """

    @abstractmethod
    def read(self, answers: list[Tensor]) -> Tensor:
        """Unpack answers: float32 ``[numel]``."""

    def __call__(self, step: int) -> Tensor:
        """Exchange what was posted and unpack the answer, float32 ``[numel]``."""
        return self.read(self.deliver(step))


class DirectSend(Exchange):
    """The exchange of fixed-size messages; subclasses say how an owner combines them.

    Buffers are made once, on ``device``; those of the answers anew where their wire changes.

    Attributes:
        voices: how many workers spoke last, at first n.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        header_bytes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(channel, numel, header_bytes)
        w = channel.workers
        self.voices = w.count
        k, n, row = w.local, w.count, self.up.nbytes(self.slice) + header_bytes

        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=device)

        self._outbox = make(k, n, row)
        self._inbox = make(n, k, row) if w.processes > 1 else None
        self._answers = make(k, self.down.nbytes(self.slice))
        self._everyones = make(n, self.down.nbytes(self.slice)) if w.processes > 1 else None

    def outbox(self, i: int) -> Tensor:
        """The message of local worker i before it leaves: uint8 ``[n, up bytes + header]``."""
        return self._outbox[i]

    def post(self, i: int, values: Tensor) -> None:
        n, size = self.channel.workers.count, self.up.nbytes(self.slice)
        self._outbox[i, :, :size] = self.up.encode(values.view(n, self.slice))

    def post_header(self, i: int, header: Tensor) -> None:
        self._outbox[i, :, self.up.nbytes(self.slice) :] = header

    def deliver(self, step: int) -> list[Tensor]:
        channel, outbox = self.channel, self._outbox
        self.hear(len(channel.participants))
        if len(channel.local_participants) < len(outbox):
            outbox = outbox[channel.local_participants]
        received = channel.scatter(outbox, self._inbox)
        self.headers = received[:, 0, self.up.nbytes(self.slice) :]
        with channel.timer("vote", beside=True):
            for j, answer in enumerate(self._answers):
                self.combine(received, j, step, answer)
        return [channel.gather(self._answers, self._everyones)]

    def hear(self, voices: int) -> None:
        """Prepare for messages of so many workers: the answer's wire may depend on it."""
        if voices == self.voices:
            return
        w, self.voices = self.channel.workers, voices
        self.up, self.down = self.wires(voices)
        size = self.down.nbytes(self.slice)
        if self._answers.shape[1] != size:
            self._answers = self._answers.new_zeros(w.local, size)
            self._everyones = self._answers.new_zeros(w.count, size) if w.processes > 1 else None

    @abstractmethod
    def combine(self, received: Tensor, j: int, step: int, answer: Tensor) -> None:
        """The work of local owner j: ``received[:, j]``, headers last -> packed ``answer``."""


class DenseMean(DirectSend):
    """The mean of float32 messages, added in the order of the workers."""

    def wires(self, n: int) -> tuple[Wire, Wire]:
        return Float32(), Float32()

    def values(self, i: int) -> Tensor:
        """The values in the message of local worker i before it leaves: float32 ``[n, slice]``."""
        return self._outbox[i].view(torch.float32)[:, : self.slice]

    def combine(self, received: Tensor, j: int, step: int, answer: Tensor) -> None:
        rows = received[:, j].view(torch.float32)[:, : self.slice]
        total = sum_in_order(rows, answer.view(torch.float32))
        total /= len(rows)

    def read(self, answers: list[Tensor]) -> Tensor:
        return answers[0].view(torch.float32).flatten()


class LevelSum(DirectSend):
    """The sum of small integers ``0 .. levels - 1``, bit-sliced, or the sign of what it says.

    A value v stands for ``v - (levels - 1) / 2``: with two levels the message is a vote, with an
    odd number the middle level abstains.

    ``answer="level"`` sends the sum back in ``ceil(log2(n (levels - 1) + 1))`` bits; the answer is
    the mean, scaled to [-1, 1]. ``answer="sign"`` sends back its sign; ``ties`` says what a sum of
    exactly zero becomes, which only happens where ``n (levels - 1)`` is even:

    - ``previous``: the owner's last answer (+1 at first); it keeps one bit per owned parameter.
    - ``zero``: no change. An answer then has three values and costs 1.6 bits instead of 1.
    - ``plus``: +1. Biased: coordinates that nobody knows about drift.
    - ``alternate``: +1 on even steps, -1 on odd ones.
    - ``random``: a fair coin from the owner's stream.

    All but ``zero`` cost 1 bit down. ``previous`` learns fastest (results/ties).

    ``weighted`` (two levels, answer ``sign``, not ``zero``) weighs each worker's votes by the log
    odds that it agrees with the outcome: ``log(p / (1 - p))``, at least 0, of its running agreement
    p, over about 100 steps and the parameters (``spans``) in a slice. The owner of a slice keeps it
    for that slice, so nothing more travels. It is the optimal rule for independent voters of known
    competence (Nitzan and Paroush 1982).
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int = 2,
        answer: str = "sign",
        ties: str = "previous",
        seed: int = 0,
        weighted: bool = False,
        spans: Sequence[tuple[int, int]] | None = None,
        header_bytes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.levels, self.answer, self.ties, self.seed = levels, answer, ties, seed
        self.weighted = weighted
        super().__init__(channel, numel, header_bytes, device)
        self.words = self.slice // 64
        self._masks = torch.zeros(2, self.words, dtype=torch.int64, device=device)
        k, n = channel.workers.local, channel.workers.count
        if answer == "sign" and ties == "previous":
            self.state["previous"] = self._masks.new_full((k, self.words), -1)
        if weighted:
            real = torch.zeros(self.numel, device=device)
            for start, stop in spans or [(0, numel)]:
                real[start:stop] = 1  # the gaps between parameters are nobody's opinion
            self._real = real.view(n, self.slice)[list(channel.workers.ids)]
            self.state["agreement"] = torch.full((k, n), AGREEMENT, device=device)

    @property
    def largest(self) -> int:
        """The largest sum."""
        return self.voices * (self.levels - 1)

    @property
    def can_tie(self) -> bool:
        return self.largest % 2 == 0

    def wires(self, n: int) -> tuple[Wire, Wire]:
        up, largest = Sign() if self.levels == 2 else Level(self.levels), n * (self.levels - 1)
        if self.answer == "level":
            return up, Level(largest + 1)
        return up, Ternary() if self.ties == "zero" and largest % 2 == 0 else Sign()

    def combine(self, received: Tensor, j: int, step: int, answer: Tensor) -> None:
        if self.weighted:
            self._weigh(received, j, step, answer)
            return
        rows = received[:, j, : self.up.nbytes(self.slice)].view(torch.int64)
        rows = rows.unflatten(1, (int(self.up.bits), self.words))
        if self.answer == "level":
            out = answer.view(torch.int64).view(-1, self.words)
            kernels.sum_planes(rows, self.levels - 1, out)
            return
        positive, tie = self._masks
        kernels.compare_sum(rows, self.levels - 1, self.largest // 2, positive, tie)
        if isinstance(self.down, Ternary):
            kernels.pack_votes(positive, tie, answer)
            return
        self._decide(positive, tie, j, step, answer)

    def _weigh(self, received: Tensor, j: int, step: int, answer: Tensor) -> None:
        """The vote of :class:`LevelSum`'s ``weighted``: slower, as every bit is unpacked."""
        agreement = self.state["agreement"][j]
        odds = agreement[self.channel.participants].clamp(0.5, 0.999)
        total, size = 0.0, self.up.nbytes(self.slice)
        votes = self.up.decode(received[:, j, :size].contiguous(), self.slice).mul(2.0).sub_(1)
        for vote, weight in zip(votes, (odds / (1 - odds)).log(), strict=True):
            total = total + weight * vote
        positive, tie = (
            self.up.encode(mask.to(torch.uint8)).view(torch.int64)
            for mask in (total > 0, total == 0)
        )
        self._decide(positive, tie, j, step, answer)
        outcome = self.up.decode(answer, self.slice).mul(2.0).sub_(1)
        real = self._real[j]
        if not real.any():
            return
        agreed = (votes == outcome).to(torch.float32) @ real / real.sum()
        agreement[self.channel.participants] = agreement[self.channel.participants].lerp(
            agreed, 0.01
        )

    def _decide(self, positive: Tensor, tie: Tensor, j: int, step: int, answer: Tensor) -> None:
        if self.can_tie or self.weighted:
            self._break_ties(positive, tie, j, step)
        if "previous" in self.state:
            self.state["previous"][j] = positive
        answer.view(torch.int64).copy_(positive)

    def _break_ties(self, positive: Tensor, tie: Tensor, j: int, step: int) -> None:
        """Add to the mask of positive sums the ties that become +1."""
        if self.ties == "random":
            worker = self.channel.workers.ids[j]
            owner = stream(self.seed, "ties", worker, step, device=tie.device)
            tie &= torch.empty_like(tie).random_(-(2**63), None, generator=owner)
        elif self.ties == "previous":
            tie &= self.state["previous"][j]
        elif self.ties == "alternate" and step % 2:
            return
        positive |= tie

    def read(self, answers: list[Tensor]) -> Tensor:
        values = self.down.decode(answers[0], self.slice).to(torch.float32).flatten()
        if self.answer == "level":
            return values.mul_(2 / self.largest).sub_(1)
        return values if isinstance(self.down, Ternary) else values.mul_(2).sub_(1)

    def apply(self, params: Tensor, answers: list[Tensor], lr: float, weight_decay: float) -> None:
        """``x <- (1 - lr wd) x - lr a`` from the packed answers a, unpacking on the fly."""
        packed = answers[0]
        if isinstance(self.down, Ternary):
            kernels.apply_trits(params, packed, self.slice, lr, weight_decay)
        elif self.answer == "level":
            sums = packed.view(torch.int64).unflatten(1, (int(self.down.bits), self.words))
            kernels.apply_levels(params, sums, self.largest, lr, weight_decay)
        else:
            kernels.apply_signs(params, packed.view(torch.int64), lr, weight_decay)


class TernarySum(DirectSend):
    """The mean of ``{-1, 0, 1}``: 1.6 bits up, the sum in ``ceil(log2(2 n + 1))`` bits down."""

    def wires(self, n: int) -> tuple[Wire, Wire]:
        return Ternary(), Level(2 * n + 1)

    def combine(self, received: Tensor, j: int, step: int, answer: Tensor) -> None:
        messages = received[:, j, : self.up.nbytes(self.slice)]
        total = self.up.decode(messages, self.slice).sum(0, dtype=torch.int32)
        answer.copy_(self.down.encode(total.add_(len(messages))))

    def read(self, answers: list[Tensor]) -> Tensor:
        n = self.voices
        sums = self.down.decode(answers[0], self.slice)
        return sums.sub_(n).to(torch.float32).div_(n).flatten()


class SparseMean(Exchange):
    """The mean of sparse messages: entries (index, value), absent ones count as zero.

    Sizes differ, so a header of 4 bytes per slice, the number of entries, travels before each
    message. The owner answers with the union of the entries or with float32 for all, whichever is
    smaller (-1 entries in the header).
    """

    down: Sparse

    def __init__(
        self,
        channel: Channel,
        numel: int,
        header_bytes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(channel, numel, header_bytes)
        self.dense = Float32()
        self.device = device
        self._total = torch.zeros(self.slice, device=device)
        self._values = torch.zeros(channel.workers.count, self.slice, device=device)
        self._posts: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._post_headers: dict[int, Tensor] = {}
        self._counts: list[int] = []

    def wires(self, n: int) -> tuple[Wire, Wire]:
        return Sparse(), Sparse()

    def post(  # type: ignore[override]
        self, i: int, indices: Tensor, values: Tensor
    ) -> None:
        """Put the entries ``[m]`` of local worker i in the outbox; indices ascend."""
        n = self.channel.workers.count
        edges = torch.arange(n + 1, device=indices.device) * self.slice
        counts = torch.searchsorted(indices, edges).diff()
        packed = self.up.encode(indices % self.slice, values)
        self._posts[i] = (list(packed.split((8 * counts).tolist())), counts)

    def post_header(self, i: int, header: Tensor) -> None:
        self._post_headers[i] = header

    def deliver(self, step: int) -> list[Tensor]:
        w = self.channel.workers
        received = self._scatter([self._posts.pop(i) for i in self.channel.local_participants])
        with self.channel.timer("vote", beside=True):
            pairs = [self._combine([row[j] for row in received]) for j in range(w.local)]
        answers, counts = [answer for answer, _ in pairs], [count for _, count in pairs]
        header = torch.tensor(counts, dtype=torch.int32, device=self.device).view(torch.uint8)
        told = self.channel.gather(header.view(w.local, 4)).view(torch.int32).flatten().tolist()
        dense = self.dense.nbytes(self.slice)
        sizes = [dense if count < 0 else self.down.nbytes(count) for count in told]
        self._counts = told
        return self.channel.gather_ragged(answers, sizes)

    def _scatter(self, posts: list[tuple[list[Tensor], Tensor]]) -> list[list[Tensor]]:
        """Send the counts with the headers, then the entries they announce."""
        n = self.channel.workers.count
        announce = torch.zeros(
            len(posts), n, 4 + self.header_bytes, dtype=torch.uint8, device=self.device
        )
        for row, i, (_, counts) in zip(
            announce, self.channel.local_participants, posts, strict=True
        ):
            row[:, :4] = counts.to(torch.int32).view(-1, 1).view(torch.uint8)
            if self.header_bytes:
                row[:, 4:] = self._post_headers[i]
        told = self.channel.scatter(announce)
        self.headers = told[:, 0, 4:]
        counts = told[..., :4].contiguous().view(torch.int32).squeeze(-1).to(torch.int64)
        if counts.numel() and not 0 <= counts.min() <= counts.max() <= self.slice:
            raise TrainingFailed("a worker announced more entries than there are parameters")
        sizes = 8 * counts
        return self.channel.scatter_ragged([parts for parts, _ in posts], sizes)

    def _combine(self, messages: list[Tensor]) -> tuple[Tensor, int]:
        """The packed answer about one slice, and its number of entries (-1: all of them)."""
        total = self._total.zero_()
        for message in messages:
            indices, values = self._entries(self.up, message, message.numel() // 8)
            total[indices] += values  # no index occurs twice in one message
        total /= len(messages)
        indices = total.nonzero().squeeze(-1)
        if self.down.nbytes(indices.numel()) < self.dense.nbytes(self.slice):
            return self.down.encode(indices, total[indices]), indices.numel()
        return self.dense.encode(total).clone(), -1

    def read(self, answers: list[Tensor]) -> Tensor:
        result = self._values.zero_()
        for row, answer, count in zip(result, answers, self._counts, strict=True):
            if count < 0:
                row.copy_(self.dense.decode(answer, self.slice))
            else:
                indices, values = self._entries(self.down, answer, count)
                row[indices] = values
        return result.flatten()

    def _entries(self, wire: Sparse, packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        indices, values = wire.decode(packed, count)
        if count and not 0 <= indices.min() <= indices.max() < self.slice:
            raise TrainingFailed("a worker sent entries of parameters that there are not")
        return indices, values
