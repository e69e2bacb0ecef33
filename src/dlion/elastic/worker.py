"""Elastic training (``manager=``): workers join and leave, with torchft.

A lighthouse knows who is there. Before every step each worker asks for the quorum of that step;
where it is another than before, the exchanges are made again for as many workers. A step commits if
all of them have all answers; otherwise each of them puts back what encoding has moved.
"""

import hashlib
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.checks import check_parameters
from dlion.core.bucket import Bucket
from dlion.core.layout import local_part
from dlion.core.state import publish
from dlion.elastic import check_method
from dlion.elastic.joining import RETRY, GroupTransport, packed, unpacked
from dlion.elastic.lighthouse import Known, is_refused, page_of
from dlion.elastic.waits import in_thread
from dlion.errors import Stopped, TrainingFailed
from dlion.exchange import Channel, Traffic, is_broken
from dlion.exchange.vote import AGREEMENT
from dlion.extensions.lockstep import facts_about, plain_values, settings_of
from dlion.extensions.shards import ShardedBucket
from dlion.extensions.transaction import Transaction
from dlion.workers import Workers

# state of exchanges that can be dealt again: the answer before, which all workers know, and what an
# owner has learnt about workers, which it takes along to its next slice
_DEALT = {"previous", "agreement"}
_STATE = "dlion"  # the name of an optimizer's state in a manager
_LOOK = 0.5  # seconds between two looks at signals and at the lighthouse, while it is waited for
_SILENT = 2.0  # seconds without a heartbeat after which a worker counts as dead
_GONE = 6.0  # the same, of all who went on without this worker
_PATIENT = timedelta(seconds=5)  # more than twice as long as a peer is waited for
_REFUSED = 5.0  # seconds of refused connections after which the lighthouse counts as dead
_TRIES = 3  # to connect, until a new worker says that it cannot
_log = logging.getLogger(__name__)


class LeftBehind(TrainingFailed):
    """The others went on without this worker, which had stopped, and are gone."""


class Elastic(Transaction):
    """The workers of one optimizer, as a torchft manager knows them.

    Args:
        manager: made by :func:`join`, or a ``torchft.Manager`` with ``use_async_quorum=False`` and
            a ``ProcessGroupGloo``.
        dense_group: the processes of this worker, if they average their gradients.

    Attributes:
        open: whether there is a quorum for the step at hand.
        healed: how often the state of a peer was taken over.
        interrupted: asked while others are waited for: whether to leave.

    Raises:
        ValueError: for a manager or a method that will not do.
    """

    def __init__(self, manager: Any, dense_group: dist.ProcessGroup | None):
        super().__init__(self._decide)
        if _STATE in getattr(manager, "_user_state_dicts", {}):
            raise ValueError(
                "this manager has an optimizer already, whose steps it counts: give that one"
                " all parameters, as groups, or join() another lighthouse for each optimizer"
            )
        if dense_group is not None:
            check_inside(manager, dense_group)
        if manager._use_async_quorum:
            raise ValueError("the manager must have use_async_quorum=False: make it with join()")
        if "gloo" not in manager._pg.getBackendName():
            raise ValueError("the manager's process group must be a torchft.ProcessGroupGloo")
        self.manager, self._dense = manager, dense_group is not None
        self.open, self.healed = False, 0
        self.interrupted: Callable[[], bool] = lambda: False
        self._met = False
        self._facts: dict[str, str] = {}  # that all workers of the run must agree on
        self._group: dist.ProcessGroup | None = None
        self._inside: dist.ProcessGroup | None = getattr(manager, "inside", None)
        self._error: Exception | None = None  # of the exchange at hand
        self._known: dict[int, dict[str, Tensor]] = {}  # by bucket, what exchanges start from
        self._late = 0.0  # since when only workers are there that must not begin the run
        self._new = True  # no step of this worker has begun
        self._asked = 0.0  # when it knew who is there
        self._behind: set[str] = set()  # workers that have gone on without it
        self._apart = 0.0  # since when it and the others cannot connect
        self._tries = 0  # of them to do so
        self._silence = _SILENT  # seconds, of a peer for whom others wait
        self._suspects: set[str] = set()  # peers that were not waited for
        self._ahead: set[str] = set()  # workers that have begun it, as long as they live
        self._id = int.from_bytes(os.urandom(7), "little")
        self._lineage = 0  # of the steps that this worker's state has seen

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        if optimizer._named:
            raise ValueError(
                "manager= names the participants: give no workers, process_group or mesh"
            )
        optimizer._step_supports_amp_scaling = True  # so that before_step hears of it
        optimizer.set_participants = _refuse_participants

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        check_parameters(trained, alone=False)
        if self._facts:
            return
        check_method(self.optimizer)
        from dlion import __version__  # which imports this module

        facts = {"settings": settings_of(self.optimizer), **facts_about(groups)}
        facts["version of dlion"] = __version__
        self._facts = {name: json.dumps(fact, default=str) for name, fact in facts.items()}

    def on_bucket(self, bucket: Bucket) -> None:
        check_dealt(bucket, self.optimizer.__class__.__name__)
        if not bucket.index:
            self._register()

    def _register(self) -> None:
        """Let the manager hand on this optimizer's state."""
        self.manager.register_state_dict_fn(_STATE, self._load, self._state)
        if isinstance(self.manager._checkpoint_transport, GroupTransport):
            self.manager._checkpoint_transport.watched = self._watched
        self.optimizer.register_load_state_dict_post_hook(
            lambda loaded: self.resume(loaded.param_groups[0]["steps"])
        )

    def _meet(self) -> None:
        """Make ready for the first step."""
        optimizer, self._met = self.optimizer, True
        self._check_together()
        if all(bucket.device.type == "cpu" for bucket in optimizer.buckets):
            optimizer.prepare()  # kernels are compiled before others wait for this worker
            optimizer.channel.traffic = Traffic()

    def _check_together(self) -> None:
        """Refuse processes of this worker with the same model each, which nothing keeps the same.

        Those with another part of it each, stages of a pipeline say, are several models to us.
        """
        buckets, inside = self.optimizer.buckets, self._inside
        if inside is None or self._dense or any(isinstance(b, ShardedBucket) for b in buckets):
            return
        here = torch.stack([bucket.params.double().sum().cpu() for bucket in buckets])
        there = [torch.empty_like(here) for _ in range(inside.size())]
        dist.all_gather(there, here, group=inside)
        if len(there) > 1 and all(map(here.equal, there)):
            raise ValueError(
                f"join() was given {len(there)} processes that are one worker, and each has the"
                " same model: shard it with fully_shard(), or give dense_group the same group, so"
                " that they average their gradients"
            )

    # ---- before a step

    def begin(self) -> None:
        """Ask for the next step's participants, unless they are known; join if this worker is new.

        It waits until there are as many workers as the manager asks for.

        Raises:
            TrainingFailed: if the lighthouse does not answer, or nobody that has begun the run; or
                if the run has other settings.
            Stopped: if :attr:`interrupted` says so.
        """
        waiting = False
        while not self.open:
            self._look_ahead()
            self._look_behind()
            self._ask()
            self._asked = time.monotonic()
            if self._behind and self._behind.isdisjoint(self.manager._client.members):
                self._give_up(RuntimeError("those who went on are not in this quorum"))
            self._note_whether_connected()
            n, least = self.manager.num_participants(), self.manager._min_replica_size
            ready = self.manager.errored() is None and n >= least and self._rebuild()
            if self._all(ready):
                self.open, self._new = True, False
                continue
            if ready:
                self._give_up(RuntimeError("another process of this worker is not ready"))
            if waiting:
                self._look_up()
            if n < least and not waiting:
                waiting = True
                if self.manager.participating_rank() == 0:
                    _log.warning("waiting for %d more of at least %d workers", least - n, least)
            error = self.manager.errored()
            if error is not None:  # others may wait for this worker
                self._give_up(error.original_exception)
            if not self._should_commit():  # which makes it ask for another quorum
                time.sleep(RETRY if n < least else 0)

    def _all(self, ready: bool) -> bool:
        """Whether all processes of this worker are ready: FSDP2's move in step."""
        if self._inside is None:
            return ready
        flag = torch.tensor([int(ready)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._inside)
        return bool(flag)

    def _look_ahead(self) -> None:
        """Learn who has begun the run, as a new worker that must not begin another one.

        Many that come while all others are busy would be most of those who ask. torchft 0.2 tells
        steps on its page alone.
        """
        if self.optimizer.param_groups[0]["steps"]:
            return
        page = page_of(self.manager)
        if page is None:
            return  # asking for a quorum tells more
        known = Known.read(page)
        alive = {name for name, seconds in known.silence.items() if seconds < _SILENT}
        self._ahead = (self._ahead | {name for name, step in known.steps.items() if step}) & alive

    def _look_behind(self) -> None:
        """End this worker, if it was left behind by others who are all gone: at the end, say.

        It would take steps again that they have committed, and what it records replaces theirs.
        """
        if self._new or (self._group is not None and time.monotonic() < self._asked + _SILENT):
            return
        while (page := page_of(self.manager)) is not None:
            known, step = Known.read(page), self.manager.current_step()
            self._behind |= {name for name, theirs in known.steps.items() if theirs > step}
            heard = min((known.silence.get(name, math.inf) for name in self._behind), default=0.0)
            if heard < _SILENT:
                return
            if heard > _GONE:
                raise LeftBehind(
                    "the others went on without this worker, which did not answer, and are gone:"
                    " unless the run has ended, start it again from its last checkpoint"
                )
            self._look_up()
            time.sleep(_LOOK)

    def _ask(self) -> None:
        """Wait for a quorum, in a thread: torchft would wait deaf for as long as it may take."""
        asked = in_thread(self.manager.start_quorum)
        looks = 0  # at a lighthouse that is not there
        while True:
            try:
                asked.result(_LOOK)
                return
            except TrainingFailed:
                raise
            except (TimeoutError, RuntimeError) as error:
                if asked.done():
                    # torchft 0.2 would raise the same error again in every later start_quorum()
                    self.manager._quorum_future = None
                    limit = self.manager._quorum_timeout
                    page = page_of(self.manager) or ""
                    least = re.search(r"only have \d+ part\w+, need min_replicas (\d+)", page)
                    if least and int(least[1]) > 1:
                        raise TrainingFailed(
                            f"fewer workers than the lighthouse's --min-workers={least[1]} came"
                            f" within {limit}: start more"
                        ) from error
                    few = re.search(r"have (\d+) part\w+, need at least half of (\d+)", page)
                    if few:
                        raise TrainingFailed(
                            f"no step began within {limit}: {few[1]} of {few[2]} workers have asked"
                            " for one, and the others are busy or hang: give more patience"
                            " (train.py: timeout)"
                        ) from error
                    if page and self._inside is not None:
                        raise TrainingFailed(
                            "another process of this worker has ended, or not asked for a step"
                            f" within {limit}: they are one worker together"
                        ) from error
                    said = re.search('message: "(.*?)"', str(error))
                    reason = said[1] if said else error
                    raise _lost(f"has not answered within {limit} ({reason})") from error
            self._look_up()
            looks = looks + 1 if is_refused(self.manager) else 0
            if looks * _LOOK >= _REFUSED:
                raise _lost("is gone")

    def _note_whether_connected(self) -> None:
        """Give up after a while, as a new worker that cannot connect to all others, or they to it.

        The others go on between its tries, but connecting in vain holds them up.
        """
        if self.manager.errored() is None or not self._new:
            self._apart, self._tries = 0.0, 0
            return
        self._apart, self._tries = self._apart or time.monotonic(), self._tries + 1
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "this machine's name"
        said = (
            f"this worker and the others could not all connect in {self._tries} tries: all must"
            f" reach each other's addresses (here: that of {interface}), behind NAT through a VPN"
        )
        if time.monotonic() - self._apart > self.manager._quorum_timeout.total_seconds():
            raise TrainingFailed(said)
        if self._tries == _TRIES:
            _log.warning("%s; it tries again", said)

    def _look_up(self) -> None:
        """Leave, if that is asked for."""
        if self.interrupted():
            raise Stopped(self.optimizer.param_groups[0]["steps"])

    def _rebuild(self) -> bool:
        """Make the exchanges for the workers of this quorum, if it is a new one."""
        group = self.manager._pg.parent
        if group is self._group:
            return True
        optimizer = self.optimizer
        rank, count = self.manager.participating_rank(), self.manager.num_participants()
        optimizer.workers = Workers(rank, count, group=group)
        self.meet(optimizer.channel)
        before, optimizer.channel.traffic = optimizer.channel.traffic, Traffic()
        try:
            steps = optimizer.param_groups[0]["steps"]
            mine = torch.tensor([[self._id, self._lineage, steps, len(self._ahead)]])
            with self._watched():
                everyones, *seen, ahead = optimizer.channel.gather(mine).T.tolist()
        except RuntimeError as error:  # somebody has left already
            self._give_up(error)
            return False
        finally:
            optimizer.channel.traffic = before  # it is not part of any step
        if steps == 0 and any(ahead):
            self._give_up(RuntimeError("those who have begun the run are busy, or gone"))
            time.sleep(RETRY)
            self._look_up()
            self._late = self._late or time.monotonic()
            limit = self.manager._quorum_timeout
            if time.monotonic() - self._late > limit.total_seconds():
                raise TrainingFailed(
                    f"no worker that has begun the run has come within {limit}: end those that"
                    " hang, and start it from its last checkpoint"
                )
            return False
        (most, _), *others = Counter(zip(*seen, strict=True)).most_common()
        # some saw a step committed that the rest then took without them, or have left a round of
        # local steps that the rest have taken to its end, in vain
        if others:
            if (self._lineage, steps) != most:  # a peer's state comes with the next quorum
                self.resume(self.manager.current_step() - 1)
            self._give_up(RuntimeError("not all have seen the same steps"))
            return False
        self._group, self._late = group, 0.0
        self._behind.clear()
        for bucket in optimizer.buckets:
            exchange = optimizer.make_exchange(bucket)
            bucket.renew(exchange)
            publish(bucket, optimizer.state, Workers())
            self._deal(bucket, everyones)
        self._everyones = everyones
        return True

    def meet(self, channel: Channel) -> None:
        """Move a channel to the workers of this quorum."""
        channel.move(self.optimizer.workers, getattr(self.manager._pg, "waits", None))

    def _deal(self, bucket: Bucket, everyones: list[int]) -> None:
        """Give a new exchange the known part of its state."""
        known, state = self._known.get(bucket.index, {}), bucket.exchange.state
        rank = self.optimizer.workers.rank
        if "previous" in known:
            flat = torch.full((bucket.exchange.numel // 64,), -1, dtype=torch.int64)
            words = known["previous"][: len(flat)]
            flat[: len(words)] = words
            state["previous"].copy_(flat.view(-1, bucket.exchange.words)[rank : rank + 1])
        if "agreement" in known:
            shares = dict(zip(known["ids"].tolist(), known["agreement"].tolist(), strict=True))
            row = [shares.get(worker, AGREEMENT) for worker in everyones]
            state["agreement"].copy_(torch.tensor([row]))

    def attempt(self, work: Callable[[], Any]) -> bool:
        """Run collectives of the loop's own among the workers of the step that has begun.

        They come between ``zero_grad()`` and ``backward()``, the same on all workers.

        Returns:
            Whether they went well. If not, somebody has left: the loop resumes at ``zero_grad()``.
        """
        failed: RuntimeError | None = None
        try:
            with self._watched():
                work()
        except RuntimeError as error:
            if not is_broken(error):
                raise
            failed = error
        if not self._all(failed is None):
            self._give_up(failed or RuntimeError("another process of this worker has failed"))
            self.open = False
            self._should_commit()  # not after an error, which makes all ask again
        return self.open

    # ---- a step

    def before_step(self) -> bool:
        if getattr(self.optimizer, "found_inf", None) is not None:
            raise RuntimeError("a GradScaler does not work with manager=: train in bfloat16")
        self._require_open()  # before a worker moves by itself
        return True

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        self._require_open()
        super().before_encode(buckets, local)

    def _require_open(self) -> None:
        """Refuse a message without a receiver."""
        if not self.open:
            raise RuntimeError(
                "no step has begun: with manager=, zero_grad() begins a step, so call it before"
                " backward()"
            )

    @contextmanager
    def around_exchange(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Wait for all answers, here and elsewhere; who does not come is an error of the step."""
        self._error = None
        try:
            with self._watched():
                yield
                self.optimizer.channel.barrier()
        except TrainingFailed as failed:
            if not self._others_are_odd():
                raise
            self._error = failed
        except RuntimeError as failed:
            self._error = failed

    def _decide(self) -> bool:
        """Ask all whether to commit the step."""
        if self._error is not None:
            self._give_up(self._error)
        self.open = False
        committed = self._should_commit()
        if committed:
            seen = f"{self._lineage} {self.manager._quorum_id}".encode()
            self._lineage = int.from_bytes(hashlib.sha256(seen).digest()[:7], "little")
            for bucket in self.optimizer.buckets:
                self._note(bucket)
        else:
            self._abort()  # so that the next quorum makes exchanges again: they have moved too
        return committed

    def after_zero_grad(self) -> None:
        if not self._met:
            self._meet()
        self.begin()

    def _should_commit(self) -> bool:
        """Whether all processes of this worker can commit.

        Another may first wait for a peer of its own, for as long as ``timeout``.
        """
        limit = 2 * self.manager._timeout + _PATIENT
        try:
            return self.manager.should_commit(limit)
        except TrainingFailed:  # a peer's state is not for this worker
            raise
        except (TimeoutError, RuntimeError) as error:
            if self._inside is None:
                raise
            raise TrainingFailed(
                f"another process of this worker has ended, or not answered within {limit}: they"
                " are one worker together"
            ) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Wait for peers inside, unless that is in vain, as the lighthouse's page tells.

        Who stops, or loses power or network, closes no connection: all would wait for ``timeout``.
        And who comes back then may wait for peers that have left. A peer that gave up is not
        silent, and gloo may not tell: that its connection is gone does, half a second later.
        """
        over, lock = Event(), Lock()
        Thread(target=self._watch, args=(over, lock), daemon=True).start()
        try:
            yield
        finally:
            with lock:
                over.set()

    def _watch(self, over: Event, lock: Lock) -> None:
        began, seconds, parted = time.monotonic(), _SILENT, False
        group = self.manager._pg
        while not over.wait(seconds):
            # rarer and rarer: answers may come over the same link as the page
            seconds = min(max(_LOOK, (time.monotonic() - began) / 4), _SILENT)
            known = Known.read(page_of(self.manager) or "")
            silent = self._silent_peers(known)
            was_parted, parted = parted, getattr(group, "parted", False)
            with lock:
                if over.is_set():
                    return
                if silent or was_parted or known.quorum > self.manager._quorum_id:
                    self._suspects |= silent
                    group.abort()  # whoever waits gets an error
                    return

    def _silent_peers(self, known: Known) -> set[str]:
        """Return which workers of this quorum the lighthouse has not heard of for too long.

        One that comes back was alive, behind a link that is busy with messages, say: from then on
        it takes twice as long.
        """
        steps, silence = known.steps, known.silence
        if silence.get(self.manager._logger._replica_id, 0.0) > _SILENT:
            return set()  # the lighthouse has stopped for a while, or this worker
        if any(silence.get(name, self._silence) < _SILENT for name in self._suspects & {*steps}):
            self._suspects.clear()
            self._silence *= 2
        return {name for name in steps if silence.get(name, 0.0) > self._silence}

    def _others_are_odd(self) -> bool:
        """Whether this worker's gradients are finite, and its headers equal those of most."""
        rank = self.optimizer.workers.rank
        for bucket in self.optimizer.buckets:
            read = bucket.header.decode(bucket.exchange.headers)
            if read.vetoed[rank] is not None:
                return False
            said = [*zip(read.steps, [row.tobytes() for row in read.extra], strict=True)]
            finite = [each for each, n in zip(said, read.vetoed, strict=True) if n is None]
            (most, _), *_ = Counter(finite).most_common()
            if said[rank] != most:
                return False
        return True

    def _note(self, bucket: Bucket) -> None:
        """Save the state that a new exchange needs."""
        exchange, known = bucket.exchange, self._known.setdefault(bucket.index, {})
        if "previous" in exchange.state:  # it is the answer, of all owners
            known["previous"] = exchange.answer.view(torch.int64).flatten().cpu().clone()
        if "agreement" in exchange.state:
            known["agreement"] = exchange.state["agreement"][0].cpu().clone()
            known["ids"] = torch.tensor(self._everyones)

    def _give_up(self, error: Exception) -> None:
        _log.debug("a step is taken again: %s", error)
        self.manager.report_error(error)
        self._abort()

    def _abort(self) -> None:
        """Close the connections, so that no peer waits for this worker."""
        self.manager._pg.abort()
        self._group = None

    # ---- the state that a worker joins with

    def resume(self, steps: int) -> None:
        """Say that a checkpoint was loaded, after so many steps: the newest state is taken."""
        committed = self.manager.batches_committed()
        self.manager.load_state_dict({"step": steps, "batches_committed": committed})

    def snapshot(self) -> Tensor:
        """Return what a worker gets that joins now, as bytes: the common part of a checkpoint."""
        states = self.manager._user_state_dicts
        return packed({name: state() for name, state in states.items()})

    def restore(self, snapshot: Tensor) -> None:
        """Start from a :meth:`snapshot`. Nothing in it is executed."""
        for name, state in unpacked(snapshot).items():
            self.manager._load_state_dict_fns[name](state)
        self.resume(self.optimizer.param_groups[0]["steps"])

    def _state(self) -> dict[str, Any]:
        optimizer = self.optimizer
        return {
            "facts": self._facts,
            "lineage": self._lineage,
            "groups": [plain_values(group) for group in optimizer.param_groups],
            "buckets": [
                {
                    "sizes": [slot.stop - slot.start for slot in bucket.slots],
                    "params": bucket.params[: bucket.numel],
                    "shared": {k: flat[: bucket.numel] for k, flat in bucket.shared.items()},
                    "counters": dict(bucket.counters),
                    "known": {
                        name: values
                        for name, values in self._known.get(bucket.index, {}).items()
                        if name == "previous"
                    },
                }
                for bucket in optimizer.buckets
            ],
            "frozen": [local_part(p) for p in optimizer.params if not p.requires_grad],
        }

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        optimizer = self.optimizer
        theirs = state["facts"]
        names = [name for name in self._facts if self._facts[name] != theirs.get(name)]
        if names:
            raise TrainingFailed(
                f"this worker has other {' and other '.join(names)} than the run that it joins:"
                " give it the same"
            )
        optimizer.include_unfrozen()
        sizes = [[slot.stop - slot.start for slot in bucket.slots] for bucket in optimizer.buckets]
        if sizes != [saved["sizes"] for saved in state["buckets"]]:
            raise TrainingFailed(
                "this worker trains other parameters than the run that it joins: freeze and"
                " unfreeze the same ones before zero_grad()"
            )
        for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        for bucket, saved in zip(optimizer.buckets, state["buckets"], strict=True):
            bucket.adopt()
            bucket.params[: bucket.numel] = saved["params"]
            for name, flat in bucket.shared.items():
                flat[: bucket.numel] = saved["shared"][name]
            for name, counts in bucket.counters.items():
                counts.copy_(saved["counters"][name])
            self._known[bucket.index] = self._known.get(bucket.index, {}) | saved["known"]
            bucket.write_back()
        frozen = (p for p in optimizer.params if not p.requires_grad)
        for tensor, values in zip(frozen, state["frozen"], strict=True):
            local_part(tensor).copy_(values)
        optimizer.begin_round()
        self._lineage = state["lineage"]
        self.healed += 1


def _refuse_participants(workers: Sequence[int] | None) -> None:
    raise RuntimeError("set_participants() with manager=, which names the participants")


def check_inside(manager: Any, dense_group: dist.ProcessGroup) -> None:
    """Refuse a ``dense_group`` of other processes than those that are one worker."""
    inside = getattr(manager, "inside", None)
    ranks = dist.get_process_group_ranks
    if inside is None or ranks(inside) != ranks(dense_group):
        raise ValueError(
            "the processes of dense_group are not those that join() was given: they are one worker"
            " together, so give both the same group"
        )


def check_dealt(bucket: Bucket, method: str) -> None:
    """Refuse an exchange whose owners keep state that no other worker has."""
    lost = sorted(bucket.exchange.state.keys() - _DEALT)
    if lost:
        raise ValueError(
            f"{method} with these settings does not work with workers that come and go (manager=):"
            f" its exchange keeps {', '.join(lost)}, which is not transferred when workers change:"
            " choose dlion_mavo, lion_cub or another method without a memory in its exchange"
        )


def _lost(how: str) -> TrainingFailed:
    return TrainingFailed(
        f"the lighthouse {how}: unless the run has ended, start it again at the same address, and"
        " this run from its last checkpoint"
    )
