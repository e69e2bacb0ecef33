"""Sums of small integers: majority votes, p-bit votes and means of votes.

Messages hold levels ``0 .. levels - 1``; a level v stands for ``v - (levels - 1) / 2``. With two
levels a message is a vote of one bit, with an odd number the middle level abstains. Sums are added
as bit planes, whole words at a time, and never unpacked on the way.
"""

from collections.abc import Callable
from typing import Literal, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.streams import stream
from dlion.transfer import index_of
from dlion.wire import Level, Sign, Ternary, Wire

Ties = Literal["zero", "plus", "alternate", "random", "previous"]
AGREEMENT = 0.75  # of every worker with the outcome, before anything is known


class LevelSum(DirectSend):
    """What owners make of the sum of levels.

    Attributes:
        levels: of a message.
        highest: the largest value in the rows that owners add; on a grid these are sums.
    """

    supports_leader = True

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int,
        down: Callable[[int], Wire],
        **buffers: Unpack[Buffers],
    ) -> None:
        self.levels, self.highest = levels, levels - 1
        up = Sign() if levels == 2 else Level(levels)
        super().__init__(channel, numel, up, down, **buffers)

    def planes(self, messages: Tensor) -> Tensor:
        """Return messages about a slice as planes, int64 ``[m, planes, words]``."""
        return messages.view(torch.int64).unflatten(-1, (-1, self.words))


class LevelMean(LevelSum):
    """The mean of the senders' levels, scaled to [-1, 1].

    The sum travels back in ``ceil(log2(n (levels - 1) + 1))`` bits a parameter.
    """

    down: Level

    def __init__(
        self, channel: Channel, numel: int, levels: int = 2, **buffers: Unpack[Buffers]
    ) -> None:
        def down(n: int) -> Wire:
            return Level(n * (levels - 1) + 1)

        super().__init__(channel, numel, levels, down, **buffers)

    @property
    def largest(self) -> int:
        """The largest sum of the senders' levels."""
        return self.down.levels - 1

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        rows, sums = self.planes(messages), self.down.view(answer)
        planes = (len(rows) * self.highest).bit_length()
        if planes == len(sums):
            kernels.sum_planes(rows, self.highest, sums)
        else:  # of fewer workers than it has room for
            total = sums.new_empty(planes, self.words)
            kernels.sum_planes(rows, self.highest, total)
            sums.copy_(total[: len(sums)])

    def decode(self) -> Tensor:
        sums = self.down.decode(self.answer, self.slice).to(torch.float32).flatten()
        return sums.mul_(2 / self.largest).sub_(1)


class Vote(LevelSum):
    """The sign of the balance, the sum of the values of the senders' levels.

    ``ties`` says what a balance of exactly zero becomes, which only happens where
    ``n (levels - 1)`` is even:

    - ``previous``: the owner's last answer (+1 at first); it keeps one bit per owned parameter.
    - ``zero``: no change. An answer then has three values and costs 1.6 bits instead of 1.
    - ``plus``: +1. Biased: coordinates that nobody knows about drift.
    - ``alternate``: +1 on even steps, -1 on odd ones.
    - ``random``: a fair coin from the owner's stream.

    All but ``zero`` cost 1 bit down. ``previous`` learns fastest (results/ties).
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int = 2,
        ties: str = "previous",
        seed: int = 0,
        **buffers: Unpack[Buffers],
    ) -> None:
        def down(n: int) -> Wire:
            return Ternary() if ties == "zero" and n * (levels - 1) % 2 == 0 else Sign()

        self.seed = seed
        super().__init__(channel, numel, levels, down, **buffers)
        self._ties = TieBreak(self, ties, seed)
        self._masks = torch.zeros(2, self.words, dtype=torch.int64, device=self.device)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        rows, largest = self.planes(messages), self.highest
        total = self.senders * (self.levels - 1)  # half of it is a balance of zero
        positive, tied = self._masks
        if isinstance(self.down, Ternary):
            kernels.compare_sum(rows, largest, total // 2, positive, tied)
            kernels.pack_votes(positive, tied, answer)
            return
        positive = answer.view(torch.int64)
        kernels.compare_sum(rows, largest, total // 2, positive, tied)
        if total % 2 == 0:
            positive |= self._ties.positive(tied, owner, step)
        self._ties.remember(positive, owner)

    def decode(self) -> Tensor:
        if isinstance(self.down, Ternary):
            return self.down.decode(self.answer, self.slice).to(torch.float32).flatten()
        return signs_of(self)

    def on_received(self) -> None:
        for owner, words in enumerate(self.answer[self.channel.owned]):
            self._ties.remember(words, owner)


class WeightedVote(DirectSend):
    """A vote of one bit that weighs each worker by how often it was with the majority.

    The weight is the log odds ``log(p / (1 - p))``, at least 0, of the worker's agreement p with
    the outcome, averaged over about 100 steps and the parameters of a slice. The owner of a slice
    keeps it for that slice, so nothing more travels. It is the optimal rule for independent voters
    of known competence (Nitzan and Paroush 1982). Slower than :class:`Vote`, as every bit is
    unpacked; ``ties`` may not be zero.

    Args:
        mask: bool ``[numel]``, False for padding, which is nobody's opinion; None: no padding.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        ties: str = "previous",
        seed: int = 0,
        mask: Tensor | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        self.seed = seed
        super().__init__(channel, numel, Sign(), lambda _: Sign(), **buffers)
        self._ties = TieBreak(self, ties, seed)
        self._competence = Competence(self, owned_parameters(self, numel, mask))

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        weights = self._competence.of_senders(self._competence.weights(owner))
        votes = self.up.decode(messages.contiguous(), self.slice).mul(2.0).sub_(1)
        total = torch.zeros_like(votes[0])
        for vote, weight in zip(votes, weights, strict=True):
            total += weight * vote
        positive, tied = (
            self.up.encode(mask.to(torch.uint8)).view(torch.int64)
            for mask in (total > 0, total == 0)
        )
        self._ties.write(answer, positive, tied, owner, step)
        agreed = votes == self.up.decode(answer, self.slice).mul(2.0).sub_(1)
        self._competence.learn(owner, agreed)

    def decode(self) -> Tensor:
        return signs_of(self)


class TieBreak:
    """The sign of a balance of exactly zero, see :class:`Vote`.

    For ``previous`` it adds that to the state of the exchange, int64 ``[k, words]``.
    """

    def __init__(self, exchange: DirectSend, rule: str, seed: int = 0) -> None:
        self.rule, self.seed, self._workers = rule, seed, exchange.channel.workers
        self._previous: Tensor | None = None
        if rule == "previous":
            shape = self._workers.local, exchange.words
            self._previous = torch.full(shape, -1, dtype=torch.int64, device=exchange.device)
            exchange.state["previous"] = self._previous
            exchange.bits = ("previous",)

    def positive(self, tied: Tensor, owner: int, step: int) -> Tensor:
        """Return the mask of those ties that become +1, int64 ``[words]`` as ``tied``."""
        if self._previous is not None:
            return tied & self._previous[owner]
        if self.rule == "random":
            coins = stream(self.seed, "ties", self._workers.ids[owner], step, device=tied.device)
            return tied & torch.empty_like(tied).random_(-(2**63), None, generator=coins)
        if self.rule == "alternate" and step % 2:
            return torch.zeros_like(tied)
        return tied

    def write(self, answer: Tensor, positive: Tensor, tied: Tensor, owner: int, step: int) -> None:
        """Write an answer of one bit, uint8, of masks of +1 and of ties, int64 ``[words]``."""
        words = answer.view(torch.int64)
        words.copy_(positive | self.positive(tied, owner, step))
        self.remember(words, owner)

    def remember(self, answer: Tensor, owner: int) -> None:
        """Keep a packed answer as the previous one, if that is the rule."""
        if self._previous is not None:
            self._previous[owner] = answer.view(torch.int64)


class Competence:
    """Counts of each worker's agreement with the outcome; every owner of a slice has its own.

    It is state of the exchange, float32 ``[k, n]``.

    Args:
        counted: 1 or 0 for each owned parameter, float32 ``[k, slice]``: which ones count.
    """

    def __init__(self, exchange: DirectSend, counted: Tensor) -> None:
        self._channel, self._counted = exchange.channel, counted
        shape = exchange.channel.workers.local, exchange.channel.workers.count
        self._shares = torch.full(shape, AGREEMENT, dtype=torch.float32, device=exchange.device)
        exchange.state["agreement"] = self._shares

    def weights(self, owner: int) -> Tensor:
        """Return the weight of each worker's vote, its log odds, at least 0: ``[n]``."""
        p = self._shares[owner].clamp(0.5, 0.999)
        return (p / (1 - p)).log()

    def learn(self, owner: int, agreed: Tensor) -> None:
        """Average the senders' shares of agreement over about 100 steps.

        Args:
            agreed: which parameters each sender agreed on with the answer, bool ``[m, slice]``.
        """
        shares, counted = self._shares[owner], self._counted[owner]
        before = self.of_senders(shares)
        share = agreed.to(torch.float32) @ counted / counted.sum()
        after = before.lerp(share, 0.01).where(counted.any(), before)
        senders = index_of(tuple(self._channel.participants), shares.device)
        shares.index_copy_(0, senders, after)

    def of_senders(self, values: Tensor) -> Tensor:
        """Return the senders' rows, ``[m, ...]``, of values of all workers, ``[n, ...]``."""
        senders = self._channel.participants
        if len(senders) == len(values):
            return values
        return values.index_select(0, index_of(tuple(senders), values.device))


def owned_parameters(exchange: DirectSend, numel: int, mask: Tensor | None) -> Tensor:
    """Return 1 for parameters and 0 for padding in the slices owned here, ``[k, slice]``.

    ``mask``: False for padding, bool ``[numel]``; None: there is none before ``numel``.
    """
    owned = torch.zeros(exchange.numel, dtype=torch.float32, device=exchange.device)
    owned[:numel] = 1 if mask is None else mask[:numel].to(torch.float32)
    return owned.view(-1, exchange.slice)[exchange.channel.owned]


def signs_of(exchange: DirectSend) -> Tensor:
    """Return answers of one bit as +1 and -1, float32 ``[numel]``."""
    bits = exchange.down.decode(exchange.answer, exchange.slice)
    return bits.flatten().to(torch.float32).mul_(2).sub_(1)
