"""Direct-send exchanges: worker j owns the j-th slice of the parameters.

(1) Everyone sends the owner of each slice its packed message about it; (2) the owner combines the n
messages; (3) everyone gets the packed answers of all owners. A worker sends
``(n - 1) * (up + down)`` bytes, where up and down are one slice in the two wires: for one-bit
messages 2 (n - 1) / n bits per parameter, 32 times less than a float32 ring all-reduce.

What is combined is combined in the order of the workers, 0 to n - 1, element by element, so the
answer does not depend on how workers are spread over processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from dlion.exchange.channel import Channel, sum_in_order
from dlion.transfer import download, index_of
from dlion.wire import Float32, Sign, Wire

Stages = Generator[list[Tensor], list[Tensor], None]


def run_together(exchanges: Sequence[Stages]) -> None:
    """Run exchanges side by side; after each stage one copy tells the host about all of them.

    All processes must do so with as many stages, as collectives keep their order.
    """
    asked: dict[Stages, list[Tensor]] = {}
    for stages in exchanges:
        with suppress(StopIteration):
            asked[stages] = next(stages)
    while asked:
        known = iter(download([*chain.from_iterable(asked.values())]))
        waiting, asked = asked, {}
        for stages, tensors in waiting.items():
            with suppress(StopIteration):
                asked[stages] = stages.send([*islice(known, len(tensors))])


def slice_size(numel: int, workers: int, group: int = 1) -> int:
    """Return the parameters that each worker owns, padded to a multiple of ``group``."""
    return -(-numel // (workers * group)) * group


class Buffers(TypedDict, total=False):
    """Keyword arguments of every exchange, see :class:`Exchange`."""

    header_bytes: int
    device: torch.device | str


class Exchange(ABC):
    """Messages of the local workers in, one combined answer out.

    An exchange knows nothing of optimizers. A subclass says how local workers' messages are written
    (its ``encode``), how an owner combines them, and how the answer is read.

    Args:
        channel: the collectives.
        numel: number of parameters.
        header_bytes: bytes that go with each message, a multiple of 8.
        device: of the messages.

    Attributes:
        numel: values that messages must hold, padding included.
        headers: uint8 ``[m, header_bytes]``, those of the latest messages, by sender.
        answer: what came of the latest messages, until the next :meth:`run`.
        state: tensors ``[k, ...]`` that a checkpoint must keep (empty for most exchanges).
    """

    headers: Tensor
    answer: Sequence[Tensor] | Tensor

    def __init__(
        self,
        channel: Channel,
        numel: int,
        header_bytes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.channel, self.header_bytes, self.device = channel, header_bytes, device
        self.numel = numel
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def encode_header(self, local: int, header: Tensor) -> None:
        """Write the header of each part of a local worker's message: uint8 ``[header_bytes]``."""

    @abstractmethod
    def run(self, step: int) -> None:
        """Exchange the messages of the local participants and keep the ``answer``."""

    def stages(self, step: int) -> Stages:
        """As :meth:`run`, in stages, for the exchanges of several buckets to share their waits.

        Where the host has to know what is on a device, it yields these tensors and gets them back
        in main memory. Most exchanges have one stage.
        """
        self.run(step)
        return
        yield  # a generator, all the same

    @abstractmethod
    def decode(self) -> Tensor:
        """Unpack the answer: float32 ``[numel]``."""

    supports_leader: ClassVar[bool] = False  # whether another process may exchange in its place

    def prepare_receive(self) -> None:
        """Make room for the leader's ``answer`` and ``headers``."""
        raise NotImplementedError

    def on_received(self) -> None:  # noqa: B027
        """Take note of the leader's answer."""

    def elementwise(self) -> dict[str, Tensor]:
        """Return the per-parameter part of ``state``, from all owners: ``[numel]``.

        What is not among it depends on the slices. All processes must call this together.
        """
        return {}

    def set_elementwise(self, values: dict[str, Tensor]) -> None:  # noqa: B027
        """Restore the result of :meth:`elementwise`."""


class DirectSend(Exchange):
    """The exchange of messages of one size; subclasses say how an owner combines them.

    Buffers are made once; those of the answers again whenever their wire changes.

    Args:
        up: the wire towards the owner of a slice.
        down: the wire back, for a number of senders.

    Attributes:
        slice: parameters owned by one worker.
        words: 64-bit words with a bit for each of them.
        up, down: the wires, for the senders of the latest messages.
        senders: how many workers sent the latest messages, at first n.
        direct: whether messages go to the owners in one go.
        bits: names of the ``state`` that is one bit for each parameter of a slice, packed.
    """

    answer: Tensor
    direct: ClassVar[bool] = True
    bits: tuple[str, ...] = ()

    def __init__(
        self,
        channel: Channel,
        numel: int,
        up: Wire,
        down: Callable[[int], Wire],
        **buffers: Unpack[Buffers],
    ) -> None:
        self.senders = n = channel.workers.count
        self.slice = slice_size(numel, n, up.group)
        self.words = self.slice // 64
        super().__init__(channel, n * self.slice, **buffers)
        self.up, self.down, self._down = up, down(n), down
        row = up.nbytes(self.slice) + self.header_bytes
        w = channel.workers
        self._outbox = self._buffer(w.local, n, row)
        self._inbox = self._buffer(n, w.local, row) if w.processes > 1 and self.direct else None
        self._messages, self._message_headers = self._split(self._outbox)
        self._received: Tensor | None = None
        self._views: tuple[Sequence[Tensor], Tensor]
        self._make_answers()

    @cached_property
    def messages(self) -> list[Tensor]:
        """The messages of local workers, ``[n, ...]``, in the view of their wire."""
        return [*self.up.view(self._messages)]

    def encode(self, local: int, values: Any) -> Tensor | None:
        """Write the message of a local worker, ``[numel]`` values of the up wire.

        Override it for messages that are not one tensor of values, and for those that say less than
        they are given, to return what they say: float32 ``[numel]``.
        """
        self._messages[local] = self.up.encode(values.view(-1, self.slice))

    def encode_header(self, local: int, header: Tensor) -> None:
        self._message_headers[local] = header

    def run(self, step: int) -> None:
        self._resize(len(self.channel.participants))
        rows, self.headers = self._collect()
        with self.channel.timer.vote:
            for owner, (messages, answer) in enumerate(zip(rows, self._answers, strict=True)):
                self.combine(messages, owner, step, answer)
        self.answer = self._broadcast()

    def prepare_receive(self) -> None:
        senders = len(self.channel.participants)
        self._resize(senders)
        self.headers = self._buffer(senders, self.header_bytes)
        self.answer = self._answers if self._everyones is None else self._everyones

    @abstractmethod
    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        """Combine the messages about one slice into the packed answer.

        Args:
            messages: uint8 ``[m, up bytes]``, in the order of the workers; on a grid sums of some
                of them.
            owner: local index of the worker that owns the slice.
            step: counted from 0.
            answer: uint8 ``[down bytes]``, to be written.
        """

    def elementwise(self) -> dict[str, Tensor]:
        everyones = {name: self.channel.gather(self.state[name]) for name in self.bits}
        return {
            name: Sign().decode(packed.view(torch.uint8), self.slice).flatten()
            for name, packed in everyones.items()
        }

    def set_elementwise(self, values: dict[str, Tensor]) -> None:
        for name, flat in values.items():
            packed = Sign().encode(flat.view(-1, self.slice)).view(torch.int64)
            self.state[name].copy_(packed[self.channel.owned])

    def _collect(self) -> tuple[Sequence[Tensor], Tensor]:
        """Send all messages; return those about each slice owned here, and the headers.

        They are uint8 ``[m, up bytes]`` for each of k slices, and ``[m, header_bytes]``.
        """
        outbox, senders = self._outbox, self.channel.local_participants
        if len(senders) < len(outbox):
            outbox = outbox[index_of(tuple(senders), outbox.device)]
        received = self.channel.scatter(outbox, self._inbox)
        if received is not self._received:  # it is one buffer as long as all take part
            messages, headers = self._split(received)
            self._received, self._views = received, (messages.unbind(1), headers[:, 0])
        return self._views

    def _broadcast(self) -> Tensor:
        """Send the answers of the owners here to everyone: ``[n, down bytes]``."""
        return self.channel.gather(self._answers, self._everyones)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the messages in rows, ``[..., up bytes]``, and the headers behind them."""
        size = self.up.nbytes(self.slice)
        return rows[..., :size], rows[..., size:]

    def _resize(self, senders: int) -> None:
        """Prepare for messages of so many workers: the answer's wire may depend on it."""
        if senders == self.senders:
            return
        before = self.down.nbytes(self.slice)
        self.senders, self.down = senders, self._down(senders)
        if self.down.nbytes(self.slice) != before:
            self._make_answers()

    def _make_answers(self) -> None:
        w, size = self.channel.workers, self.down.nbytes(self.slice)
        self._answers = self._buffer(w.local, size)
        self._everyones = self._buffer(w.count, size) if w.processes > 1 else None

    def _buffer(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)


class DenseMean(DirectSend):
    """The mean of float32 messages, added in the order of the workers."""

    supports_leader = True

    def __init__(self, channel: Channel, numel: int, **buffers: Unpack[Buffers]) -> None:
        super().__init__(channel, numel, Float32(), lambda _: Float32(), **buffers)

    def combine(self, messages: Tensor, owner: int, step: int, answer: Tensor) -> None:
        total = sum_in_order(messages.view(torch.float32), answer.view(torch.float32))
        total /= len(messages)

    def decode(self) -> Tensor:
        return self.answer.view(torch.float32).flatten()
