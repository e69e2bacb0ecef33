"""The step that every method shares: collect gradients, encode, exchange, update."""

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from dlion.engine import nonfinite, saving, uneven, worker_files
from dlion.engine.bucket import Bucket, InFlight, StateNames
from dlion.engine.checks import check_bare, check_hyperparameters, check_parameters, checked
from dlion.engine.elastic import Elastic, check_dealt
from dlion.engine.layout import Member, Members
from dlion.engine.lockstep import check_alike, check_data, check_spread, facts_about, plain_values
from dlion.engine.node import DenseWire, Node
from dlion.engine.overlap import Overlap, Work
from dlion.engine.shards import check_sharding, local_part
from dlion.exchange import Channel, Exchange, Traffic, run_together
from dlion.transfer import download
from dlion.values import Positive
from dlion.workers import Workers, check_gpus, voters

Nonfinite = Literal["stop", "skip"]
BUCKET_MB, BUCKET_WORKERS = 5.0, 8  # results/speed; with more workers buckets grow
# numbers of processes of torchrun, Open MPI, MPICH and MVAPICH
_STARTED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class Common(TypedDict, total=False):
    """Keyword arguments of every optimizer, see :class:`DistributedOptimizer`."""

    workers: Workers | None
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    manager: Any
    dense_group: dist.ProcessGroup | None
    dense_wire: DenseWire
    seed: int
    overlap: bool
    bucket_cap_mb: float | Literal["auto"] | None
    nonfinite: Nonfinite | None


class DistributedOptimizer(torch.optim.Optimizer, Joinable, ABC):
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

    Parameter groups that are given here share buckets, so a group for each layer costs no more
    exchanges than one for all; rates may differ and change. A group that is added later, and what
    is unfrozen later, has buckets of its own.

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
        workers, process_group, mesh: the participants, given in one of three ways: workers, for
            several in a process; a process group; a mesh of one dimension (``mesh["replicate"]``).
            By default the processes of the default process group.
        manager: of torchft, from :func:`dlion.join`: workers come and go during training.
            ``zero_grad()`` then begins a step: it asks who is there (``workers.rank``,
            ``workers.count``), and a new worker gets parameters, shared state and hyperparameters
            of a peer; its own momenta begin at zero. ``step()`` commits only if all have all
            answers; otherwise it changes nothing, ``committed`` is False, and the loop resumes at
            ``zero_grad()``. A learning rate schedule is to step only where ``committed`` is true.
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
            backward passes per step must run in :meth:`no_sync`. The result is bit-identical
            (for equal buckets, where a method draws random numbers). Over NCCL beside FSDP2 two
            communicators are then in use at once, which NCCL allows as long as the kernels of both
            fit on the GPU.
        bucket_cap_mb: cut the parameters, last ones first, into buckets of at most so many MB of
            float32 (as DistributedDataParallel's), smaller ones first and towards the end. None:
            one bucket, of all groups. ``auto``: 5, and in proportion to n beyond 8 workers, so that
            a slice, and what a message about it costs, stays as large.
        nonfinite: what to do about a parameter whose gradient's norm is NaN or infinite. ``stop``
            raises TrainingFailed on all workers before the parameters of that bucket are updated
            (state may hold the gradient by then: resume from a checkpoint only); ``skip`` treats it
            as a parameter without a gradient there, in that step; None sends it as it is. With
            ``overlap`` on a GPU, ``skip`` makes the backward pass wait for the norms of each
            bucket; nothing else does.

    Attributes:
        buckets: of all groups, in the order in which their messages leave.
        workers_apart: whether ``state_dict()`` leaves out what differs from worker to worker, as
            :meth:`save_workers` writes it.
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

    own_state: list[str] = []
    shared_state: list[str] = []
    counters: list[str] = []  # shared state, one number a parameter
    own_counters: list[str] = []  # a worker's state, one number a parameter
    whole_matrices: bool = False  # whether a part of a matrix will not do
    # a residual that was sent cannot be taken back: such methods count missing gradients as zero
    skips_missing: ClassVar[bool] = True

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None  # torch.amp.GradScaler sets both
    found_inf: Tensor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # pyrefly: ignore[bad-assignment]

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        workers: Workers | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        manager: Any = None,
        dense_group: dist.ProcessGroup | None = None,
        dense_wire: DenseWire = "bf16",
        seed: int = 0,
        overlap: bool = False,
        bucket_cap_mb: Positive | Literal["auto"] | None = None,
        nonfinite: Nonfinite | None = None,
    ):
        Joinable.__init__(self)
        check_hyperparameters(type(self), defaults)
        self.workers_apart = False
        self._own_of = self._awaits = None  # which save: own state was read, or is still to be
        self._files = saving.Files()
        given = voters(workers, process_group, mesh)
        if manager is not None:
            given = self._alone(given, workers or process_group or mesh or dense_group)
        self._met_nobody = not (
            dist.is_initialized() or workers or process_group or mesh or manager
        )
        params = params if isinstance(params, Tensor) else [*map(_listed, params)]
        check_gpus(given, _device_of(params))
        check_spread(given)
        self._peers = given
        self.dense_processes = 1 if dense_group is None else dist.get_world_size(dense_group)
        if bucket_cap_mb == "auto":
            bucket_cap_mb = BUCKET_MB * max(1.0, given.count / BUCKET_WORKERS)
        self.seed, self.overlap, self.bucket_cap_mb = seed, overlap, bucket_cap_mb
        self.nonfinite, self.dense_wire = nonfinite, dense_wire
        settings = self._settings()
        check_alike(given, {"settings": settings})
        self.workers = given.with_own_group() if overlap else given  # others talk meanwhile
        self.channel, self.node = Channel(self.workers), None
        self._elastic: Elastic | None = None
        if dense_group is not None:
            check_gpus(Workers.current(group=dense_group), _device_of(params))
            self.node = Node(dense_group, dense_wire, given, overlap)
            self.node.check_alike({"settings": settings})
        self.buckets: list[Bucket] = []
        self.flag = self.flagged = False
        self.skipped = 0
        self._members = Members(bucket_cap_mb, self.kind)
        self._overlap = None
        if overlap:
            self._overlap = Overlap(self.buckets, self._encode_last, self._is_last_pass)
        self._collected: set[int] = set()
        self._late: dict[Bucket, Work] = {}
        self._stepped = self._failed = self._constructed = False
        self._skipping: set[int] = set()  # workers that leave out a gradient in this step
        close = weakref.finalize(self, _close, self._overlap, self.workers, self.node)
        close.atexit = False  # pyrefly: ignore[missing-attribute] - it is a property
        self._hyperparameters = {**defaults, "steps": 0}  # torch adds to its own
        super().__init__(params, {**self._hyperparameters})
        self._constructed = True
        self.register_state_dict_post_hook(_put_state)
        self._add_buckets(self.param_groups)
        self._hand_out(self.param_groups, self.buckets)
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step
        if manager is not None:
            self._check_elastic()
            facts = {"settings": settings, **facts_about(self.param_groups)}
            self._elastic = Elastic(manager, self, facts)

    def _alone(self, given: Workers, named: Any) -> Workers:
        """Return this process alone: a manager names its peers at every step."""
        if named is not None:
            raise ValueError(
                "manager= names the participants: give no workers, process_group, mesh or"
                " dense_group"
            )
        return Workers()

    def _check_elastic(self) -> None:
        """Refuse settings that hold for one number of workers alone, or whose state would move."""

    @property
    def committed(self) -> bool:
        """Whether the latest step has moved the parameters; False only with ``manager``."""
        return self._elastic is None or self._elastic.committed

    # ------------------------------------------------------------------ what a method fills in

    @property
    @abstractmethod
    def paper_bits(self) -> tuple[float, float]:
        """Bits per parameter and step, worker to server and back, as the papers count them."""

    @abstractmethod
    def make_exchange(self, bucket: Bucket) -> Exchange:
        """Make the exchange for a bucket of ``bucket.numel`` parameters."""

    @abstractmethod
    def encode(self, bucket: Bucket, local: int) -> None:
        """Write a local worker's message from its gradients and its own state."""

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """Apply the answer of ``bucket.exchange`` to ``bucket.params``."""

    def after_step(self, bucket: Bucket) -> None:
        """Run the collective work after all updates (averaging momenta, say)."""

    def state_names(self, bucket: Bucket) -> StateNames:
        """Return the names of the state of a bucket's parameters."""
        return self

    @staticmethod
    def kind(group: dict[str, Any]) -> Hashable:
        """Return the settings that parameter groups must share to share buckets."""

    def begin(self, bucket: Bucket) -> None:
        """Start from the parameters that are in a bucket: it is new, or was given others."""

    def host(self, local: int | None) -> None:
        """Put the parameters of a local worker into the model; None: those that all share.

        Only where workers move on their own between exchanges is there any difference.
        """

    def end_round(self) -> None:
        """Let the next step exchange messages, if there are steps that do not."""

    def prepare(self) -> None:
        """Compile the kernels of the first step, so that processes forked later inherit them."""

    def _rehearse(self) -> None:
        """Take a step with a parameter of its own, for :meth:`prepare`."""
        values = torch.nn.Parameter(torch.zeros(8, 8))
        bucket = Bucket(0, [Member(values, "", self.param_groups[0])])
        bucket.allocate(self.make_exchange(bucket), self)
        for local in range(self.workers.local):
            self.encode(bucket, local)
        bucket.exchange.run(0)
        bucket.flight.present = [True]
        self.update(bucket)

    # ------------------------------------------------------------------ parameters

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups, frozen ones too."""
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; all processes add the same group, between two steps.

        Raises:
            RuntimeError: in the middle of a step.
            TrainingFailed: if processes add different ones.
        """
        if self._in_step:
            raise RuntimeError("add_param_group() in the middle of a step: add it after step()")
        super().add_param_group(param_group)
        group, first, before = self.param_groups[-1], len(self.buckets), copy.copy(self._members)
        try:
            check_hyperparameters(type(self), group)
            check_sharding(self.params, self.workers, type(self).__name__, self.whole_matrices)
            check_parameters([tensor for tensor in group["params"] if tensor.requires_grad])
            self._members.add(group)
            if self._constructed:  # before, groups are waited for that may share buckets
                self._add_buckets([group])
        except Exception:
            self.param_groups.pop()
            self._members = before
            for tensor in group["params"]:
                self.state.pop(tensor, None)
            del self.buckets[first:]
            raise
        if self._constructed:
            self._hand_out([group], self.buckets[first:])

    def _add_buckets(self, groups: list[dict[str, Any]]) -> None:
        """Make buckets for the trained parameters of groups."""
        for members in self._members.buckets(groups):
            self._add_bucket(members)

    def _add_bucket(self, members: list[Member]) -> None:
        bucket = Bucket(len(self.buckets), members)
        bucket.allocate(self.make_exchange(bucket), self.state_names(bucket))
        if self.node is not None:
            self.node.lead(bucket, type(self).__name__)
        if self._elastic is not None:
            check_dealt(bucket, type(self).__name__)
        self.buckets.append(bucket)
        saving.publish(bucket, self.state, self._saved_workers)
        self.begin(bucket)
        if self._overlap is not None:
            self._overlap.watch(bucket)

    def _include_unfrozen(self) -> None:
        """Make buckets for parameters that were unfrozen since the last step."""
        for members in self._members.unfrozen(self.param_groups):
            self._add_bucket(members)

    def _hand_out(self, groups: list[dict[str, Any]], buckets: list[Bucket]) -> None:
        """Check that all processes were given the same parameters, and give them process 0's."""
        params = [tensor for group in groups for tensor in group["params"]]
        facts = facts_about(groups)
        check_alike(self.workers, facts)
        if self.node is not None:
            self.node.check_alike(facts)
        check_bare(params)
        for bucket in buckets:
            self._give(bucket.params)
            bucket.write_back()
            self.begin(bucket)
        for tensor in params if self.workers.processes > 1 else ():
            if not tensor.requires_grad:
                here = local_part(tensor)
                values = here.contiguous()
                self._give(values.flatten().view(torch.uint8))  # gloo does not know every dtype
                here.copy_(values)

    def _give(self, values: Tensor) -> None:
        """Give all processes the values of process 0."""
        if self.node is not None:
            self.node.hand_out(values)
        self.channel.broadcast(values)

    def _settings(self) -> dict[str, Any]:
        """Return the public attributes that describe this optimizer."""
        public = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {"method": type(self).__name__, **plain_values(public)}

    # ------------------------------------------------------------------ a step

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
        if self._in_step:
            raise RuntimeError("set_participants() in the middle of a step")
        if self._elastic is not None:
            raise RuntimeError("set_participants() with manager=, which names the participants")
        if self._join_config.enable:
            raise RuntimeError("set_participants() inside torch's Join, which names them")
        self.channel.set_participants(known)

    def no_sync(self) -> AbstractContextManager[None]:
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
        return nullcontext() if self._overlap is None else self._overlap.no_sync()

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``overlap`` it also makes another try of a backward pass possible.

        What had left of a pass that raised an exception stays sent: its gradients count for these
        buckets. With ``manager`` it begins the next step.

        Raises:
            RuntimeError: if messages of a pass that went well have left; step() has to follow then.
            TrainingFailed: with ``manager``, if the lighthouse does not answer.
        """
        if self._overlap is not None and not self._failed:
            self._overlap.check_restart()
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.restart()
        if self._elastic is not None:
            self._elastic.begin()

    @torch._disable_dynamo
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

    @torch._disable_dynamo  # a graph break: what is compiled around it stays compiled
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
        if self._join_config.enable:
            uneven.meet(self, here=True)
        if not self._stepped:
            self._check_first_step()
        if self._awaits is not None:
            raise RuntimeError(
                "the loaded state lacks the workers' own state, which is in files beside the"
                " checkpoint: call load_workers(FOLDER) on every process, or use the integration of"
                " dlion.frameworks that saved it"
            )
        self._members.check_unedited(self.param_groups)
        for bucket in self.buckets:
            saving.adopt(bucket, self.state)
        if getattr(self, "found_inf", None) is not None and self._overflowed():
            return loss
        local = self.channel.local_participants
        if not local:
            self._include_unfrozen()  # the others do so when they encode
        elif self._collected == set(local[:-1]):
            self._encode_unsent(local[-1])
        if self._collected != set(local):
            missing = sorted(set(local) - self._collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        with self._halfway():
            went_well = self._exchange_and_update()
        if went_well:
            self._end_step()
        else:
            self._forget_step()
        return loss

    def join_hook(self, **kwargs: Any) -> uneven.Shadow:
        """Let ``torch.distributed.algorithms.join.Join`` train on uneven numbers of batches.

        A worker that has no batch left takes no part: it sends nothing, keeps its state, and
        follows updates and hyperparameters of the others::

            with Join([optimizer]):
                for batch in batches:  # fewer on some processes
                    loss_of(batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        Raises:
            RuntimeError: with ``overlap``, virtual workers, ``dense_group`` or ``manager``; after
                :meth:`set_participants`.
        """
        uneven.check_possible(self)
        return uneven.Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of ``Join``."""
        return self.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of the workers, for ``Join``."""
        return self.workers.group or dist.group.WORLD

    @property
    def _in_step(self) -> bool:
        """Whether messages of the next step have been made."""
        return bool(self._collected or (self._overlap is not None and self._overlap.sent))

    def _is_last_pass(self) -> bool:
        """Whether gradients of the last local participant are accumulated, for :class:`Overlap`."""
        local = self.channel.local_participants
        return bool(local) and self._collected - {local[-1]} == set(local[:-1])

    def _check_first_step(self) -> None:
        check_bare(self.params)
        if self._peers.processes > 1 and self._peers.local == 1:
            check_data(self.params, self._peers)
        if not self._met_nobody:
            return
        started = {os.environ.get(name, "1") for name in _STARTED}
        if dist.get_world_size() > 1 if dist.is_initialized() else started - {"", "1"}:
            raise RuntimeError(
                "the optimizer was made before the process group, so each process would train"
                " alone: call init_process_group() first"
            )

    @contextmanager
    def _halfway(self) -> Iterator[None]:
        """If the body raises, refuse further steps: the state is half updated."""
        if self._failed:
            raise RuntimeError(
                "an earlier step failed half-way, when state had moved: give this optimizer a"
                " checkpoint (load_state_dict), or make another"
            )
        self._failed = True
        yield
        self._failed = False

    def _encode_unsent(self, local: int) -> None:
        """Encode a local worker's messages of all buckets that have not left yet."""
        sent = 0
        if self._overlap is not None:
            if self.node is not None:
                self._overlap.finish()  # it writes the mean gradients
            self._overlap.check_unchanged()
            sent = self._overlap.sent
        if not self._collected:
            self._include_unfrozen()
        self._collected.add(local)
        with self._halfway():
            self._encode(self.buckets[sent:], local)

    @torch.no_grad()
    def _encode(self, buckets: Sequence[Bucket], local: int) -> None:
        """Look at a local worker's gradients and write its messages about buckets.

        With a node and overlap the exchange's thread does so: it then starts all collectives, and
        communicators never meet in two orders.
        """
        if self._elastic is not None:
            self._elastic.require_open()
        self._look_at(buckets, local)
        for bucket in buckets:
            if self.node is None:
                self._write_message(bucket, local, self.flag)
            elif self._overlap is None:
                self._average(bucket, local, self.flag)
            else:
                self._late[bucket] = partial(self._average, bucket, local, self.flag)

    def _encode_last(self, bucket: Bucket) -> Work | None:
        """Write the last local worker's message, during its backward pass."""
        with self._halfway():
            self._encode([bucket], self.channel.local_participants[-1])
        return self._late.pop(bucket, None)

    def _look_at(self, buckets: Sequence[Bucket], local: int) -> None:
        """Leave out gradients that are not finite, or measure all for the headers."""
        if self.nonfinite == "stop":
            nonfinite.measure(buckets, local)
        elif self.nonfinite == "skip" and nonfinite.leave_out(buckets):
            self._skipping.add(local)

    def _average(self, bucket: Bucket, local: int, flag: bool) -> None:
        """Let the node average its gradients, and write the message about their mean."""
        assert self.node is not None
        header = self._header(bucket, bucket.present(), flag)
        self._write_message(bucket, local, self.node.average(bucket, header))

    def _write_message(self, bucket: Bucket, local: int, flag: bool) -> None:
        """Write a local worker's message about a bucket, and its header."""
        if self._elastic is not None:
            self._elastic.keep(bucket)
        present = bucket.present() if self.skips_missing else bucket.trained()
        kept = bucket.untouched(present, *(rows[local] for rows in bucket.own.values()))
        with self.channel.timer("encode"), kept:
            self.encode(bucket, local)
        bucket.write_header(local, self._header(bucket, present, flag))

    def _header(self, bucket: Bucket, present: list[bool], flag: bool) -> Tensor:
        return bucket.make_header(present, self._members.trained, flag, self._files.here)

    def _exchange_and_update(self) -> bool:
        """Let all messages leave, wait for the answers and apply them; return whether it did.

        A GPU's host waits once for the headers of all buckets. On a CPU, where the exchanges of
        later buckets continue meanwhile, each bucket is updated as soon as its answer is there.
        """
        if self._overlap is not None:
            for bucket in self.buckets[self._overlap.sent :]:
                self._overlap.send(bucket, self._late.pop(bucket, None))
        if self._elastic is not None:
            if self._elastic.commit():
                self._apply(self.buckets)
            return self._elastic.committed
        at_once = any(bucket.device.type != "cpu" for bucket in self.buckets)
        for batch in [self.buckets] if at_once else [[bucket] for bucket in self.buckets]:
            with self.channel.timer("wait"):
                self._wait(batch)
            self._apply(batch)
        for bucket in self.buckets:
            self.after_step(bucket)
        return True

    def _apply(self, buckets: Sequence[Bucket]) -> None:
        """Update buckets with their answers."""
        for bucket in buckets:
            bucket.adopt()
            flats = (bucket.params, *bucket.shared.values())
            kept = bucket.untouched(bucket.flight.present, *flats)
            with self.channel.timer("apply"), kept:
                self.update(bucket)
            bucket.write_back()

    def _wait(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the exchanges of buckets, and read the headers of their messages."""
        try:
            if self._overlap is None:
                run_together([bucket.stages() for bucket in buckets])
            else:
                self._overlap.wait(buckets)
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
        flights = [bucket.flight for bucket in self.buckets]
        self.flagged = any(flight.flag for flight in flights)
        if any(flight.present for flight in flights):  # messages have travelled
            self.channel.settle(any(flight.slow for flight in flights))
            self._files.compare(flights[0].saved)
        self.skipped += len(self._skipping)
        self._stepped = True
        self._forget_step()
        for group in self.param_groups:
            group["steps"] += 1

    def _forget_step(self) -> None:
        """Make ready for the next step."""
        if self._overlap is not None:
            self._overlap.end_step()
        self._skipping.clear()
        self._collected.clear()
        self._late.clear()
        for bucket in self.buckets:
            bucket.flight = InFlight()

    def _overflowed(self) -> bool:
        """Whether a GradScaler found an overflow on any worker; if not, unscale the gradients."""
        if self._elastic is not None:
            raise RuntimeError("a GradScaler does not work with manager=: train in bfloat16")
        if self.overlap or self.workers.local > 1:
            raise RuntimeError(
                "under a GradScaler messages must not be made of scaled gradients: create the"
                " optimizer with overlap=False and one worker a process"
            )
        mine = self.found_inf.view(1) != 0
        if self.node is not None:
            mine = self.node.any(mine)
        if self.channel.gather(mine[None]).any():
            return True
        if self.grad_scale is not None:
            grads = [tensor.grad for tensor in self.params if tensor.grad is not None]
            nonfinite.unscale(grads, self.grad_scale)
        return False

    # ------------------------------------------------------------------ state

    def worker_state(self, local: int) -> dict[str, Tensor]:
        """Return views of one local worker's own state by name: the same for every spread."""
        views = {}
        for bucket in self.buckets:
            for name, rows in (bucket.own | bucket.own_counters).items():
                views[f"{bucket.index}.{name}"] = rows[local]
            for name, rows in bucket.exchange.state.items():
                views[f"{bucket.index}.exchange.{name}"] = rows[local]
        return views

    def common_state(self) -> dict[str, Tensor]:
        """Parameters and state that are equal on all workers, as views by name."""
        views = {}
        for bucket in self.buckets:
            views[f"{bucket.index}.parameters"] = bucket.params
            for name, values in (bucket.shared | bucket.counters).items():
                views[f"{bucket.index}.{name}"] = values
        return views

    @property
    def state_bytes(self) -> int:
        """Bytes of state that a worker keeps beside parameters and gradients, padding included."""
        common = {k: v for k, v in self.common_state().items() if not k.endswith(".parameters")}
        return sum(tensor.nbytes for tensor in (*self.worker_state(0).values(), *common.values()))

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with a leading dimension, the workers, for per-worker state.

        With several processes, what differs from one to another is a DTensor: so
        torch.distributed.checkpoint (``get_state_dict`` and ``set_state_dict``) saves it for every
        worker and gives it back to that worker, in another number of processes too. To another
        number of workers it raises CheckpointException before this optimizer hears of it: "Size
        mismatch between saved torch.Size([4, 2]) and current: torch.Size([2, 2]) for ...worker",
        where 4 workers have saved and 2 load; let processes host several, until there are as many.
        With ``torch.save``, which writes the local part, save on every rank, and import
        ``dlion.optim`` before ``torch.load``. Where FSDP has sharded the parameters, all processes
        must call this together.
        """
        return super().state_dict()

    def _put_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put the state of all buckets into what torch has packed, before others' hooks see it."""
        for bucket in self.buckets:
            saving.adopt(bucket, self.state)
        found, params = self._spread_state()[0], self.params
        state = {
            key: {**value} if isinstance(key, int) else value
            for key, value in state_dict["state"].items()
        }
        for index, param in enumerate(params):
            if param in found:
                state[index] = state.get(index, {}) | found[param]
        packed = {**state_dict, "state": state} | self._further_state()
        if self.workers_apart:
            return saving.without_own(packed, self)
        if self.own_state_is_apart and self._elastic is None:
            self._files.here |= saving.CALLED
        return packed

    def _further_state(self) -> dict[str, Any]:
        """Return the entries that are saved beside state and groups."""
        return {}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must be of the same workers.

        Raises:
            ValueError: if it is of other workers, or of other parameters or settings.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self._include_unfrozen()
        self._members.check_sizes([len(group["params"]) for group in groups])
        names = [name for group in groups for name in group["params"]]
        param_of = dict(zip(names, self.params, strict=True))
        here, flats = self._spread_state()
        apart = state_dict.get(saving.APART)
        saved, foreign = saving.sort_out(state_dict["state"], param_of, here, apart is not None)
        saving.check_groups(groups, {*self._hyperparameters})
        worker = saving.of_workers(self._saved_workers)
        for name, param in param_of.items():
            own = here.get(param, {})
            if apart is not None:
                own = {key: own[key] for key in own.keys() & saved.get(param, {}).keys()}
            saving.check_state(name, saved.get(param, {}), own, worker)
        if self._overlap is not None:
            self._overlap.finish()
        self._forget_step()
        self._failed = False
        for group, new in zip(self.param_groups, copy.deepcopy(groups), strict=True):
            kept = {key: group[key] for key in ("params", "param_names") if key in group}
            names_too = {"param_names": new["param_names"]} if "param_names" in new else {}
            group.clear()
            group.update(new | kept | names_too)
        self.state.clear()
        for bucket in self.buckets:
            saving.publish(bucket, self.state, self._saved_workers)
        saving.put_back(self.buckets, here, flats, saved)
        for key, value in foreign.items():
            if isinstance(key, torch.nn.Parameter):
                self.state[key] |= value
            else:
                self.state[key] = value
        if apart is not None and apart != self._own_of:
            self._awaits, self._own_of = apart, None
        if self._elastic is not None:
            self._elastic.resume(self.param_groups[0]["steps"])

    def _take_own(self, inner: list[Any]) -> None:
        """Go on from each worker's own state, which was just read."""

    @property
    def own_state_is_apart(self) -> bool:
        """Whether a method has state that differs from worker to worker."""
        return any(bucket.own or bucket.exchange.state for bucket in self.buckets)

    def save_workers(self, folder: str | os.PathLike[str], name: str = "optimizer") -> None:
        """Write each local worker's own state to a file of a folder; call it on every process.

        Where it is used, set ``workers_apart``: what ``state_dict()`` returns is then equal on all
        processes, so that process 0 may save it for all, as frameworks do. ``load_workers`` reads
        the files, on any number of processes that host as many workers.

        Raises:
            ValueError: if FSDP has sharded the parameters.
        """
        worker_files.save(self, Path(folder), name)

    def load_workers(self, folder: str | os.PathLike[str], name: str = "optimizer") -> None:
        """Read the files of :meth:`save_workers`, before or after ``load_state_dict``.

        Raises:
            ValueError: if a file is missing, or of another number of workers or another save.
        """
        worker_files.load(self, Path(folder), name)

    @property
    def _saved_workers(self) -> Workers:
        """Whose state is saved: with a manager each worker's by itself, as numbers change."""
        return self.workers if self._elastic is None else Workers()

    def _joined(self) -> None:
        """Start from the shared state of a peer."""

    def _spread_state(self) -> tuple[saving.States, saving.Elementwise]:
        return saving.spread_state(
            self.state,
            self.params,
            self.buckets,
            self._saved_workers,
            self.own_state,
            self._files,
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it talks to other processes:"
            " make another, and load this one's state_dict()"
        )


def _put_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    return optimizer._put_state(state_dict)


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


def _close(overlap: Overlap | None, workers: Workers, node: Node | None) -> None:
    """Release the hooks, the thread and the groups of an optimizer that is no longer used."""
    if overlap is None or overlap.close():
        workers.give_back()
        if node is not None:
            node.close()
