"""The optimizer that users see, whose step all methods share. A method fills in what is sent.

``step()`` is: encode, exchange, update. Everything else that a step may need is an extension.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from operator import itemgetter
from typing import Any, ClassVar, Literal, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dlion.checks import check_hyperparameters, check_names, check_ordered, checked, listed
from dlion.checks import check_parameters as check_tensors
from dlion.core import state
from dlion.core.bucket import Bucket
from dlion.core.header import Headers
from dlion.core.layout import Member, by_bucket, local_part, members_of
from dlion.exchange import Channel, Exchange, Traffic, is_broken
from dlion.extensions import Common as Common
from dlion.extensions import Options, standard
from dlion.extensions.protocol import Extension, Hooks, Schedule, release
from dlion.transfer import download, upload
from dlion.values import Positive
from dlion.workers import Workers, voters

BUCKET_MB, BUCKET_WORKERS = 5.0, 8  # results/speed; with more workers buckets grow
_HALF_WAY = (
    "an earlier step failed half-way, when state had moved: give this optimizer a checkpoint"
    " (load_state_dict), or make another"
)


class DistributedOptimizer(torch.optim.Optimizer, ABC):
    """A ``torch.optim.Optimizer`` whose workers exchange packed messages instead of gradients.

    It replaces both the optimizer and DistributedDataParallel: use the bare model, one process per
    worker, and the loop everybody knows::

        optimizer = DLion(model.parameters(), lr=1e-4)  # after init_process_group and model.to()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Creating it copies the parameters of process 0 to all and moves the trained ones into flat
    buffers, which share memory with nothing else. Gradient accumulation, parameter groups, LR
    schedulers, autocast, ``torch.amp.GradScaler`` and ``state_dict`` work as usual. The state
    differs from worker to worker: save it on every rank. Parameter groups share buckets, and rates
    may differ and change; a group that is added later has buckets of its own, as has what is
    unfrozen later. A process may host several virtual workers, see :meth:`collect`.

    A parameter without a gradient on some workers counts as a zero gradient there and leaves those
    workers' state alone; without one on any worker it is not touched, as in torch. (Methods with
    residuals count it as zero everywhere: what they held back must still be sent.) A frozen
    parameter is neither sent nor given state; it may be unfrozen between steps. One that is frozen
    later keeps its state and its bits in the messages, and is not updated. To load a state that was
    saved after unfreezing, unfreeze the same after the optimizer was made, then load.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        workers, process_group, mesh: the participants, given in one of three ways: workers, for
            several in a process; a process group; a mesh of one dimension (``mesh["replicate"]``).
            By default the processes of the default process group.
        seed: of all random draws of the method (the same on every process).
        bucket_cap_mb: cut the parameters, last ones first, into buckets of at most so many MB of
            float32, smaller ones first and towards the end. None: one bucket, of all groups.
            ``auto``: 5, and in proportion to n beyond 8 workers. On a GPU, whose host each bucket
            costs a millisecond, give 100 or more.
        extensions: of your own, see :class:`dlion.extensions.protocol.Extension`.
        options: attach extensions of this library, see :func:`dlion.extensions.standard`.

    Attributes:
        workers, channel: who exchanges messages, and what carries and counts them.
        extensions: all that are attached, in their order.
        schedule: when messages leave.
        owner: the workers whose own state is saved.
        collected: local workers whose messages of this step are written.
        failed: whether a step failed half-way, when state had moved.
        committed: whether the latest step has moved the parameters.
        flag, flagged: a bit of the loop's own. Set ``flag`` and it travels with the next messages;
            ``flagged`` is true on all after a step in which a process that takes part had it set.
        flag_beside: whether another process of this worker has it set.
        frozen: parameters that have no place in a bucket yet.
        skipped: steps of local workers in which a gradient was left out.

    Raises:
        TrainingFailed: if processes were given other parameters or settings.
        TypeError: for parameters that are not real floating-point numbers.

    Subclasses fill in the method: the names of their state, the exchange, what a worker sends and
    what is done with the answer. They set their attributes before they call this constructor, which
    makes the exchanges; all public ones must be equal on all processes.
    """

    own_state: list[str] = []
    shared_state: list[str] = []
    counters: list[str] = []  # shared state, one number a parameter
    own_counters: list[str] = []  # a worker's state, one number a parameter
    needs_full_matrices: bool = False  # whether it needs full tensors: bucket.full
    # a residual that was sent cannot be taken back: such methods count missing gradients as zero
    skips_missing: ClassVar[bool] = True
    moves_alone: ClassVar[bool] = False  # whether a worker moves between exchanges
    exchanges: bool = True  # whether the step at hand exchanges messages
    bucket_type: type[Bucket] = Bucket
    placements: Any = state.Placements  # how state is saved

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
        seed: int = 0,
        bucket_cap_mb: Positive | Literal["auto"] | None = None,
        extensions: Sequence[Extension] = (),
        **options: Unpack[Options],
    ):
        check_ordered(params)
        self.workers = voters(workers, process_group, mesh)
        self._named = bool(workers or process_group or mesh)  # whether participants are
        if options.get("manager") is not None:
            self.workers = Workers()  # its peers are named at every step
        self.seed, self.bucket_cap_mb, self.options = seed, bucket_cap_mb, options
        if bucket_cap_mb == "auto":
            self.bucket_cap_mb = BUCKET_MB * max(1.0, self.workers.count / BUCKET_WORKERS)
        self.schedule: Schedule = Schedule()
        self.extensions = standard(extensions, **options)
        self.borrowed: list[Workers] = []  # groups of its own, to be used again by others
        for extension in self.extensions:
            extension.attach(self)
        end = weakref.finalize(self, release, self.schedule, self.borrowed)
        end.atexit = False  # pyrefly: ignore[missing-attribute] - it is a property
        self.hooks, self.channel = Hooks(self.extensions), Channel(self.workers)
        self.owner = self.workers
        self.buckets: list[Bucket] = []
        self.collected: set[int] = set()
        self.committed, self.skipped = True, 0
        self.awaits: Any = None  # which save: the state of its workers is still to be loaded
        self.flag = self.flag_beside = self.flagged = False
        self.failed = self._flag_arrived = False
        self._known: list[list[int]] = []  # the ids of each group's parameters
        self.frozen: list[Tensor] = []
        self.taken = False  # whether any step was
        # groups that are ``added`` later have buckets of their own
        self.hyperparameters = {**defaults, "steps": 0, "added": 0}
        self._ready = False  # whether groups have their buckets as soon as they are added
        super().__init__(
            params if isinstance(params, Tensor) else [*map(listed, params)],
            {**self.hyperparameters},
        )
        self._ready = True
        self.register_state_dict_post_hook(state.pack)
        self._train(self.param_groups)
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step

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

    def state_names(self, bucket: Bucket) -> Any:
        """Return the names of the state of a bucket's parameters: ``Names``, or the method's."""
        return self

    def kind(self, member: Member) -> Hashable:
        """Return what parameters must have in common to share a bucket: its ``kind``."""

    def bucket_of(self, member: Member) -> type[Bucket]:
        """Return the type of bucket for parameters of this kind."""
        return self.bucket_type

    def begin(self, bucket: Bucket) -> None:
        """Start from the parameters that are in a bucket: it is new, or was given others."""

    def prepare(self) -> None:
        """Compile the kernels of the first step, so that processes forked later inherit them."""

    def get_extra_state(self) -> Any:
        """Return state that is not in the buckets, or nothing."""

    def set_extra_state(self, saved: Any) -> None:
        """Restore the result of :meth:`get_extra_state`; None: it is still to come."""

    # of methods whose workers take steps between exchanges

    def host(self, local: int | None) -> None:
        """Put the parameters of a local worker into the model; None: those that all share."""

    def begin_round(self) -> None:
        """Start from the shared state, which an exchange or a peer has moved."""

    def end_round(self) -> None:
        """Let the next step exchange messages."""

    def end_step(self, exchanged: bool) -> None:
        """Make ready for the next step; ``exchanged``: whether answers were applied."""

    # ------------------------------------------------------------------ a step

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
        if local in self.collected:
            raise RuntimeError(f"virtual worker {local} was collected twice in one step")
        self.check_whole()
        self.schedule.encode(self.include_unfrozen(), local, self.write_messages)
        self.collected.add(local)
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
        self.check_whole()
        buckets = self.include_unfrozen()
        self._adopt(buckets)
        for hook in self.hooks.before_step:
            if not hook():
                if self.under_way:
                    raise RuntimeError("a step whose messages are made cannot be left out")
                return loss
        local = self.channel.local_participants
        if local and self.collected == {*local[:-1]}:
            self.schedule.encode(buckets, local[-1], self.write_messages)
            self.collected.add(local[-1])
        if self.collected != {*local}:
            missing = sorted({*local} - self.collected)
            raise RuntimeError(f"step() before collect() of virtual workers {missing}")
        self.failed = True  # until all answers are applied
        exchanged = self.exchanges and self._exchange_and_update(buckets)
        self._conclude(buckets, exchanged)
        self.failed = False
        return loss

    def _adopt(self, buckets: list[Bucket]) -> None:
        """Take over what others have written, in any way, into parameters and state."""
        if self.edited:
            raise RuntimeError(
                "param_groups were edited, which moves no parameter in or out: add a group with"
                " add_param_group(), freeze with requires_grad_(False), or make another optimizer"
            )
        if self.awaits is not None:
            raise RuntimeError(
                "the loaded state lacks the workers' own state, which is in files beside the"
                " checkpoint: read them with dlion.frameworks.WorkerFiles(optimizer).load(FOLDER)"
                " on every process, or use the integration of dlion.frameworks that saved it"
            )
        for bucket in buckets:
            bucket.adopt()
            bucket.adopt_state(self.state)

    @torch.no_grad()
    def write_messages(self, buckets: Sequence[Bucket], local: int) -> None:
        """Look at a local worker's gradients and write its messages about buckets."""
        for hook in self.hooks.before_encode:
            hook(buckets, local)
        try:
            for bucket in buckets if self.exchanges else ():
                self._encode(bucket, local)
        except BaseException:
            self.failed = True
            raise

    def check_whole(self) -> None:
        """Refuse to go on after a step that failed half-way."""
        if self.failed:
            raise RuntimeError(_HALF_WAY)

    def _encode(self, bucket: Bucket, local: int) -> None:
        """Write a local worker's message about a bucket, and its header."""
        present = bucket.present() if self.skips_missing else bucket.trained()
        own = map(itemgetter(local), bucket.own.values())
        with self.channel.timer.encode, bucket.preserve_missing(present, own):
            self.encode(bucket, local)
        header = self.make_header(bucket, local, present)
        if bucket.device.type != "cpu":
            header = upload(header, bucket.device)
        for hook in self.hooks.veto:
            usable = hook(bucket, local)
            if usable is not None:
                bucket.header.veto(header, usable)
        bucket.exchange.encode_header(local, header)

    def make_header(self, bucket: Bucket, local: int, present: list[bool]) -> Tensor:
        """Return the header of a local worker's message, uint8 ``[nbytes]``, in main memory."""
        extra = b""
        for hook in self.hooks.write_header:
            extra += hook(bucket, local)
        return bucket.header.encode(bucket.step, extra, present, self.flag or self.flag_beside)

    def _exchange_and_update(self, buckets: list[Bucket]) -> bool:
        """Let all messages leave, wait for the answers and apply them; return whether it did.

        A GPU's host waits once for the headers of all buckets. On a CPU, where the exchanges of
        later buckets continue meanwhile, each bucket is updated as soon as its answer is there.
        """
        alone = {bucket.device.type for bucket in buckets} == {"cpu"}
        if self.hooks.around_exchange or self.hooks.may_update:
            alone = False
        for part in zip(buckets) if alone else [buckets]:
            with ExitStack() as around:
                for hook in self.hooks.around_exchange:
                    around.enter_context(hook(part))
                self._exchange(part)
            for hook in self.hooks.may_update:
                if not hook():
                    self.schedule.finish()
                    return False
            for bucket in part:
                self._update(bucket)
        return True

    def _exchange(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the exchanges of buckets, and read the headers of their messages."""
        with self.channel.timer.wait:
            try:
                self.schedule.exchange(buckets)
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
            read = self.read_headers(bucket, rows, "worker", self.channel.participants)
            bucket.headers, bucket.anywhere = read, read.present
            self._flag_arrived |= read.flag

    def read_headers(
        self, bucket: Bucket, rows: Tensor, kind: str, senders: Sequence[int]
    ) -> Headers:
        """Read the headers, uint8 ``[m, nbytes]``, of senders, a ``kind`` of these numbers."""
        read = bucket.header.decode(rows)
        if not read.same:
            names = [f"{kind} {sender}" for sender in senders]
            for hook in self.hooks.read_headers:
                hook(bucket, read, names)
        return read

    def _update(self, bucket: Bucket) -> None:
        """Update a bucket with its answer."""
        kept = bucket.preserve_missing(bucket.anywhere, (bucket.params, *bucket.shared.values()))
        with self.channel.timer.apply, kept, ExitStack() as around:
            for hook in self.hooks.around_update:
                around.enter_context(hook(bucket))
            self.update(bucket)
        bucket.write_back()

    def _conclude(self, buckets: list[Bucket], exchanged: bool) -> None:
        """Make ready for the next step; ``exchanged``: whether answers were applied."""
        self.committed = exchanged or not self.exchanges
        counts = exchanged or self.moves_alone
        for hook in self.hooks.after_step:
            hook(counts)
        if counts:
            self.taken, self.flagged = True, self._flag_arrived
            for bucket in buckets:
                bucket.count_step()
            for group in self.param_groups:
                group["steps"] += 1
        self._forget(buckets)
        if self.moves_alone:
            self.end_step(exchanged)

    def _forget(self, buckets: list[Bucket]) -> None:
        self.schedule.end_step()
        self.collected.clear()
        self.flag_beside = self._flag_arrived = False
        for bucket in buckets:
            bucket.headers, bucket.anywhere = None, []

    def restart(self) -> None:
        """Forget the step at hand, as other state was loaded."""
        self.schedule.finish()
        for hook in self.hooks.after_step:
            hook(False)
        self._forget(self.buckets)
        self.failed = False

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, and extensions may begin the next step."""
        if not self.failed:
            self.schedule.before_zero_grad()
        super().zero_grad(set_to_none)
        for hook in self.hooks.after_zero_grad:
            hook()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in here only accumulate gradients.

        Where messages leave during the backward pass, all but the last one of a step run in it.
        """
        return self.schedule.no_sync()

    @property
    def under_way(self) -> bool:
        """Whether messages of a step were made that is not over."""
        return bool(self.collected or self.schedule.sent)

    def set_participants(self, workers: Sequence[int] | None) -> None:
        """Say which workers take part from the next step on, ascending; None: all.

        Absent workers send nothing and keep their state; they still receive the update and still
        combine the slice they own. (They also send 4 bytes a parameter tensor under TernGrad, and
        a byte under DLionADM in the first step.) They are not to be collected. All processes must
        name the same workers.

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
        if self.under_way:
            raise RuntimeError("set_participants() in the middle of a step")
        self.channel.set_participants(known)

    # ------------------------------------------------------------------ parameters

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups, frozen ones too."""
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; all processes add the same group, between two steps."""
        if self.under_way:
            raise RuntimeError("add_param_group() in the middle of a step: add it after step()")
        listed(param_group)
        if self._ready and isinstance(param_group, dict):
            param_group["added"] = 1 + max(group["added"] for group in self.param_groups)
        groups, buckets, before = len(self.param_groups), len(self.buckets), [*self.frozen]
        try:
            super().add_param_group(param_group)
            check_names(self.param_groups[-1])
            check_hyperparameters(type(self), self.param_groups[-1])
            if self._ready:
                self._train(self.param_groups[groups:])
        except Exception:
            self._drop(buckets)
            del self.param_groups[groups:], self._known[groups:]
            self.frozen = before
            raise

    def _train(self, groups: list[dict[str, Any]]) -> None:
        """Let all processes train the parameters of new groups, from those of process 0."""
        alone, members = self.workers.processes == 1, [*members_of(groups)]
        trained = [member for member in members if member.tensor.requires_grad]
        check_tensors([member.tensor for member in trained], alone)
        for hook in self.hooks.on_groups:
            hook(groups)
        self._note(groups)
        buckets = self._add_buckets(trained)
        if alone:
            return
        for bucket in buckets:
            self.channel.broadcast(bucket.params)
            bucket.write_back()
            self.begin(bucket)
        placed = {slot.tensor for bucket in buckets for slot in bucket.slots}
        for member in members:
            if member.tensor not in placed:
                self.channel.broadcast(local_part(member.tensor).detach())

    def _note(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            self._known.append([*map(id, group["params"])])
            self.frozen += [tensor for tensor in group["params"] if not tensor.requires_grad]

    def include_unfrozen(self) -> list[Bucket]:
        """Return the buckets, and make those of parameters unfrozen since the last step."""
        if not self.frozen or self.collected:
            return self.buckets
        unfrozen = {id(tensor) for tensor in self.frozen if tensor.requires_grad}
        if unfrozen:
            self.frozen = [tensor for tensor in self.frozen if id(tensor) not in unfrozen]
            self._add_buckets(
                [each for each in members_of(self.param_groups) if id(each.tensor) in unfrozen]
            )
        return self.buckets

    def _add_buckets(self, members: list[Member]) -> list[Bucket]:
        """Make the buckets of parameters that have none, and return them."""
        first, cap, full = len(self.buckets), self.bucket_cap_mb, self.needs_full_matrices
        assert not isinstance(cap, str)
        kinds = self.kind, lambda member: self.bucket_of(member).in_one
        for part in by_bucket(members, cap, full, *kinds):
            of_kind, kind, n = self.bucket_of(part[0]), self.kind(part[0]), self.workers.count
            bucket = of_kind(len(self.buckets), part, kind, n, self.hooks.header_bytes)
            bucket.allocate(self.make_exchange(bucket), self.state_names(bucket))
            for hook in self.hooks.on_bucket:
                hook(bucket)
            self.buckets.append(bucket)
            state.publish(bucket, self.state, self.owner)
            self.begin(bucket)
        return self.buckets[first:]

    def _drop(self, first: int) -> None:
        """Forget buckets from one on."""
        for bucket in self.buckets[first:]:
            for param, name, _ in bucket.published:
                self.state[param].pop(name, None)
            self.schedule.forget(bucket)
        del self.buckets[first:]

    def lay_out_again(self) -> None:
        """Make all buckets anew, of groups as they are now; state begins at zero."""
        self._drop(0)
        self._known, self.frozen = [], []
        self._note(self.param_groups)
        frozen = {*map(id, self.frozen)}
        for added in sorted({group["added"] for group in self.param_groups}):
            groups = [group for group in self.param_groups if group["added"] == added]
            self._add_buckets([m for m in members_of(groups) if id(m.tensor) not in frozen])

    @property
    def edited(self) -> bool:
        """Whether others have put parameters into groups, or taken them out."""
        now = [[*map(id, group["params"])] for group in self.param_groups]
        return now != self._known

    # ------------------------------------------------------------------ state

    def worker_state(self, local: int) -> dict[str, Tensor]:
        """Return views of one local worker's own state by name: the same for every spread."""
        return state.of_worker(self.buckets, local)

    def common_state(self) -> dict[str, Tensor]:
        """Parameters and state that are equal on all workers, as views by name."""
        return state.of_all(self.buckets)

    @property
    def state_bytes(self) -> int:
        """Bytes of state that a worker keeps beside parameters and gradients, padding included."""
        common = {k: v for k, v in self.common_state().items() if not k.endswith(".parameters")}
        return sum(tensor.nbytes for tensor in (*self.worker_state(0).values(), *common.values()))

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with a leading dimension, the workers, for per-worker state.

        With several processes, what differs from one to another is a DTensor: so
        torch.distributed.checkpoint (``get_state_dict`` and ``set_state_dict``) saves it for every
        worker and gives it back to that worker, in another number of processes too. Another number
        of workers is an error of its own, a "Size mismatch ... for ...worker". With ``torch.save``,
        which writes the local part, save on every rank. Where a parameter is a DTensor, all
        processes must call this together.
        """
        return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must be of the same workers.

        Raises:
            ValueError: if it is of other workers, or of other parameters or settings.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        state.load(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it talks to other processes:"
            " make another, and load this one's state_dict()"
        )
