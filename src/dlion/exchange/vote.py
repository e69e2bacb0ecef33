"""Sums of small integers: majority votes, p-bit votes and means of votes.

Messages hold levels ``0 .. levels - 1``; a level v stands for ``v - (levels - 1) / 2``. With two
levels a message is a vote of one bit, with an odd number the middle level abstains. Sums are added
as bit planes, whole words at a time, and never unpacked on the way.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange.channel import Channel
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.exchange.grid import Grid
from dlion.streams import stream
from dlion.transfer import index_of
from dlion.wire import Level, Sign, Ternary, Wire

Ties = Literal["zero", "plus", "alternate", "random", "previous"]
AGREEMENT = 0.75  # of every worker with the outcome, before anything is known


class LevelExchange(DirectSend):
    """Messages of levels, as bit planes in whole words.

    They go to their owners directly, or along a ``grid`` of so many workers in each dimension, on
    the way of which they are added (``dlion.exchange.grid``); answer, headers and state are the
    same to the bit. One dimension is the direct way.

    Attributes:
        levels: number of values that a message can hold for a parameter.
        planes: bits of a level.
        words: 64-bit words of a plane of a slice.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int,
        down: Callable[[int], Wire],
        grid: tuple[int, ...] = (),
        **buffers: Unpack[Buffers],
    ) -> None:
        self.levels, self.planes = levels, (levels - 1).bit_length()
        up = Sign() if levels == 2 else Level(levels)
        super().__init__(channel, numel, up, down, **buffers)
        self.words = self.slice // 64
        self.grid = Grid(channel, grid) if len(grid) > 1 else None
        if self.grid is not None:
            self._inbox = None

    def message(self, local: int) -> Tensor:
        """The message of a local worker, to be written: int64 ``[n, planes, words]``."""
        return self._planes(self._messages[local])

    def run(self, step: int) -> None:
        if self.grid is None:
            super().run(step)
            return
        channel = self.channel
        self._resize(len(channel.participants))
        messages, headers = self._planes(self._messages), self._message_headers[:, 0]
        rows, largest, self.headers = self.grid.collect(messages, headers, self.levels - 1)
        with channel.timer("vote", beside=True):
            for owner, (sums, answer) in enumerate(zip(rows, self._answers, strict=True)):
                self.decide(sums, largest, owner, step, answer)
        self.answer = self.grid.spread(self._answers)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        self.decide(self._planes(messages), self.levels - 1, owner, step, answer)

    @abstractmethod
    def decide(self, rows: Tensor, largest: int, owner: int, step: int, answer: Tensor) -> None:
        """Add rows about one slice and write what follows.

        Args:
            rows: int64 ``[m, planes, words]``: messages, or sums of messages.
            largest: the largest value in a row.
            owner, step, answer: as for ``combine``.
        """

    @property
    def largest(self) -> int:
        """The largest sum of the senders' levels; half of it is a balance of zero."""
        return self.senders * (self.levels - 1)

    def _owned_parameters(self, numel: int, mask: Tensor | None) -> Tensor:
        """Return 1 for parameters and 0 for padding in the slices owned here, ``[k, slice]``.

        ``mask``: False for padding, bool ``[numel]``; None: there is none before ``numel``.
        """
        owned = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        owned[:numel] = 1 if mask is None else mask[:numel].to(torch.float32)
        return owned.view(-1, self.slice)[self.channel.owned]

    def of_senders(self, values: Tensor) -> Tensor:
        """Return what values of all workers, ``[n, ...]``, say of the senders, ``[m, ...]``."""
        senders = self.channel.participants
        if len(senders) == len(values):
            return values
        return values.index_select(0, index_of(tuple(senders), values.device))

    def _planes(self, messages: Tensor) -> Tensor:
        """uint8 ``[..., up bytes]`` -> int64 ``[..., planes, words]``, a view."""
        return messages.view(torch.int64).unflatten(-1, (self.planes, self.words))


class LevelMean(LevelExchange):
    """The mean of the senders' levels, scaled to [-1, 1].

    The sum travels back in ``ceil(log2(n (levels - 1) + 1))`` bits a parameter.
    """

    can_follow = True

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int = 2,
        grid: tuple[int, ...] = (),
        **buffers: Unpack[Buffers],
    ) -> None:
        def down(n: int) -> Wire:
            return Level(n * (levels - 1) + 1)

        super().__init__(channel, numel, levels, down, grid, **buffers)

    def decide(self, rows: Tensor, largest: int, owner: int, step: int, answer: Tensor) -> None:
        sums = answer.view(torch.int64).view(-1, self.words)
        planes = (len(rows) * largest).bit_length()
        if planes == len(sums):
            kernels.sum_planes(rows, largest, sums)
        else:  # of fewer workers than it has room for
            total = sums.new_empty(planes, self.words)
            kernels.sum_planes(rows, largest, total)
            sums.copy_(total[: len(sums)])

    def decode(self) -> Tensor:
        sums = self.down.decode(self.answer, self.slice).to(torch.float32).flatten()
        return sums.mul_(2 / self.largest).sub_(1)


class Vote(LevelExchange):
    """The sign of the balance, the sum of what the senders' levels stand for.

    ``ties`` says what a balance of exactly zero becomes, which only happens where
    ``n (levels - 1)`` is even:

    - ``previous``: the owner's last answer (+1 at first); it keeps one bit per owned parameter.
    - ``zero``: no change. An answer then has three values and costs 1.6 bits instead of 1.
    - ``plus``: +1. Biased: coordinates that nobody knows about drift.
    - ``alternate``: +1 on even steps, -1 on odd ones.
    - ``random``: a fair coin from the owner's stream.

    All but ``zero`` cost 1 bit down. ``previous`` learns fastest (results/ties).
    """

    can_follow = True

    def __init__(
        self,
        channel: Channel,
        numel: int,
        levels: int = 2,
        ties: str = "previous",
        seed: int = 0,
        grid: tuple[int, ...] = (),
        **buffers: Unpack[Buffers],
    ) -> None:
        def down(n: int) -> Wire:
            return Ternary() if ties == "zero" and n * (levels - 1) % 2 == 0 else Sign()

        self.ties, self.seed = ties, seed
        super().__init__(channel, numel, levels, down, grid, **buffers)
        self._masks = torch.zeros(2, self.words, dtype=torch.int64, device=self.device)
        if ties == "previous":
            self.state["previous"] = self._masks.new_full((channel.workers.local, self.words), -1)

    def decide(self, rows: Tensor, largest: int, owner: int, step: int, answer: Tensor) -> None:
        positive, tied = self._masks
        if isinstance(self.down, Ternary):
            kernels.compare_sum(rows, largest, self.largest // 2, positive, tied)
            kernels.pack_votes(positive, tied, answer)
            return
        positive = answer.view(torch.int64)
        kernels.compare_sum(rows, largest, self.largest // 2, positive, tied)
        if self.largest % 2 == 0:
            positive |= self._positive_ties(tied, owner, step)
        self._decide(positive, owner, answer)

    def decode(self) -> Tensor:
        values = self.down.decode(self.answer, self.slice).to(torch.float32).flatten()
        return values if isinstance(self.down, Ternary) else values.mul_(2).sub_(1)

    def accept(self) -> None:
        if "previous" in self.state:
            words = self.answer.view(torch.int64)
            self.state["previous"].copy_(words[self.channel.owned])

    def elementwise(self) -> dict[str, Tensor]:
        if "previous" not in self.state:
            return {}
        everyones = self.channel.gather(self.state["previous"])
        return {"previous": Sign().decode(everyones.view(torch.uint8), self.slice).flatten()}

    def set_elementwise(self, values: dict[str, Tensor]) -> None:
        for name, flat in values.items():
            packed = Sign().encode(flat.view(-1, self.slice)).view(torch.int64)
            self.state[name].copy_(packed[self.channel.owned])

    def _positive_ties(self, tied: Tensor, owner: int, step: int) -> Tensor:
        """The mask of those ties that become +1."""
        if self.ties == "previous":
            return tied & self.state["previous"][owner]
        if self.ties == "random":
            worker = self.channel.workers.ids[owner]
            coins = stream(self.seed, "ties", worker, step, device=tied.device)
            return tied & torch.empty_like(tied).random_(-(2**63), None, generator=coins)
        if self.ties == "alternate" and step % 2:
            return torch.zeros_like(tied)
        return tied

    def _decide(self, positive: Tensor, owner: int, answer: Tensor) -> None:
        words = answer.view(torch.int64)
        if words.data_ptr() != positive.data_ptr():
            words.copy_(positive)
        if "previous" in self.state:
            self.state["previous"][owner] = words


class WeightedVote(Vote):
    """A vote of one bit that weighs each worker by how often it was with the majority.

    The weight is the log odds ``log(p / (1 - p))``, at least 0, of the worker's agreement p with
    the outcome, averaged over about 100 steps and the parameters of a slice. The owner of a slice
    keeps it for that slice, so nothing more travels. It is the optimal rule for independent voters
    of known competence (Nitzan and Paroush 1982). Slower than :class:`Vote`, as every bit is
    unpacked; ``ties`` may not be zero.

    Args:
        mask: bool ``[numel]``, False for padding, which is nobody's opinion; None: no padding.
    """

    can_follow = False  # owners learn from messages, not from answers

    def __init__(
        self,
        channel: Channel,
        numel: int,
        ties: str = "previous",
        seed: int = 0,
        mask: Tensor | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, 2, ties, seed, **buffers)
        k, n = channel.workers.local, channel.workers.count
        self._counted = self._owned_parameters(numel, mask)
        self.state["agreement"] = torch.full(
            (k, n), AGREEMENT, dtype=torch.float32, device=self.device
        )

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        agreement = self.of_senders(self.state["agreement"][owner])
        votes = self.up.decode(messages.contiguous(), self.slice).mul(2.0).sub_(1)
        total = torch.zeros_like(votes[0])
        for vote, weight in zip(votes, log_odds(agreement), strict=True):
            total += weight * vote
        positive, tied = (
            self.up.encode(mask.to(torch.uint8)).view(torch.int64)
            for mask in (total > 0, total == 0)
        )
        self._decide(positive | self._positive_ties(tied, owner, step), owner, answer)
        agreed = votes == self.up.decode(answer, self.slice).mul(2.0).sub_(1)
        learn(self, owner, agreed, self._counted[owner])


def log_odds(agreement: Tensor) -> Tensor:
    """What a worker's opinion weighs, given how often it was with the outcome; at least 0."""
    p = agreement.clamp(0.5, 0.999)
    return (p / (1 - p)).log()


def learn(exchange: LevelExchange, owner: int, agreed: Tensor, counted: Tensor) -> None:
    """Average ``agreement`` of the senders over about 100 steps with the share that agreed now.

    Args:
        agreed: which parameters each sender agreed on with the answer, bool ``[m, slice]``.
        counted: 1 or 0, float32 ``[slice]``: what the share is taken of.
    """
    agreement = exchange.state["agreement"][owner]
    before = exchange.of_senders(agreement)
    share = agreed.to(torch.float32) @ counted / counted.sum()
    after = before.lerp(share, 0.01).where(counted.any(), before)
    senders = index_of(tuple(exchange.channel.participants), agreement.device)
    agreement.index_copy_(0, senders, after)
