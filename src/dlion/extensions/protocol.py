"""What may be added to a step, and when its messages leave."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.core.header import Headers
from dlion.exchange import run_together
from dlion.workers import Workers


class Extension:
    """An addition to the step: what it does not override, it leaves as it is.

    Extensions are asked in their order; :meth:`around_exchange` of the first is the innermost.
    A step goes through these points:

    - of each local worker, in ``collect()`` or ``step()``: before_encode, write_header, veto
    - in ``step()``: before_step first; around_exchange and read_headers; may_update; of each bucket
      around_update; after_step
    - in ``zero_grad()``: after_zero_grad

    Attributes:
        optimizer: whose step it is, a weak proxy.
        header_bytes: how many bytes of its own go with every message.
        place: where they are among those of all extensions.
    """

    header_bytes = 0
    optimizer: Any
    place: slice

    def attach(self, optimizer: Any) -> None:
        """Belong to an optimizer, which has workers and settings, and no parameters yet."""
        # one that nobody uses ends at once, and not when garbage is collected
        self.optimizer = weakref.proxy(optimizer)

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        """Look at new parameter groups, which have no buckets yet; on all processes together."""

    def on_bucket(self, bucket: Bucket) -> None:
        """Take note of a new bucket."""

    def before_step(self) -> bool:
        """``step()`` was called. False: it is left out, on all processes, before any message."""
        return True

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        """The gradients of a local worker are there; its messages about buckets are not."""

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        """Return the bytes that go with a local worker's message about a bucket."""
        return b""

    def veto(self, bucket: Bucket, local: int) -> Tensor | None:
        """Return which gradients can be used, bool ``[T]``, perhaps on a GPU; None: all.

        The first one that cannot goes out in place of the number of the step, without the host
        knowing it: see ``vetoed`` of ``core/header.py``.
        """

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        """Look at headers of these senders that are not all the same; raise if they must be."""

    def around_exchange(self, buckets: Sequence[Bucket]) -> AbstractContextManager[Any]:
        """The messages about all buckets travel in here; nothing is updated yet."""
        return nullcontext()

    def may_update(self) -> bool:
        """Whether the answers may be applied. If not, the step moves no parameter."""
        return True

    def around_update(self, bucket: Bucket) -> AbstractContextManager[Any]:
        """The parameters of a bucket are updated in here."""
        return nullcontext()

    def after_step(self, counts: bool) -> None:
        """The step is over; ``counts``: and has moved parameters."""

    def after_zero_grad(self) -> None:
        """The gradients were dropped: another step may begin."""


class Hooks:
    """The methods of some extensions that do anything, in their order."""

    def __init__(self, extensions: Sequence[Extension]):
        def found(name: str) -> list[Callable[..., Any]]:
            plain = getattr(Extension, name)
            return [getattr(e, name) for e in extensions if getattr(type(e), name) is not plain]

        self.on_groups, self.on_bucket = found("on_groups"), found("on_bucket")
        self.before_step, self.before_encode = found("before_step"), found("before_encode")
        self.write_header, self.veto = found("write_header"), found("veto")
        self.read_headers, self.may_update = found("read_headers"), found("may_update")
        self.around_exchange = found("around_exchange")[::-1]
        self.around_update = found("around_update")
        self.after_step, self.after_zero_grad = found("after_step"), found("after_zero_grad")
        self.header_bytes = 0
        for extension in extensions:
            start, self.header_bytes = self.header_bytes, self.header_bytes + extension.header_bytes
            extension.place = slice(start, self.header_bytes)


class Schedule:
    """When messages leave: in ``step()``, all of them.

    Attributes:
        sent: how many buckets' messages have left in this step.
        at_step: whether none leaves before ``step()``.
        deferred: whether a thread writes messages, and what they are about.
        accumulates: says whether the backward pass at hand only accumulates gradients, as in
            :meth:`no_sync`; for frameworks, which know. None: never.
    """

    sent, at_step, deferred = 0, True, False
    accumulates: Callable[[], bool] | None = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in here only accumulate gradients."""
        return nullcontext()

    def encode(
        self,
        buckets: Sequence[Bucket],
        local: int,
        encode: Callable[[Sequence[Bucket], int], None],
    ) -> None:
        """Let a local worker's messages be written that have not left."""
        encode(buckets, local)

    def exchange(self, buckets: Sequence[Bucket]) -> None:
        """Let all messages leave, and return when the answers about these buckets are here."""
        run_together([bucket.stages() for bucket in buckets])

    def finish(self) -> None:
        """Wait for all that is under way, successful or not."""

    def end_step(self) -> None:
        """Make ready for the next step, when nothing is under way."""

    def before_zero_grad(self) -> None:
        """Refuse to drop gradients that have been sent."""

    def forget(self, bucket: Bucket) -> None:
        """Forget a bucket of which nothing was sent."""

    def close(self) -> bool:
        """Let go of all; return whether nothing is under way."""
        return True


def release(schedule: Schedule, borrowed: list[Workers]) -> None:
    """Let go of what an optimizer had that is no longer used."""
    if schedule.close():
        for workers in borrowed:
            workers.give_back()
