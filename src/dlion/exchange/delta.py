"""Vectors that are followed by their owners, bit by bit: adaptive delta modulation.

Both ends of a connection keep the same estimate h of what the sender would say. A bit tells whether
the truth lies above or below, and moves the estimate by a step; the step size of a coordinate grows
while its bits repeat, when the estimate lags behind (slope overload), and shrinks when they
alternate around the truth (granular noise). It is learnt from the bits alone, so that nothing but
bits travels.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange.channel import Channel, sums_of_rows
from dlion.exchange.direct_send import Buffers, DirectSend
from dlion.exchange.vote import Competence, TieBreak, owned_parameters, signs_of
from dlion.kernels import Coder
from dlion.transfer import index_of
from dlion.wire import Sign

DORMANT = 64  # the level of what was zero at first: steps of 2**-24, ready to grow


class DeltaVote(DirectSend):
    """The sign of the sum of the workers' estimates, in one bit; for exactly 0 the one before.

    Before the first messages every worker tells all others the level of the mean size of each
    tensor, in a byte, to start from. After that a message is one bit a parameter. What
    :func:`dlion.kernels.decode_deltas` does with a bit is done by the worker and by the owner,
    which keeps a level for each worker but only the sum of their estimates. An absent worker's
    estimate stays in the sum. Both ends agree up to the rounding of the largest estimates so far;
    only in padding, which no worker encodes, the owner's levels are its own.

    Args:
        sizes: elements of each of T parameter tensors in ``numel``, gaps included.
        rise: levels, eight an octave, that a step size grows by from the third equal bit on.
        lookahead: how many more of their latest steps the estimates are taken ahead for the answer.
        limit: a worker's estimates count at most so many times as much as the median of all
            workers', in mean size over an owner's slice; None: as they are.
        weighted: weigh the workers' estimates as :class:`dlion.exchange.WeightedVote` does votes.
            For this and for a limit an owner keeps the estimates one by one.
        mask: bool ``[numel]``, False for padding, which is nobody's opinion; None: no padding.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        sizes: list[int],
        rise: int,
        lookahead: float,
        limit: float | None = None,
        weighted: bool = False,
        mask: Tensor | None = None,
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, Sign(), lambda _: Sign(), **buffers)
        self._ties = TieBreak(self, "previous")
        k, n, device = channel.workers.local, channel.workers.count, self.device
        self.rise, self.lookahead, self.limit, self.weighted = rise, lookahead, limit, weighted
        padding = self.numel - sum(sizes)
        self._masks = torch.zeros(2, self.words, dtype=torch.int64, device=device)
        self._sizes = torch.tensor([*sizes[:-1], sizes[-1] + padding], device=device)
        self._start_levels = torch.full((k, len(sizes)), DORMANT, dtype=torch.uint8, device=device)
        one_by_one = limit is not None or weighted  # or only the sum of the estimates
        self.state |= {
            "estimate": torch.zeros(k, self.numel, dtype=torch.float32, device=device),
            "level": self._start_levels.new_full((k, self.numel), DORMANT),
            "history": self._masks.new_zeros(k, 2, self.numel // 64),
            "received_estimate": torch.zeros(
                k, n if one_by_one else 1, self.slice, dtype=torch.float32, device=device
            ),
            "received_level": self._start_levels.new_full((k, n, self.slice), DORMANT),
            "received_history": self._masks.new_zeros(k, n, 2, self.words),
            "begun": torch.zeros(k, dtype=torch.uint8),  # in main memory: it is asked at every step
        }
        if one_by_one:
            self._counted = owned_parameters(self, numel, mask)
        if weighted:
            self._competence = Competence(self, self._counted)

    @property
    def begun(self) -> bool:
        """Whether messages have been exchanged; before that, workers have to :meth:`start`."""
        return bool(self.state["begun"][0])

    def coder(self, local: int) -> Coder:
        """The estimates of a local worker, which its messages move."""
        return Coder(*(self.state[name][local] for name in ("estimate", "level", "history")))

    def start(self, local: int, size: Tensor) -> None:
        """Say the mean size of each of a local worker's T tensors, float32 ``[T]``."""
        self._start_levels[local] = kernels.nearest_level(size).where(size > 0, DORMANT)
        self.state["level"][local] = self._expand(self._start_levels[local])

    def run(self, step: int) -> None:
        if not self.begun:
            for worker, starts in enumerate(self.channel.gather(self._start_levels)):
                levels = self._expand(starts).view(-1, self.slice)
                self.state["received_level"][:, worker] = levels[self.channel.owned]
            self.state["begun"].fill_(1)
        super().run(step)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        positive, tied = self.follow(messages, owner, self.lookahead)
        self._ties.write(answer, positive, tied, owner, step)
        if self.weighted:
            estimates = self.state["received_estimate"][owner]
            opinions = self._competence.of_senders(estimates) > 0
            self._competence.learn(owner, opinions == self.down.decode(answer, self.slice))

    def follow(self, messages: Tensor, owner: int, lookahead: float) -> Tensor:
        """Move the estimates of the senders by their bits.

        Returns where their sum, taken ahead, is above 0 and where it is 0: int64 ``[2, words]``.
        """
        received = ("received_estimate", "received_level", "received_history")
        coders = Coder(*(self.state[name][owner] for name in received))
        senders = self.channel.participants
        row_of = {worker: row for row, worker in enumerate(senders)}
        rows = tuple(row_of.get(worker, -1) for worker in range(self.channel.workers.count))
        kernels.decode_deltas(
            self.up.view(messages),
            index_of(rows, self._masks.device),
            coders,
            self._weights(owner),
            self.rise,
            lookahead,
            *self._masks,
        )
        return self._masks

    def decode(self) -> Tensor:
        return signs_of(self)

    def _expand(self, levels: Tensor) -> Tensor:
        """One level a tensor -> one an element, ``[T]`` -> ``[numel]``."""
        return levels.repeat_interleave(self._sizes, output_size=self.numel)

    def _weights(self, owner: int) -> Tensor | None:
        """Return the weights of the workers' estimates, ``[n]``; None: all are equal."""
        estimates = self.state["received_estimate"][owner]
        weights = torch.ones(self.channel.workers.count, dtype=torch.float32, device=self.device)
        if self.limit is not None:
            counted = estimates * self._counted[owner]
            size = torch.stack([_sum(sums_of_rows(row.view(-1, 64))) for row in counted])
            known = size > 0  # not of those who have never taken part
            middle = (known.sum() - 1).div(2, rounding_mode="floor").clamp(min=0)
            median = size.where(known, torch.inf).sort().values.gather(0, middle.view(1))
            weights = (self.limit * median / size).clamp(max=1).float()
            weights = weights.where(known.any(), 1.0)
        elif not self.weighted:
            return None
        return weights * self._competence.weights(owner) if self.weighted else weights


class PolarDeltaVote(DeltaVote):
    """The signs of a function of each matrix of the sum of estimates, computed by its owner.

    No matrix may lie in two slices, so every one has one owner, which computes its answer once for
    all. The sum is taken ahead by ``lookahead`` times what it has just moved by.

    Args:
        numel, sizes: as for :class:`DeltaVote`.
        spans: ``(start, stop)`` of each matrix.
        answer: makes the answers of an owner: the numbers of its matrices and their values,
            ``[R * C]`` each -> as many.
    """

    def __init__(
        self,
        channel: Channel,
        numel: int,
        sizes: list[int],
        rise: int,
        lookahead: float,
        spans: Sequence[tuple[int, int]],
        answer: Callable[[list[int], list[Tensor]], list[Tensor]],
        **buffers: Unpack[Buffers],
    ) -> None:
        super().__init__(channel, numel, sizes, rise, lookahead, **buffers)
        self._spans, self._answer = spans, answer
        if any(start // self.slice != (stop - 1) // self.slice for start, stop in spans):
            raise ValueError("a matrix lies in the slices of two owners")

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        total = self.state["received_estimate"][owner, 0]
        before = total.clone()
        self.follow(messages, owner, 0.0)
        ahead = total + self.lookahead * (total - before)
        offset = self.slice * self.channel.workers.ids[owner]
        own = [
            (index, slice(start - offset, stop - offset))
            for index, (start, stop) in enumerate(self._spans)
            if offset <= start < offset + self.slice
        ]
        found = self._answer([index for index, _ in own], [ahead[part] for _, part in own])
        directions = torch.ones_like(ahead)
        for (_, part), direction in zip(own, found, strict=True):
            directions[part] = direction
        positive, tied = (
            self.down.encode(mask.to(torch.uint8)).view(torch.int64)
            for mask in (directions > 0, directions == 0)
        )
        self._ties.write(answer, positive, tied, owner, step)


def _sum(values: Tensor) -> Tensor:
    """Add values in float64 one after the other on a CPU: independent of the threads.

    On a GPU ``cumsum`` is not deterministic, and ``sum`` is.
    """
    return values.sum() if values.is_cuda else values.cumsum(0)[-1]
