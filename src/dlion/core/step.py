"""One step: encode the messages of local workers, exchange them, apply the answers."""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from dlion.checks import warn
from dlion.core.bucket import Bucket, InFlight
from dlion.core.header import Sender
from dlion.core.layout import Member
from dlion.core.method import Method
from dlion.elastic.worker import Elastic
from dlion.exchange import is_broken, run_together
from dlion.extensions import nonfinite
from dlion.extensions.overlap import Overlap, Work
from dlion.extensions.rounding import Rounder
from dlion.transfer import download

_HALF_WAY = (
    "an earlier step failed half-way, when state had moved: give this optimizer a checkpoint"
    " (load_state_dict), or make another"
)

_SKIPPED = (
    "the gradient of {} is not finite in step {}: nonfinite=skip leaves it out, and will leave out"
    " others without a word (optimizer.skipped counts them)"
)


class Step:
    """The step at hand of an optimizer.

    Args:
        method: the optimizer, which says what is encoded and what is done with the answers.
        overlap: whether messages leave during the backward pass.

    Attributes:
        collected: local workers whose messages were made.
        taken: whether any step was taken.
        failed: whether a step failed half-way, when state had moved.
        overlap: sends messages during the backward pass, or None.
        elastic: the workers that a manager names, or None.
    """

    def __init__(self, method: Method, overlap: bool) -> None:
        # an optimizer that nobody uses ends at once, and not when garbage is collected
        self._method: Method = weakref.proxy(method)
        self.collected: set[int] = set()
        self.taken = self.failed = False
        self.overlap: Overlap | None = None
        if overlap:
            self.overlap = Overlap(method.buckets, self._encode_last, self._is_last_pass)
        self.elastic: Elastic | None = None
        self._rounder = Rounder(method.stochastic_rounding, method.seed)
        self._skipping: set[int] = set()  # workers that leave out a gradient in this step
        self._late: dict[Bucket, Work] = {}  # what the exchange's thread does before an exchange

    @property
    def under_way(self) -> bool:
        """Whether messages of this step were made."""
        return bool(self.collected or (self.overlap is not None and self.overlap.sent))

    # ------------------------------------------------------------------ gradients -> messages

    def collect(self, buckets: Sequence[Bucket], local: int) -> None:
        """Encode a local worker's messages about those of all buckets that have not left yet."""
        if self.overlap is not None:
            if self._method.node is not None:
                self.overlap.finish()  # it writes the mean gradients
            self.overlap.check_unchanged()
            buckets = buckets[self.overlap.sent :]
        self.collected.add(local)
        self._encode(buckets, local)

    @torch.no_grad()
    def _encode(self, buckets: Sequence[Bucket], local: int) -> None:
        """Look at a local worker's gradients and write its messages about buckets.

        With a node and overlap the exchange's thread does so: it then starts all collectives, and
        communicators never meet in two orders.
        """
        if self.failed:
            raise RuntimeError(_HALF_WAY)
        if self.elastic is not None:
            self.elastic.require_open()
        self.failed = True  # until all messages are written
        method = self._method
        if method.nonfinite == "stop":
            nonfinite.measure(buckets, local)
            if method.moves_alone:  # no header will stop the others first
                nonfinite.refuse(buckets, local)
        elif method.nonfinite == "skip":
            left_out = nonfinite.leave_out(buckets, method.whole_matrices)
            if left_out and not (self._skipping or method.skipped):
                warn(_SKIPPED.format(left_out[0], buckets[0].step + 1))
            if left_out:
                self._skipping.add(local)
        members = method.members
        trained = members.in_buckets + len([p for p in members.frozen if p.requires_grad])
        sender = Sender(trained, method.flag, method.files.here)
        for bucket in buckets:
            write = partial(self._write_message, bucket, local, sender)
            if method.node is None or self.overlap is None:
                write()
            else:
                self._late[bucket] = write
        self.failed = False

    def _encode_last(self, bucket: Bucket) -> Work | None:
        """Write the last local worker's message, during its backward pass."""
        self._encode([bucket], self._method.channel.local_participants[-1])
        return self._late.pop(bucket, None)

    def _is_last_pass(self) -> bool:
        """Whether gradients of the last local participant are accumulated, for :class:`Overlap`."""
        method = self._method
        if method.accumulates is not None and method.accumulates():
            return False
        local = method.channel.local_participants
        return bool(local and method.buckets) and self.collected - {local[-1]} == set(local[:-1])

    def _write_message(self, bucket: Bucket, local: int, sender: Sender) -> None:
        """Move a worker that moves by itself, and write its message and the header, if any.

        With a node, its processes average their gradients before.
        """
        method = self._method
        if method.node is not None:
            header = bucket.make_header(bucket.present(), sender)
            sender = sender._replace(flag=method.node.average(bucket, header))
        if method.moves_alone:
            method.move(bucket, local)
            if not method.exchanges:
                return
        if self.elastic is not None:
            self.elastic.keep(bucket)
        present = bucket.present() if method.skips_missing else bucket.trained()
        own = (rows[local] for rows in bucket.own.values())
        with method.channel.timer.encode, bucket.untouched(present, own):
            method.encode(bucket, local)
        bucket.write_header(local, present, sender)

    # ------------------------------------------------------------------ messages -> parameters

    def finish(self, buckets: Sequence[Bucket], exchange: bool) -> None:
        """Exchange the messages, apply the answers, and make ready for the next step.

        Without an ``exchange`` workers have moved on their own, and there are no messages.
        """
        if self.failed:
            raise RuntimeError(_HALF_WAY)
        method = self._method
        self.failed = True  # until all answers are applied
        exchanged = exchange and self._exchange_and_update(buckets)
        self.failed = False
        if exchanged or method.moves_alone:
            self._conclude(buckets)
        self.forget(buckets)
        if method.moves_alone:
            method.end_step(exchanged)

    def _exchange_and_update(self, buckets: Sequence[Bucket]) -> bool:
        """Let all messages leave, wait for the answers and apply them; return whether it did.

        A GPU's host waits once for the headers of all buckets. On a CPU, where the exchanges of
        later buckets continue meanwhile, each bucket is updated as soon as its answer is there.
        """
        method, overlap = self._method, self.overlap
        if overlap is not None:
            for bucket in buckets[overlap.sent :]:
                overlap.send(bucket, self._late.pop(bucket, None))
        if self.elastic is not None:
            if self.elastic.commit(self.wait):
                self._apply(buckets)
                return True
            if overlap is not None:
                overlap.finish()
            self.elastic.put_back()
            return False
        on_cpu = {bucket.device.type for bucket in buckets} == {"cpu"}
        for batch in zip(buckets) if on_cpu else [buckets]:
            self.wait(batch)
            self._apply(batch)
        if method.after_step is not None:
            method.after_step(buckets, method.channel)
        return True

    def wait(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the exchanges of buckets, and read the headers of their messages."""
        with self._method.channel.timer.wait:
            try:
                if self.overlap is None:
                    run_together([bucket.stages() for bucket in buckets])
                else:
                    self.overlap.wait(buckets)
                headers = [bucket.exchange.headers for bucket in buckets]
                if len(headers) > 1:  # one copy, so that the host waits once for a GPU
                    headers = download(headers)
            except RuntimeError as error:
                if not is_broken(error):
                    raise
                raise RuntimeError(
                    f"the exchange of step {buckets[0].step + 1} broke off ({error}): another"
                    " process has ended, hangs, or called step() less often than this one"
                ) from error
        for bucket, rows in zip(buckets, headers, strict=True):
            bucket.read_headers(rows)

    def _apply(self, buckets: Sequence[Bucket]) -> None:
        """Update buckets with their answers."""
        method = self._method
        for bucket in buckets:
            flats = (bucket.params, *bucket.shared.values())
            kept = bucket.untouched(bucket.flight.present, flats)
            rounded = self._rounder(bucket) if bucket.dtype == torch.bfloat16 else nullcontext()
            with method.channel.timer.apply, kept, rounded:
                method.update(bucket)
            bucket.write_back()

    def _conclude(self, buckets: Sequence[Bucket]) -> None:
        """Note the headers of this step, and count it."""
        method = self._method
        travelled = slow = method.flagged = False
        for bucket in buckets:
            flight = bucket.flight
            travelled, slow = travelled or any(flight.present), slow or flight.slow
            method.flagged = method.flagged or flight.flag
            bucket.count_step()
        if self._rounder.moved:
            self._rounder.warn_of_losses()
        if travelled:
            method.channel.adapt(slow)
            saved = buckets[0].flight.saved
            if any(saved):
                method.files.compare(saved)
        method.skipped += len(self._skipping)
        self.taken = True
        for group in method.param_groups:
            group["steps"] += 1

    def restart(self) -> None:
        """Begin again, as other state was loaded."""
        if self.overlap is not None:
            self.overlap.finish()
        self.forget(self._method.buckets)
        self.failed = False

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Make ready for the next step."""
        if self.overlap is not None:
            self.overlap.end_step()
        self._skipping.clear()
        self.collected.clear()
        self._late.clear()
        for bucket in buckets:
            bucket.flight = InFlight()


def rehearse(method: Method) -> None:
    """Take a step with a parameter of its own, which compiles the kernels of a method."""
    values = torch.nn.Parameter(torch.zeros(8, 8))
    bucket = Bucket(0, [Member(values, "", method.param_groups[0])])
    bucket.allocate(method.make_exchange(bucket), method)
    for local in range(method.workers.local):
        method.encode(bucket, local)
    bucket.exchange.run(0)
    bucket.flight.present = [True]
    method.update(bucket)
