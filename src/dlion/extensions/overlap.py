"""Overlap (``overlap=True``): messages leave during the backward pass.

Autograd calls a hook after it has accumulated a gradient. Once all gradients of a bucket are there,
and the buckets before it have left, its message is encoded and its exchange begins on a thread.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlion.core.bucket import Bucket
from dlion.core.layout import Slot, local_part
from dlion.extensions.lockstep import hyperparameters
from dlion.extensions.protocol import Extension, Schedule
from dlion.transfer import keep_for_this_stream

Work = Callable[[], None]
Encode = Callable[[Sequence[Bucket], int], None]


class _Noted(NamedTuple):
    """Gradients with their versions, and what was measured of each, float64 ``[T, m]``."""

    gradients: list[tuple[Slot, Tensor, int]]
    measure: Callable[[list[Tensor]], Tensor]
    measured: Tensor


@dataclass
class _Pass:
    """A bucket in the backward pass of this step.

    Attributes:
        waiting: trained parameters whose gradient is not there yet; None before the first is.
        sent: whether its message has left.
        restarted: whether zero_grad() has given up the pass that the message was made in.
        noted: of the gradients that the message was made of.
    """

    waiting: int | None = None
    sent: bool = False
    restarted: bool = False
    noted: _Noted | None = None


class Overlap(Extension, Schedule):
    """Sends buckets during the backward pass, and runs their exchanges on a thread.

    Exchanges begin in the order of the buckets, as collectives must have one order on all
    processes. On CUDA the thread works on a stream of its own for each device: it waits for the
    messages, and the update waits for it.

    Args:
        deferred: whether messages are written on the thread, as that takes collectives: then all
            start there, and communicators never meet in two orders.

    Attributes:
        in_backward: whether a backward pass is going on, or has failed.
    """

    at_step = False

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.in_backward = False
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._passes: dict[Bucket, _Pass] = {}
        self._rates = ""  # the hyperparameters that messages of this step were made with
        self._late: dict[Bucket, Work] = {}  # what the thread does before an exchange
        self._synchronising = True
        self._written = True  # whether gradients are written to after they are sent: then hashed
        self._ready = threading.RLock()  # autograd has a thread for every device
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: dict[Bucket, Future[torch.cuda.Event | None]] = {}
        self._unfinished = False  # whether an exchange of this step has begun and not ended well

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        optimizer.workers = optimizer.workers.with_own_group()  # others talk meanwhile
        optimizer.borrowed.append(optimizer.workers)
        optimizer.schedule = self

    # ---- hooks

    def on_bucket(self, bucket: Bucket) -> None:
        self._passes[bucket] = _Pass()
        ready = partial(_call, weakref.WeakMethod(self._gradient_is_ready))
        for slot in bucket.slots:
            self._bucket_of[slot.tensor] = bucket
            if slot.tensor not in self._hooks:
                hook = slot.tensor.register_post_accumulate_grad_hook(ready)
                self._hooks[slot.tensor] = hook

    def forget(self, bucket: Bucket) -> None:
        self._passes.pop(bucket, None)
        for slot in bucket.slots:
            if self._bucket_of.get(slot.tensor) is bucket:
                del self._bucket_of[slot.tensor]
                self._hooks.pop(slot.tensor).remove()

    def _expects(self) -> bool:
        """Whether gradients of the last local participant are accumulated."""
        if not self._synchronising or (self.accumulates is not None and self.accumulates()):
            return False
        optimizer = self.optimizer
        local = optimizer.channel.local_participants
        return bool(local) and optimizer.collected - {local[-1]} == {*local[:-1]}

    @torch._disable_dynamo
    @torch.no_grad()
    def _gradient_is_ready(self, tensor: Tensor) -> None:
        with self._ready:
            if self._expects():
                self._note(self._bucket_of[tensor])

    def _note(self, bucket: Bucket) -> None:
        """Count a gradient; send all buckets that are complete, in their order."""
        here = self._passes[bucket]
        if here.sent and here.restarted:  # the pass is another try, and this bucket has left
            return
        if not self.in_backward:
            self.in_backward = True
            # autograd calls it at the end of this pass, but only if no exception has ended the
            # pass: so zero_grad() knows whether what has left may be tried again
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_went_well)
        if here.waiting is None:
            here.waiting = sum(slot.tensor.requires_grad for slot in bucket.slots)
        here.waiting -= 1
        if here.waiting < 0:
            raise RuntimeError(
                "a second backward pass in one step, after messages have left: run all but the last"
                " backward pass of a step in `with optimizer.no_sync():`, call zero_grad() first if"
                " it is another try, give checkpoint() use_reentrant=False where a layer runs"
                " twice, or create the optimizer with overlap=False"
            )
        # a later bucket may be complete before an earlier one, and then waits here for it
        optimizer = self.optimizer
        while self.sent < len(optimizer.buckets):
            complete = optimizer.buckets[self.sent]
            if self._passes[complete].waiting != 0:
                break
            optimizer.check_whole()
            last = optimizer.channel.local_participants[-1]
            self._write([complete], last, optimizer.write_messages)
            self._send(complete)

    def _backward_went_well(self) -> None:
        """Note that a pass has ended without an exception."""
        self.in_backward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in here only accumulate gradients."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    # ---- changes between backward() and step()

    def _check_unchanged(self) -> None:
        """Refuse gradients and hyperparameters that were changed after messages had left.

        A gradient that is written to without a change is no change. To tell, the norm of each one
        is taken before. In the first step, and for as long as steps show such writes, a hash is.
        """
        self._written = False
        if self._rates != hyperparameters(self.optimizer.param_groups):
            raise RuntimeError(
                "the learning rate or another hyperparameter was changed between backward() and"
                " step(), when messages had left: set it before backward(), or create the"
                " optimizer with overlap=False"
            )
        for bucket in self.optimizer.buckets[: self.sent]:
            here = self._passes[bucket]
            if here.noted is not None and not here.restarted:
                self._check_gradients(here.noted)

    def _check_gradients(self, noted: _Noted) -> None:
        """Refuse gradients of a bucket that were changed after its message had left."""
        found = noted.gradients
        same = [slot.tensor.grad is grad for slot, grad, _ in found]
        if all(same) and any(local_part(grad)._version != version for _, grad, version in found):
            # clip_grad_norm_(params, inf), say, multiplies by 1
            self._written = True
            now = noted.measure([grad for _, grad, _ in found])
            same = (now.view(torch.int64) == noted.measured.view(torch.int64)).all(1).tolist()
        for (slot, *_), unchanged in zip(found, same, strict=True):
            if not unchanged:
                raise RuntimeError(
                    f"the gradient of {slot.name or 'a parameter'} was changed between"
                    " backward() and step(), when it had been sent: clip or scale gradients"
                    " with overlap=False (torch.nn.utils.get_total_norm only measures them)"
                )

    def before_zero_grad(self) -> None:
        if self.sent and not self.in_backward:
            raise RuntimeError(
                "zero_grad() after a backward pass whose messages have left, before step(): call"
                " step(), or, where a pass is not to count (through another model's parameters, of"
                " a batch to be skipped), run it in `with optimizer.no_sync():`, freeze them with"
                " requires_grad_(False), or create the optimizer with overlap=False"
            )

    def after_zero_grad(self) -> None:
        """Count gradients from zero; messages that left in a pass that has failed stay sent."""
        self.in_backward = False
        for here in self._passes.values():
            here.waiting, here.restarted = None, here.sent

    # ---- exchanges

    def encode(
        self,
        buckets: Sequence[Bucket],
        local: int,
        encode: Encode,
    ) -> None:
        if self.deferred:
            self.finish()  # it writes the mean gradients
        if self.sent:
            self._check_unchanged()
        self._write(buckets[self.sent :], local, encode)

    def _write(self, buckets: Sequence[Bucket], local: int, encode: Encode) -> None:
        """Let messages be written, here or on the thread."""
        if self.deferred:
            self._late |= {bucket: partial(encode, [bucket], local) for bucket in buckets}
        else:
            encode(buckets, local)

    def _send(self, bucket: Bucket) -> None:
        """Begin the exchange of the next bucket."""
        work = self._late.pop(bucket, None)
        if not self.sent:
            self._rates = hyperparameters(self.optimizer.param_groups)
        self._passes[bucket].sent = True
        if work is None:
            self._note_gradients(bucket)
        self.sent += 1
        if self._executor is None:
            threads = torch.get_num_threads()
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=torch.set_num_threads, initargs=(threads,)
            )
        ready = torch.cuda.Event() if bucket.device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(bucket.device))
        self._running[bucket] = self._executor.submit(self._run, bucket, ready, work)

    def _note_gradients(self, bucket: Bucket) -> None:
        """Record the gradients of a message."""
        slots = [(slot, slot.tensor.grad) for slot in bucket.slots]
        found = [(slot, g, local_part(g)._version) for slot, g in slots if g is not None]
        if found:
            measure = _hashes if self._written else _norms
            measured = measure([grad for _, grad, _ in found])
            self._passes[bucket].noted = _Noted(found, measure, measured)

    @torch.no_grad()
    def _run(
        self, bucket: Bucket, ready: torch.cuda.Event | None, work: Work | None
    ) -> torch.cuda.Event | None:
        if ready is None:
            self._exchange(bucket, work)
            return None
        if bucket.device not in self._streams:
            self._streams[bucket.device] = torch.cuda.Stream(bucket.device)
        stream = self._streams[bucket.device]
        with torch.cuda.device(bucket.device), torch.cuda.stream(stream):
            ready.wait()
            self._exchange(bucket, work)
            done = torch.cuda.Event()
            done.record()
        return done

    def _exchange(self, bucket: Bucket, work: Work | None) -> None:
        if self._unfinished:  # peers would take this message for the one that they still wait for
            raise RuntimeError("the exchange of an earlier bucket has failed")
        self._unfinished = True
        if work is not None:
            work()
            self._note_gradients(bucket)
        super().exchange([bucket])
        self._unfinished = False

    def exchange(self, buckets: Sequence[Bucket]) -> None:
        for bucket in self.optimizer.buckets[self.sent :]:
            self._send(bucket)
        for bucket in buckets:
            done = self._running.pop(bucket).result()
            if done is not None:
                done.wait(torch.cuda.current_stream(bucket.device))
                keep_for_this_stream(*bucket.exchange.answer, bucket.exchange.headers)

    def finish(self) -> None:
        for future in self._running.values():
            future.exception()

    def end_step(self) -> None:
        self._running.clear()
        self._late.clear()
        self.sent, self.in_backward, self._unfinished = 0, False, False
        for bucket in self._passes:
            self._passes[bucket] = _Pass()

    def close(self) -> bool:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        return all(future.done() for future in self._running.values())


def _norms(grads: list[Tensor]) -> Tensor:
    """Return the norms of gradients, ``[T, 1]``: on a GPU a few launches for all of them."""
    return torch.stack(torch._foreach_norm([*map(local_part, grads)])).double()[:, None]


def _hashes(grads: list[Tensor]) -> Tensor:
    """Return a hash of each gradient's bits, its sum and norm, ``[T, 3]``.

    The hash, of xor, is blind to pairs of equal values.
    """
    double, found = torch.float64, []
    for values in map(local_part, grads):
        hashed = torch.hash_tensor(values).view(double)
        found += [hashed, values.sum(dtype=double)]
        found.append(torch.linalg.vector_norm(values, dtype=double))
    return torch.stack(found).view(-1, 3)


def _call(method: weakref.WeakMethod, tensor: Tensor) -> None:
    """Call the method of an object, if there still is one."""
    alive = method()
    if alive is not None:
        alive(tensor)
