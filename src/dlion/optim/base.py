"""The walk that every method shares: collect gradients, encode, exchange, update."""

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from dlion.exchange import Channel
from dlion.optim.bucket import Bucket, InFlight, plain_values
from dlion.optim.checks import check_alike, check_bare, check_hyperparameters, check_spread
from dlion.optim.node import DenseWire, Node
from dlion.optim.parameters import BucketedOptimizer
from dlion.optim.thread import ExchangeThread
from dlion.transfer import download
from dlion.values import Positive
from dlion.workers import Workers, check_gpus, voters

Nonfinite = Literal["stop", "skip"]
BUCKET_MB, BUCKET_WORKERS = 5.0, 8  # results/speed; with more workers buckets grow


class Common(TypedDict, total=False):
    """Keyword arguments of every optimizer, see :class:`DistributedOptimizer`."""

    workers: Workers | None
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    dense_group: dist.ProcessGroup | None
    dense_wire: DenseWire
    seed: int
    overlap: bool
    bucket_cap_mb: float | Literal["auto"] | None
    nonfinite: Nonfinite | None


class DistributedOptimizer(BucketedOptimizer):
    """A ``torch.optim.Optimizer`` whose workers exchange packed messages instead of gradients.

    It replaces both the optimizer and DistributedDataParallel: use the bare model, one process per
    worker, and the loop everybody knows::

        optimizer = DLion(model.parameters(), lr=1e-4)  # after init_process_group and model.to()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Creating it copies the parameters of process 0 to all and moves the trained ones into flat
    buffers, so they share memory with nothing else from then on (a Parameter that is used twice
    stays one). Gradient accumulation, parameter groups, LR schedulers, autocast and ``state_dict``
    work as usual. The state differs from worker to worker: save it on every rank, not on rank 0
    alone.

    A process may host several virtual workers (``workers.local``): run a backward pass for each,
    with its own data, and call :meth:`collect` after each (the last may be left to ``step()``).

    A model that FSDP2 shards has replicas as workers: shard it over one dimension of a mesh, and
    let messages go along the other::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = DLion(model.parameters(), lr=1e-4, mesh=mesh["replicate"])

    FSDP then averages gradients inside a replica alone, and each process exchanges messages about
    its shards with those that hold the same. Parameters stay where FSDP keeps them; state, and a
    copy of the parameters, is of the local shards. A scale or a number of entries that a method
    takes of each tensor it takes of each shard (LionCub, TernGrad, DGC, ...), so for these methods
    results depend on the shards. Voters are replicas here, whose gradients have less noise than
    those of single processes: that is better where links between nodes are slow, and another method
    than a vote of all processes.

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch. (Methods with
    residuals count it as zero everywhere: what they held back must still be sent.) A frozen
    parameter is neither sent nor given state; it may be unfrozen between steps. One that is frozen
    later keeps its state and its bits in the messages, and is not updated. To load a state that was
    saved after unfreezing, unfreeze first.

    Under ``torch.amp.GradScaler`` an overflow on one worker skips the step on all. That takes one
    more small collective a step, ``overlap=False`` and one worker a process; each process keeps a
    scale of its own.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        workers, process_group, mesh: who takes part, said in one of three ways: workers, for
            several in a process; a process group; a mesh of one dimension (``mesh["replicate"]``).
            By default the processes of the default process group.
        dense_group: processes (of a node, say) that are one worker together: they average their
            gradients in ``dense_wire``, and one of them exchanges messages for all. Then
            process_group or mesh is of the processes that have the same place in other nodes.
            This is another method than a vote of all processes, as nodes are the voters (fewer,
            with less noise in their gradients), and better where a node's own links are so much
            faster than those between nodes that a mean costs less than the bytes it saves.
        dense_wire: bf16, or float32.
        seed: of all random draws of the method (the same on every process).
        overlap: let messages leave during the (last virtual worker's) backward pass, bucket by
            bucket, each as soon as its gradients and the bucket before it are there; give
            ``bucket_cap_mb`` too. Then what changes gradients between ``backward()`` and
            ``step()``, clipping say, comes too late and is refused, and all but the last of several
            backward passes per step must run in :meth:`no_sync`. The result is the same to the bit
            (for equal buckets, where a method draws random numbers). Over NCCL beside FSDP2 two
            communicators are then in use at once, which NCCL allows as long as the kernels of both
            fit on the GPU.
        bucket_cap_mb: cut the parameters, last ones first, into buckets of at most so many MB of
            float32 (as DistributedDataParallel's), smaller ones first and towards the end. None:
            one bucket a group. ``auto``: 5, and in proportion to n beyond 8 workers, so that a
            slice, and what a message about it costs, stays as large.
        nonfinite: what to do about a parameter whose gradient's norm is NaN or infinite. ``stop``
            raises TrainingFailed on all workers before the parameters of that bucket are updated
            (state may hold the gradient by then: resume from a checkpoint only); ``skip`` treats it
            as a parameter without a gradient there, in that step; None sends it as it is. With
            ``overlap`` on a GPU, ``skip`` makes the backward pass wait for the norms of each
            bucket; nothing else does.

    Attributes:
        flag, flagged: a bit for the loop's own use. Set ``flag`` and it travels with the next
            messages; after a step in which any process whose workers take part had it set,
            ``flagged`` is true on all. (Of FSDP's processes, on all that hold the same shards.)
        skipped: steps of local workers in which a gradient was skipped.

    Raises:
        TrainingFailed: if processes were given other parameters or settings.
        TypeError: for parameters that are not real floating-point numbers.
        RuntimeError: for parameters of a DistributedDataParallel.

    Subclasses fill in the method: the names of their state, the exchange, what a worker sends and
    what is done with the answer. They set their attributes before they call this constructor, which
    makes the exchanges; all public ones must be equal on all processes.
    """

    # a residual that was sent cannot be taken back: such methods count missing gradients as zero
    skips_missing: ClassVar[bool] = True

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None  # torch.amp.GradScaler sets it, and found_inf

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        workers: Workers | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        dense_group: dist.ProcessGroup | None = None,
        dense_wire: DenseWire = "bf16",
        seed: int = 0,
        overlap: bool = False,
        bucket_cap_mb: Positive | Literal["auto"] | None = None,
        nonfinite: Nonfinite | None = None,
    ):
        check_hyperparameters(type(self), defaults)
        given = voters(workers, process_group, mesh)
        self._met_nobody = not (dist.is_initialized() or workers or process_group or mesh)
        params = params if isinstance(params, Tensor) else [*map(_listed, params)]
        check_gpus(given, _device_of(params))
        check_spread(given)
        self.dense_processes = 1 if dense_group is None else dist.get_world_size(dense_group)
        if bucket_cap_mb == "auto":
            bucket_cap_mb = BUCKET_MB * max(1.0, given.count / BUCKET_WORKERS)
        self.seed, self.overlap, self.bucket_cap_mb = seed, overlap, bucket_cap_mb
        self.nonfinite, self.dense_wire = nonfinite, dense_wire
        check_alike(given, {"settings": self._settings()})
        # others may talk during the backward pass
        own = given.with_own_group() if overlap else given
        self.node = None
        if dense_group is not None:
            check_gpus(Workers.current(group=dense_group), _device_of(params))
            self.node = Node(dense_group, dense_wire, given, overlap)
            self.node.check_alike({"settings": self._settings()})
        self.flag = self.flagged = False
        self.skipped = 0
        self._thread = ExchangeThread(overlap)
        self._collected: set[int] = set()
        self._sent = 0  # buckets whose messages have left
        self._stepped = self._failed = False
        self._trained: int | None = None  # parameters in this step, once they are counted
        self._in_backward = False  # or in what a failed pass has left
        self._synchronising = True
        self._ready = threading.RLock()  # autograd has a thread for every device
        self._skipping: set[int] = set()  # workers that skip a gradient in this step
        self._hooks: list[RemovableHandle] = []
        close = weakref.finalize(self, _close, self._thread, self._hooks, own, self.node)
        close.atexit = False  # pyrefly: ignore[missing-attribute] - it is a property
        super().__init__(params, defaults, Channel(own), bucket_cap_mb)

    # ------------------------------------------------------------------ what a method fills in

    @property
    @abstractmethod
    def paper_bits(self) -> tuple[float, float]:
        """Bits per parameter and step, worker to server and back, as the papers count them."""

    @abstractmethod
    def encode(self, bucket: Bucket, local: int) -> None:
        """Write a local worker's message from its gradients and its own state."""

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """Apply the answer of ``bucket.exchange`` to ``bucket.params``."""

    def after_step(self, bucket: Bucket) -> None:
        """Do what workers do together after all updates (averaging momenta, say)."""

    def host(self, local: int | None) -> None:
        """Put the parameters of a local worker into the model; None: those that all share.

        Only where workers move on their own between exchanges is there any difference.
        """

    def end_round(self) -> None:
        """Let the next step exchange messages, if there are steps that do not."""

    def prepare(self) -> None:
        """Compile what the first step needs, so that processes forked later inherit it."""

    def _rehearse(self) -> None:
        """Take a step with a parameter of its own, for :meth:`prepare`."""
        values = torch.nn.Parameter(torch.zeros(64))
        bucket = Bucket(0, [values], [""], self.param_groups[0])
        bucket.allocate(self.make_exchange(bucket), self)
        for local in range(self.workers.local):
            self.encode(bucket, local)
        bucket.exchange.run(0)
        self.update(bucket)

    # ------------------------------------------------------------------ a step

    def collect(self, local: int) -> None:
        """Take the gradients of local worker ``local`` (0 to ``workers.local`` - 1).

        With ``Workers.current(local=4)`` four workers share a process, each with its own data::

            optimizer = DLion(model.parameters(), workers=Workers.current(local=4))
            for local, batch in enumerate(batches):
                loss_of(batch).backward()
                optimizer.collect(local)
            optimizer.step()

        Raises:
            RuntimeError: if they were taken before in this step, or it takes no part in it.
        """
        if local not in self.channel.local_participants:
            raise RuntimeError(f"virtual worker {local} does not take part in this step")
        if local in self._collected:
            raise RuntimeError(f"virtual worker {local} was collected twice in one step")
        self._encode_unsent(local)
        super().zero_grad()

    def look_at_gradients(self, local: int) -> None:
        """Do what ``nonfinite`` says about gradients that move a worker before it sends anything.

        What is sent is looked at in any case.

        Raises:
            TrainingFailed: if one is not finite and that is to end training.
        """
        self._look_at(self.buckets, local)
        self._refuse_broken(self.buckets, local)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange messages and update the parameters, identically on every worker.

        All processes must call it equally often. Returns the loss of ``closure``, if given.

        Raises:
            RuntimeError: with several virtual workers, if :meth:`collect` was not called for each;
                if gradients were changed after their messages had left.
            TrainingFailed: if another process is in another step, or has ended.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._stepped:
            check_bare(self.params)
            if self._met_nobody and dist.is_initialized() and dist.get_world_size() > 1:
                raise RuntimeError(
                    "the optimizer was made before the process group, so each process would train"
                    " alone: call init_process_group() first"
                )
        self._check_groups()
        if self._overflowed():
            return loss
        local = self.channel.local_participants
        if not local:
            self._include_unfrozen()  # the others do so when they encode
        elif self._collected == set(local[:-1]):
            self._encode_unsent(local[-1])
        if self._collected != set(local):
            missing = sorted(set(local) - self._collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        with self._whole():
            self._exchange_and_update()
        self._end_step()
        return loss

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Remember whether what it runs fails: half a step can neither go on nor be taken back."""
        if self._failed:
            raise RuntimeError(
                "an earlier step failed half-way, when state had moved: give this optimizer a"
                " checkpoint (load_state_dict), or make another"
            )
        self._failed = True
        yield
        self._failed = False

    def _abandon_step(self) -> None:
        self._thread.abandon()
        self._failed = self._in_backward = False
        self._collected.clear()
        self._skipping.clear()
        self._sent, self._trained = 0, None
        for bucket in self.buckets:
            bucket.flight = InFlight()

    def _exchange_and_update(self) -> None:
        """Let all messages leave, wait for the answers and apply them.

        A GPU's host waits once for the headers of all buckets. On a CPU, where the exchanges of
        later buckets go on meanwhile, each bucket is updated as soon as its answer is there.
        """
        for bucket in self.buckets[self._sent :]:
            self._send(bucket)
        at_once = any(bucket.device.type != "cpu" for bucket in self.buckets)
        for batch in [self.buckets] if at_once else [[bucket] for bucket in self.buckets]:
            with self.channel.timer("wait"):
                self._wait(batch)
            for bucket in batch:
                self._update(bucket)
        for bucket in self.buckets:
            self.after_step(bucket)

    def _update(self, bucket: Bucket) -> None:
        bucket.adopt()
        flats = (bucket.params, *bucket.shared.values())
        kept = bucket.untouched(bucket.flight.present, *flats)
        with self.channel.timer("apply"), kept:
            self.update(bucket)
        bucket.write_back()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With ``overlap``: backward passes in here only accumulate gradients.

        All but the last of several backward passes in a step run in it::

            optimizer = DLion(model.parameters(), overlap=True, bucket_cap_mb=5)
            *first, last = batches
            with optimizer.no_sync():
                for batch in first:
                    loss_of(batch).backward()
            loss_of(last).backward()  # messages leave during this one
            optimizer.step()
            optimizer.zero_grad()
        """
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``overlap`` it also makes another try of a backward pass possible.

        What had left of a pass that raised an exception stays sent: its gradients count for these
        buckets.

        Raises:
            RuntimeError: if messages of a pass that went well have left; step() has to follow then.
        """
        if self._sent and not self._in_backward and not self._failed:
            raise RuntimeError(
                "zero_grad() after a backward pass whose messages have left, before step(): call"
                " step(), or, where a pass is not to count (through another model's parameters, of"
                " a batch to be skipped), run it in `with optimizer.no_sync():`, freeze them with"
                " requires_grad_(False), or create the optimizer with overlap=False"
            )
        super().zero_grad(set_to_none)
        self._in_backward = False
        for bucket in self.buckets:
            bucket.flight.waiting = None
            bucket.flight.restarted = bucket.flight.sent

    def set_participants(self, workers: Sequence[int] | None) -> None:
        """Say which workers take part from the next step on, ascending; None: all.

        Absent workers send nothing and keep their state; they still receive the update and still
        combine the slice they own. (They also send 4 bytes a parameter tensor under TernGrad, and
        a byte under DLionADM in the first step.) They are not to be collected. All processes must
        name the same workers::

            optimizer = DLion(model.parameters(), workers=Workers.current(local=4))
            optimizer.set_participants([0, 2])
            for local in (0, 2):
                loss_of(batches[local]).backward()
                optimizer.collect(local)
            optimizer.step()

        Raises:
            ValueError: if there are none, or unknown ones.
            RuntimeError: in the middle of a step.
        """
        known = None if workers is None else sorted(set(workers))
        if known is not None and not (known and known[0] >= 0 and known[-1] < self.workers.count):
            raise ValueError(
                f"set_participants({list(workers or ())}): give at least one of the"
                f" {self.workers.count} workers"
            )
        if self._collected or self._sent:
            raise RuntimeError("set_participants() in the middle of a step")
        self.channel.set_participants(known)

    def _encode_unsent(self, local: int) -> None:
        """Encode a local worker's messages of all buckets that have not left yet."""
        if self.node is not None:
            self._thread.finish()  # it writes the mean gradients
        for bucket in self.buckets[: self._sent]:
            bucket.check_unchanged()
        if not self._collected:
            self._include_unfrozen()
        self._collected.add(local)
        with self._whole():
            self._encode(self.buckets[self._sent :], local)

    @torch.no_grad()
    def _gradient_is_ready(self, bucket: Bucket, _: Tensor) -> None:
        """After a gradient has been accumulated: send what is complete, in the buckets' order."""
        with self._ready:
            self._note_ready(bucket)

    def _note_ready(self, bucket: Bucket) -> None:
        local, flight = self.channel.local_participants, bucket.flight
        if not local or not self._synchronising or self._collected - {local[-1]} != set(local[:-1]):
            return
        if flight.sent and flight.restarted:
            return
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_went_well)
        if flight.waiting is None:
            flight.waiting = sum(slot.tensor.requires_grad for slot in bucket.slots)
        flight.waiting -= 1
        if flight.waiting < 0:
            raise RuntimeError(
                "a second backward pass in one step, after messages have left: run all but the last"
                " backward pass of a step in `with optimizer.no_sync():`, call zero_grad() first if"
                " it is another try, give checkpoint() use_reentrant=False where a layer runs"
                " twice, or create the optimizer with overlap=False"
            )
        while self._sent < len(self.buckets) and self.buckets[self._sent].flight.waiting == 0:
            complete = self.buckets[self._sent]
            with self._whole():
                self._encode([complete], local[-1])
                if complete.flight.prepare is None:
                    complete.note_gradients()
                self._send(complete)

    def _backward_went_well(self) -> None:
        self._in_backward = False

    @torch.no_grad()
    def _encode(self, buckets: Sequence[Bucket], local: int) -> None:
        """Look at a local worker's gradients and write its messages about buckets.

        Where a node averages gradients, and exchanges overlap, the exchange's thread does so: it
        then starts all collectives, and communicators never meet in two orders.
        """
        self._look_at(buckets, local)
        for bucket in buckets:
            if self.node is None or not self.overlap:
                self._encode_now(bucket, local, self.flag)
            else:
                bucket.flight.prepare = partial(self._encode_late, bucket, local, self.flag)

    def _encode_now(self, bucket: Bucket, local: int, flag: bool) -> None:
        if self.node is not None:
            flag = self.node.average(bucket, self._header(bucket, bucket.present(), flag))
        self._write_message(bucket, local, flag)

    def _encode_late(self, bucket: Bucket, local: int, flag: bool) -> None:
        self._encode_now(bucket, local, flag)
        bucket.note_gradients()

    def _header(self, bucket: Bucket, present: list[bool], flag: bool) -> Tensor:
        if self._trained is None:
            self._trained = self._count_trained()
        return bucket.make_header(present, self._trained, flag)

    def _write_message(self, bucket: Bucket, local: int, flag: bool) -> None:
        """Write a local worker's message about a bucket, and its header."""
        present = bucket.present()
        if not self.skips_missing:
            present = [slot.tensor.requires_grad for slot in bucket.slots]
        kept = bucket.untouched(present, *(rows[local] for rows in bucket.own.values()))
        with self.channel.timer("encode"), kept:
            self.encode(bucket, local)
        bucket.write_header(local, self._header(bucket, present, flag))

    def _look_at(self, buckets: Sequence[Bucket], local: int) -> None:
        """Drop gradients that are not finite, or measure them for the headers."""
        if self.nonfinite is None:
            return
        for bucket in buckets:
            bucket.flight.norms[local] = bucket.norms()
        if self.nonfinite == "stop":
            return
        for bucket, norms in self._norms_of(buckets, local):
            del bucket.flight.norms[local]
            for slot, finite in zip(bucket.slots, norms.isfinite().tolist(), strict=True):
                if not finite:
                    slot.tensor.grad = None
                    self._skipping.add(local)

    def _refuse_broken(self, buckets: Sequence[Bucket], local: int) -> None:
        """Raise TrainingFailed for gradients that are not finite, if that is to end training."""
        if self.nonfinite != "stop":
            return
        for bucket, norms in self._norms_of(buckets, local):
            broken = (~norms.isfinite()).nonzero()
            if len(broken):
                bucket.refuse_gradient(int(broken[0]), f"worker {self.workers.ids[local]}")

    @staticmethod
    def _norms_of(buckets: Sequence[Bucket], local: int) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield the norms of a local worker's gradients in main memory; the host waits for them."""
        norms = download([bucket.flight.norms[local] for bucket in buckets])
        return zip(buckets, norms, strict=True)

    def _send(self, bucket: Bucket) -> None:
        """Let the messages of the next bucket leave."""
        bucket.flight.sent = True
        self._sent += 1
        self._thread.submit(bucket)

    def _wait(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the exchanges of buckets, and read the headers of their messages."""
        try:
            self._thread.wait(buckets)
            headers = download([bucket.exchange.headers for bucket in buckets])
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise RuntimeError(
                f"the exchange of step {buckets[0].step + 1} broke off ({error}): another process"
                " has ended, hangs, or called step() less often than this one"
            ) from error
        for bucket, rows in zip(buckets, headers, strict=True):
            bucket.read_headers(rows)

    def _end_step(self) -> None:
        self.flagged = any(bucket.flight.flag for bucket in self.buckets)
        if any(bucket.flight.present for bucket in self.buckets):  # messages have travelled
            self.channel.settle(any(bucket.flight.slow for bucket in self.buckets))
        self.skipped += len(self._skipping)
        self._skipping.clear()
        self._collected.clear()
        self._sent = 0
        self._stepped, self._in_backward, self._trained = True, False, None
        for group in self.param_groups:
            group["steps"] += 1
        for bucket in self.buckets:
            bucket.flight = InFlight()

    def _overflowed(self) -> bool:
        """Whether a GradScaler found an overflow on any worker; if not, unscale the gradients."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if self.overlap or self.workers.local > 1:
            raise RuntimeError(
                "under a GradScaler messages must not be made of scaled gradients: create the"
                " optimizer with overlap=False and one worker a process"
            )
        mine = found.view(1) != 0
        if self.node is not None:
            mine = self.node.any(mine)
        if self.channel.gather(mine[None]).any():
            return True
        if self.grad_scale is not None:
            factor = self.grad_scale.double().reciprocal().float()
            grads = [tensor.grad for tensor in self.params if tensor.grad is not None]
            for device in {grad.device for grad in grads}:
                here = [grad for grad in grads if grad.device == device]
                torch._foreach_mul_(here, factor.to(device))
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; all processes add the same group, between two steps.

        Raises:
            RuntimeError: in the middle of a step.
            TrainingFailed: if processes add different ones.
        """
        if self._collected or self._sent:
            raise RuntimeError("add_param_group() in the middle of a step: add it after step()")
        super().add_param_group(param_group)

    def _settings(self) -> dict[str, Any]:
        """Return the public attributes that say what this optimizer does."""
        public = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {"method": type(self).__name__, **plain_values(public)}

    def _check_alike(self, facts: dict[str, Any]) -> None:
        super()._check_alike(facts)
        if self.node is not None:
            self.node.check_alike(facts)

    def _give(self, values: Tensor) -> None:
        if self.node is not None:
            self.node.hand_out(values)
        super()._give(values)

    def _watch(self, bucket: Bucket) -> None:
        if self.node is not None:
            if bucket.sharded or not bucket.exchange.can_follow:
                what = "parameters that FSDP has sharded" if bucket.sharded else type(self).__name__
                raise ValueError(
                    f"dense_group does not go with {what}: leave it out, or use DLion, Signum,"
                    " LionCub (without weighted votes), GAdamW, GLion, GMuon or DiLoCo (of the"
                    " float32 wire) on a plain model"
                )
            bucket.run_led = self.node.run
        if self.overlap:
            ready = partial(_call, weakref.WeakMethod(self._gradient_is_ready), bucket)
            tensors = (slot.tensor for slot in bucket.slots)
            self._hooks += [tensor.register_post_accumulate_grad_hook(ready) for tensor in tensors]


def _listed(given: Any) -> Any:
    """Let a parameter group have a list of parameters, which can be read twice, as torch does."""
    if isinstance(given, dict) and isinstance(given.get("params"), Iterator):
        given["params"] = list(given["params"])
    return given


def _device_of(params: Iterable[Any]) -> torch.device:
    """Return the device of the first parameter, in whatever form parameters are given."""
    for given in [params] if isinstance(params, Tensor) else params:
        if isinstance(given, Tensor):
            return given.device
        if isinstance(given, dict | tuple):
            inside = given.get("params", ()) if isinstance(given, dict) else given
            return _device_of((inside,) if isinstance(inside, Tensor) else inside)
    return torch.device("cpu")


def _call(method: weakref.WeakMethod, bucket: Bucket, tensor: Tensor) -> None:
    """Call the method of an optimizer, if there still is one."""
    alive = method()
    if alive is not None:
        alive(bucket, tensor)


def _close(
    thread: ExchangeThread, hooks: list[RemovableHandle], workers: Workers, node: Node | None
) -> None:
    """Give back the hooks, the thread and the groups of an optimizer that nobody uses any more."""
    for hook in hooks:
        hook.remove()
    if thread.close():
        workers.give_back()
        if node is not None:
            node.close()
