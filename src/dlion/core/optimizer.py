"""The optimizer that users see and methods fill in; :mod:`dlion.core.step` is its step."""

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from dlion.checks import (
    check_alone,
    check_bare,
    check_hyperparameters,
    check_names,
    check_ordered,
    check_parameters,
    check_whole,
    checked,
    listed,
)
from dlion.core import saving, state_dicts
from dlion.core.bucket import Bucket, StateNames
from dlion.core.header import plain_values
from dlion.core.layout import Member, Members
from dlion.core.step import Step
from dlion.elastic.worker import Elastic, alone, check_dealt, check_inside
from dlion.exchange import Channel, Exchange, Traffic
from dlion.extensions import nonfinite, uneven, worker_files
from dlion.extensions.dense_group import DenseWire, Node
from dlion.extensions.lockstep import (
    check_data,
    check_equal,
    check_local_workers,
    facts_about,
)
from dlion.extensions.overlap import Overlap
from dlion.extensions.shards import check_sharding, local_part
from dlion.values import Positive
from dlion.workers import Workers, check_gpus, voters

Nonfinite = Literal["stop", "skip"]
BUCKET_MB, BUCKET_WORKERS = 5.0, 8  # results/speed; with more workers buckets grow


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
    stochastic_rounding: bool


class DistributedOptimizer(torch.optim.Optimizer, Joinable, ABC):
    """A ``torch.optim.Optimizer`` whose workers exchange packed messages instead of gradients.

    It replaces both the optimizer and DistributedDataParallel: use the bare model, one process per
    worker, and the loop everybody knows::

        optimizer = DLion(model.parameters(), lr=1e-4)  # after init_process_group and model.to()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Creating it copies the parameters of process 0 to all and moves the trained ones into flat
    buffers, so they share memory with nothing else from then on. (A Parameter that is used twice
    stays one, and after ``share_memory()`` other processes see what is trained.) Gradient
    accumulation, parameter groups, LR schedulers, autocast and ``state_dict`` work as usual. The
    state differs from worker to worker: save it on every rank, not on rank 0 alone.

    Parameter groups share buckets, so a group for each layer costs no more exchanges than one for
    all; rates may differ and change. Groups that are added after a step, or after a state was
    loaded, share buckets of their own, as does what is unfrozen later.

    A process may host several virtual workers (``workers.local``): run a backward pass for each,
    with its own data, and call :meth:`collect` after each (the last may be left to ``step()``).

    A model that FSDP2 shards has replicas as workers: shard it over one dimension of a mesh, and
    let messages go along the other::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = DLion(model.parameters(), lr=1e-4, mesh=mesh["replicate"])

    FSDP then averages gradients inside a replica alone, and each process exchanges messages about
    its shards with those that hold the same. Parameters stay where FSDP keeps them; state, and a
    copy of the parameters, is of the local shards. Methods that need whole matrices (GMuon,
    SignMuon, PowerSGD, DeMo, ...) gather them inside a replica, each on one of its processes. A
    scale or a number of entries that another method takes of each tensor it takes of each shard
    (LionCub, TernGrad, DGC, the first step size of DLionADM, ...), so for these methods results
    depend on the shards. Voters are replicas here, whose gradients have less noise than those of
    single processes: that is better where links between nodes are slow, and another method than a
    vote of all processes.

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch. (Methods with
    residuals count it as zero everywhere: what they held back must still be sent.) A frozen
    parameter is neither sent nor given state; it may be unfrozen between steps. One that is frozen
    later keeps its state and its bits in the messages, and is not updated. To load a state that was
    saved after unfreezing, make the optimizer while parameters are frozen as they were at first,
    then unfreeze, then load.

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
            process_group or mesh is of the processes that have the same place in other nodes; with
            manager this is the group that ``join()`` was given.
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
            a slice, and what a message about it costs, stays as large. On a GPU, whose host each
            bucket costs a millisecond, give 100 or more.
        nonfinite: what to do about a parameter whose gradient's norm is NaN or infinite. ``stop``
            raises TrainingFailed on all workers before the parameters of that bucket are updated
            (state may hold the gradient by then: resume from a checkpoint only); ``skip`` treats it
            as a parameter without a gradient there, in that step, and warns once; None sends it as
            it is, which a sign hides: a momentum that has taken up NaN keeps it, and its parameters
            stop moving or move at random. With methods of local steps ``stop`` raises on
            the worker alone, and the others fail at the exchange that waits for it. With
            ``manager`` it always raises on the worker alone, and the others continue. With
            ``overlap`` on a GPU, ``skip`` makes the backward pass wait for the norms of each
            bucket; nothing else does.
        stochastic_rounding: round updated bfloat16 parameters up or down at random, so that the
            mean of many small steps is right. All workers draw the same. Rounding to the nearest,
            which is torch's, loses a step below 1/512 of its parameter (a warning says so); a sign
            step is as small for all. It takes no memory but float32 values of a bucket during its
            update. Parameters of other dtypes, and methods of local steps, which keep float32
            parameters, are not concerned.

    Attributes:
        accumulates: with ``overlap``, a function that says whether the backward pass at hand only
            accumulates gradients, as in :meth:`no_sync`; for frameworks, which know. None: never.
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
    whole_matrices: bool = False  # whether it gathers what FSDP2 has sharded: bucket.whole
    # a residual that was sent cannot be taken back: such methods count missing gradients as zero
    skips_missing: ClassVar[bool] = True
    moves_alone: ClassVar[bool] = False  # whether a worker moves between exchanges
    exchanges: bool = True  # whether the step at hand exchanges messages
    # collective work after all updates, such as averaging momenta
    after_step: Callable[[Sequence[Bucket], Channel], None] | None = None

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
        nonfinite: Nonfinite | None = "stop",
        stochastic_rounding: bool = False,
    ):
        Joinable.__init__(self)
        self.workers_apart = False
        self._own_of = self._awaits = None  # which save: own state was read, or is still to be
        self.files = saving.Files()
        given = voters(workers, process_group, mesh)
        if manager is not None:
            given = alone(workers or process_group or mesh, manager)
            if dense_group is not None:
                check_inside(manager, dense_group)
        self._met_nobody = not (
            dist.is_initialized() or workers or process_group or mesh or manager
        )
        check_ordered(params)
        params = params if isinstance(params, Tensor) else [*map(listed, params)]
        check_whole()
        self._device = _device_of(params)  # of which it was checked who shares it
        self._meeting = [given]
        if dense_group is not None:
            self._meeting.append(Workers.current(group=dense_group))
        for group in self._meeting:
            check_gpus(group, self._device)
        check_local_workers(given)
        self._peers = given
        self._alone = given.processes == 1 and dense_group is None and manager is None
        self.dense_processes = 1 if dense_group is None else dist.get_world_size(dense_group)
        if bucket_cap_mb == "auto":
            bucket_cap_mb = BUCKET_MB * max(1.0, given.count / BUCKET_WORKERS)
        self.seed, self.overlap, self.bucket_cap_mb = seed, overlap, bucket_cap_mb
        self.nonfinite, self.dense_wire = nonfinite, dense_wire
        self.stochastic_rounding = stochastic_rounding
        settings = self._settings()
        check_equal(given, {"settings": settings})
        self.workers = given.with_own_group() if overlap else given  # others talk meanwhile
        self.channel, self.node = Channel(self.workers), None
        if dense_group is not None:
            self.node = Node(dense_group, dense_wire, given, overlap, manager is not None)
            self.node.check_equal({"settings": settings})
        self._buckets: list[Bucket] = []
        self._waiting = False  # whether groups wait for buckets
        self._added = False  # whether a group was added since the buckets were in use
        self._arranged = False  # whether buckets are those of a state that is loaded
        self.accumulates: Callable[[], bool] | None = None
        self.flag = self.flagged = False
        self.skipped = 0
        self.members = Members(bucket_cap_mb, self.whole_matrices)
        self._step = Step(self, overlap)
        self._constructed, self._used = False, (0, 0)
        close = weakref.finalize(self, _close, self._step.overlap, self.workers, self.node)
        close.atexit = False  # pyrefly: ignore[missing-attribute] - it is a property
        self._hyperparameters = {**defaults, "steps": 0}  # torch adds to its own
        super().__init__(params, {**self._hyperparameters})
        self._constructed = True
        self.register_state_dict_post_hook(state_dicts.pack)
        self._waiting = True
        self._hand_out(self.param_groups, self.buckets)
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step
        if manager is not None:
            self.check_elastic()
            facts = {"settings": settings, **facts_about(self.param_groups)}
            self._step.elastic = Elastic(manager, self, facts)

    def check_elastic(self) -> None:
        """Refuse settings that hold for one number of workers alone, or whose state would move."""

    @property
    def elastic(self) -> Elastic | None:
        """The workers that ``manager`` names; None without one."""
        return self._step.elastic

    @property
    def committed(self) -> bool:
        """Whether the latest step has moved the parameters; False only with ``manager``."""
        return self.elastic is None or self.elastic.committed

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

    def state_names(self, bucket: Bucket) -> StateNames:
        """Return the names of the state of a bucket's parameters."""
        return self

    def kind(self, member: Member) -> Hashable:
        """Return what parameters must have in common to share a bucket: its ``kind``."""

    def has_owner(self, member: Member) -> bool:
        """Whether parameters of this kind have one owner each; otherwise slices may cut them."""
        return False

    def begin(self, bucket: Bucket) -> None:
        """Start from the parameters that are in a bucket: it is new, or was given others."""

    def follow(self, bucket: Bucket) -> None:
        """Bring what is kept beside a bucket to the device that it has moved to."""

    def host(self, local: int | None) -> None:
        """Put the parameters of a local worker into the model; None: those that all share.

        Only where workers move on their own between exchanges is there any difference.
        """

    def end_round(self) -> None:
        """Let the next step exchange messages, if there are steps that do not."""

    def prepare(self) -> None:
        """Compile the kernels of the first step, so that processes forked later inherit them."""

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
        if self._step.under_way:
            raise RuntimeError("add_param_group() in the middle of a step: add it after step()")
        listed(param_group)
        with self._all_or_none():
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            check_names(group)
            check_hyperparameters(type(self), group)
            check_sharding(
                self.params, self.workers, type(self).__name__, self.whole_matrices, self.overlap
            )
            trained = [tensor for tensor in group["params"] if tensor.requires_grad]
            check_parameters(trained, self._alone)
            self.members.add(group)
            if not self._constructed:  # groups are waited for that may share buckets
                return
            self._hand_out([group], [])
            self._drop(self._used[1])
            in_a_loop, self._added, self._waiting = self._added, True, True
            if not in_a_loop:  # otherwise more may come
                self._lay_out()
        if self._step.overlap is not None:
            self._step.overlap.watch(self.members.trained_of(group))

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """After an error, forget the groups that were added."""
        count, members, used = len(self.param_groups), copy.copy(self.members), self._used[1]
        try:
            yield
        except Exception:
            added = self.param_groups[count:]
            if added and self._constructed:
                self._drop(used)
                self._waiting = True
            if self._step.overlap is not None:
                self._step.overlap.unwatch(param for group in added for param in group["params"])
            del self.param_groups[count:]
            self.members = members
            raise

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all groups, in the order in which their messages leave.

        Those of groups that were added in a loop are made when they are needed first. All follow a
        model that ``model.to(device)`` has moved, as frameworks do after the optimizer was made.
        """
        if self._buckets and self._buckets[0].left and not self._step.under_way:
            self._move()
        if self._waiting:
            self._lay_out()
        return self._buckets

    def _move(self) -> None:
        """Bring the buckets to where their parameters are now, with their state: all or none.

        Raises:
            RuntimeError: if only some parameters of a bucket moved, or their dtype changed.
        """
        left = [bucket for bucket in self._buckets if bucket.left]
        before = [{**vars(bucket)} for bucket in left]
        try:
            for bucket in left:
                bucket.adopt_state(self.state)
                bucket.follow(self.make_exchange)
        except BaseException:
            for bucket, known in zip(left, before, strict=True):
                vars(bucket).clear()
                vars(bucket).update(known)
            raise
        for bucket in left:
            saving.publish(bucket, self.state, self.saved_workers)
            self.follow(bucket)

    def _lay_out(self) -> None:
        """Make the buckets of groups that have none."""
        self._waiting = False
        try:
            self._add_buckets(self.members.trained(self.param_groups[self._used[0] :]))
        except Exception:
            self._drop(self._used[1])
            self._waiting = True
            raise

    def _drop(self, first: int) -> None:
        """Forget buckets from one on, whose parameters get a place in others."""
        for bucket in self._buckets[first:]:
            for param, name, _ in bucket.published:
                self.state[param].pop(name, None)
            if self._step.overlap is not None:
                self._step.overlap.forget(bucket)
        del self._buckets[first:]

    def _add_buckets(self, members: list[Member]) -> None:
        for part in self.members.lay_out(members, self.kind, self.has_owner):
            self._add_bucket(part)

    def _add_bucket(self, members: list[Member]) -> None:
        owners = self.workers.count if self.has_owner(members[0]) else None
        bucket = Bucket(len(self._buckets), members, owners, self.kind(members[0]))
        bucket.allocate(self.make_exchange(bucket), self.state_names(bucket))
        if self.node is not None:
            self.node.lead(bucket, type(self).__name__)
        if self._step.elastic is not None:
            check_dealt(bucket, type(self).__name__)
        self._buckets.append(bucket)
        saving.publish(bucket, self.state, self.saved_workers)
        self.begin(bucket)
        if self._step.overlap is not None:
            self._step.overlap.place(bucket)

    def include_unfrozen(self) -> list[Bucket]:
        """Return the buckets, and make those of parameters unfrozen since the last step.

        All have state from now on: groups that are added later do not join them.
        """
        buckets = self.buckets
        if self.members.frozen:
            self._add_buckets(self.members.unfrozen(self.param_groups))
        self._used, self._added = (len(self.param_groups), len(buckets)), False
        return buckets

    def reorder(self, names: list[list[str]]) -> None:
        """Put the parameters of each group in the order of these names, if they are its own.

        Raises:
            ValueError: if that is another order than the one of steps that were taken.
        """
        for group, wanted in zip(self.param_groups, names, strict=False):
            here = group.get("param_names", [])
            if wanted == here or sorted(wanted) != sorted(here):
                continue
            if self._step.taken or self._arranged:
                raise ValueError(
                    "the saved state has the parameters in another order, and this optimizer has"
                    " taken steps in its own: load it into a new one"
                )
            params = dict(zip(here, group["params"], strict=True))
            group["params"], group["param_names"] = [params[name] for name in wanted], [*wanted]

    def arrange(self, steps: list[int]) -> None:
        """Lay an optimizer that took no step out for a state whose groups took so many each.

        Groups that were added later then have buckets of their own, as they had. What others have
        put into ``param_groups``, as Lightning's BaseFinetuning does, is taken over.
        """
        if self._step.taken or self._arranged or len(steps) != len(self.param_groups):
            return
        self._arranged = True  # parts of a state are loaded one after the other, in either order
        edited = self._in_groups != self.members.ids
        if edited:
            self.members = self.members.fresh()
            for group in self.param_groups:
                self.members.add(group)
                if self._step.overlap is not None:
                    self._step.overlap.watch(self.members.trained_of(group))
        if edited or len(set(steps)) > 1:
            self._drop(0)
            self._waiting = False
            for count in sorted({*steps}, reverse=True):
                pairs = zip(self.param_groups, steps, strict=True)
                chosen = [group for group, taken in pairs if taken == count]
                self._add_buckets(self.members.trained(chosen))

    @property
    def _in_groups(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self.param_groups]

    def _hand_out(self, groups: list[dict[str, Any]], buckets: list[Bucket]) -> None:
        """Check that all processes were given the same parameters, and give them process 0's."""
        params = [tensor for group in groups for tensor in group["params"]]
        facts = facts_about(groups)
        check_equal(self.workers, facts)
        if self.node is not None:
            self.node.check_equal(facts)
        check_bare(params)
        for bucket in buckets:
            self._give(bucket.params)
            bucket.write_back()
            self.begin(bucket)
        given = {slot.tensor for bucket in buckets for slot in bucket.slots}
        alone = self.workers.processes == 1 and self.node is None
        for tensor in [] if alone else params:
            here = local_part(tensor).detach()
            if tensor not in given and here.numel():
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
        if self._step.under_way:
            raise RuntimeError("set_participants() in the middle of a step")
        if self._step.elastic is not None:
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
        overlap = self._step.overlap
        return nullcontext() if overlap is None else overlap.no_sync()

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``overlap`` it also makes another try of a backward pass possible.

        What had left of a pass that raised an exception stays sent: its gradients count for these
        buckets. With ``manager`` it begins the next step.

        Raises:
            RuntimeError: if messages of a pass that went well have left; step() has to follow then.
            TrainingFailed: with ``manager``, if the lighthouse does not answer.
        """
        overlap, elastic = self._step.overlap, self._step.elastic
        if overlap is not None and not self._step.failed:
            overlap.check_restart()
        super().zero_grad(set_to_none)
        if overlap is not None:
            overlap.restart()
        if elastic is not None:
            elastic.begin()

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
        if local in self._step.collected:
            raise RuntimeError(f"virtual worker {local} was collected twice in one step")
        self._step.collect(self._buckets_of_step(), local)
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
        self._check_ready()
        buckets = self._buckets_of_step()
        for bucket in buckets:
            bucket.adopt()
            bucket.adopt_state(self.state)
        if getattr(self, "found_inf", None) is not None and nonfinite.overflowed(self):
            return loss
        local, collected = self.channel.local_participants, self._step.collected
        if local and collected == set(local[:-1]):
            self._step.collect(buckets, local[-1])
        if collected != set(local):
            missing = sorted(set(local) - collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        self._step.finish(buckets, self.exchanges)
        return loss

    def _buckets_of_step(self) -> list[Bucket]:
        """Return the buckets, with what was unfrozen before the first worker is collected."""
        return self.buckets if self._step.collected else self.include_unfrozen()

    def _check_ready(self) -> None:
        """Refuse a step that would go wrong."""
        if (device := self.params[0].device) != self._device:
            for group in self._meeting:
                check_gpus(group, device)
            self._device = device
        if not self._step.taken:
            check_bare(self.params)
            if self.node is None and self._peers.processes > 1 and self._peers.local == 1:
                check_data(self.params, self._peers)
            if self._met_nobody:
                check_alone()
        if self._awaits is not None:
            raise RuntimeError(
                "the loaded state lacks the workers' own state, which is in files beside the"
                " checkpoint: call load_workers(FOLDER) on every process, or use the integration of"
                " dlion.frameworks that saved it"
            )
        if self._in_groups != self.members.ids:
            raise RuntimeError(
                "param_groups were edited, which moves no parameter in or out: add a group with"
                " add_param_group(), freeze with requires_grad_(False), or make another optimizer"
            )

    def join_hook(self, **kwargs: Any) -> uneven.Shadow:
        """Let ``torch.distributed.algorithms.join.Join`` train on uneven numbers of batches.

        A worker that has no batch left takes no part: it sends nothing, keeps its state, and
        follows updates and hyperparameters of the others::

            optimizer = DLion(model.parameters())
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

    # ------------------------------------------------------------------ a step that moves by itself

    def move(self, bucket: Bucket, local: int) -> None:
        """Move a local worker by its own gradients, before its message; for ``moves_alone``."""

    def end_step(self, exchanged: bool) -> None:
        """Make ready for the next step; ``exchanged``: whether the answers were applied."""

    def begin_round(self) -> None:
        """Start from the shared state, which an exchange or a peer has moved."""

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
            counters = {} if bucket.counts_steps else bucket.counters
            for name, values in (bucket.shared | counters).items():
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
        With ``torch.save``, which writes the local part, save on every rank: a warning follows
        where one alone does. Where FSDP has sharded the parameters, all processes
        must call this together.
        """
        _ = self.buckets  # torch copies what they publish before it asks for more
        return super().state_dict()

    def inner_state(self) -> list[list[dict[str, Any]]]:
        """Return state that is not in the buckets: of each of them, each local worker's."""
        return []

    def load_inner(self, saved: list[list[dict[str, Any]]] | None) -> None:
        """Restore the result of :meth:`inner_state`; None: it is still to come."""

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must be of the same workers.

        Raises:
            ValueError: if it is of other workers, or of other parameters or settings.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        state_dicts.load(self, state_dict)
        apart, elastic = state_dict.get(saving.APART), self._step.elastic
        self.load_inner(state_dict.get("inner", []) if apart is None else None)
        if apart is not None and apart != self._own_of:
            self._awaits, self._own_of = apart, None
        if elastic is not None:
            elastic.resume(self.param_groups[0]["steps"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

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
    def saved_workers(self) -> Workers:
        """The workers of a saved state; with a manager each worker by itself, as numbers change."""
        return self.workers if self._step.elastic is None else Workers()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it talks to other processes:"
            " make another, and load this one's state_dict()"
        )


def _device_of(params: Iterable[Any]) -> torch.device:
    """Return the device of the first parameter, for any form of ``params``."""
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
