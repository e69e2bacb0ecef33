"""Elastic training (``manager=``): workers join and leave, with torchft.

A lighthouse knows who is there. Before every step each worker asks for the quorum of that step;
where it is another than before, the exchanges are made again for as many workers. A step commits if
all of them have all answers; otherwise each of them puts back what encoding has moved.
"""

import hashlib
import io
import json
import logging
import math
import os
import re
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.engine import saving
from dlion.engine.bucket import Bucket
from dlion.engine.header import plain_values
from dlion.engine.method import Method
from dlion.engine.shards import local_part
from dlion.errors import Stopped, TrainingFailed, UserError
from dlion.exchange import Traffic, is_broken
from dlion.exchange.vote import AGREEMENT
from dlion.workers import Workers

# state of exchanges that can be dealt again: the answer before, which all workers know, and what an
# owner has learnt about workers, which it takes along to its next slice
_DEALT = {"previous", "agreement"}
_RETRY = 0.5  # seconds between two looks at who is there
_LOOK = 0.5  # seconds between two looks at signals and at the lighthouse, while it is waited for
_CONNECTING = 5.0  # seconds
_ANSWERING = 15.0  # seconds that a lighthouse on a busy machine may take
_PAGE = 1 << 20  # bytes, at most, of its page
_LONGEST = 10**6  # seconds
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
_MEETING = 2.0  # seconds in which a new worker has to connect to the others
_AGAIN = 0.5  # seconds, at least, in which it has to do so again
_ADDRESS = 256  # bytes, at most, of an address
_SILENT = 2.0  # seconds without a heartbeat after which a worker counts as dead
_REFUSED = 5.0  # seconds of refused connections after which the lighthouse counts as dead
_log = logging.getLogger(__name__)


class Elastic:
    """The workers of one optimizer, as a torchft manager knows them.

    Args:
        manager: made by :func:`join`, or a ``torchft.Manager`` with ``use_async_quorum=False`` and
            a ``ProcessGroupGloo``.
        optimizer: with its buckets, made for one worker.

    Attributes:
        open: whether there is a quorum for the step at hand.
        committed: whether the latest step has moved the parameters.
        healed: how often the state of a peer was taken over.
        interrupted: asked while others are waited for: whether to leave.

    Raises:
        ValueError: for a manager or a method that will not do.
    """

    def __init__(self, manager: Any, optimizer: Method, facts: dict[str, Any]):
        if manager._use_async_quorum:
            raise ValueError("the manager must have use_async_quorum=False: make it with join()")
        if "gloo" not in manager._pg.getBackendName():
            raise ValueError("the manager's process group must be a torchft.ProcessGroupGloo")
        self.manager, self._optimizer = manager, optimizer
        self.open, self.committed, self.healed = False, True, 0
        self.interrupted: Callable[[], bool] = lambda: False
        from dlion import __version__  # which imports this module

        facts = {**facts, "version of dlion": __version__}
        self._facts = {name: json.dumps(fact, default=str) for name, fact in facts.items()}
        self._group: dist.ProcessGroup | None = None
        self._inside: dist.ProcessGroup | None = getattr(manager, "inside", None)
        self._kept: dict[Bucket, list[tuple[Tensor, Tensor]]] = {}
        self._known: dict[int, dict[str, Tensor]] = {}  # by bucket, what exchanges start from
        self._late = 0.0  # since when only workers are there that must not begin the run
        self._silence = _SILENT  # seconds, of a peer for whom others wait
        self._suspects: set[str] = set()  # peers that were not waited for
        self._ahead: set[str] = set()  # workers that have begun it, as long as they live
        self._id = int.from_bytes(os.urandom(7), "little")
        self._lineage = 0  # of the steps that this worker's state has seen
        for bucket in optimizer.buckets:
            check_dealt(bucket, type(optimizer).__name__)
        if all(bucket.device.type == "cpu" for bucket in optimizer.buckets):
            optimizer.prepare()  # kernels are compiled before others wait for this worker
            optimizer.channel.traffic = Traffic()
        manager.register_state_dict_fn("dlion", self._load, self._state)

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
            self._ask()
            n, least = self.manager.num_participants(), self.manager._min_replica_size
            ready = self.manager.errored() is None and n >= least and self._rebuild()
            if self._all(ready):
                self.open = True
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
            if not self.manager.should_commit():  # which makes it ask for another quorum
                time.sleep(_RETRY if n < least else 0)

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
        if self._optimizer.param_groups[0]["steps"]:
            return
        page = _page(self.manager)
        if page is None:
            return  # asking for a quorum tells more
        steps, silence = _steps_and_silence(page)
        alive = {name for name, seconds in silence.items() if seconds < _SILENT}
        self._ahead = (self._ahead | {name for name, step in steps.items() if step}) & alive

    def _ask(self) -> None:
        """Wait for a quorum, in a thread: torchft would wait deaf for as long as it may take."""
        asked: Future[None] = Future()
        Thread(target=_settle, args=(asked, self.manager.start_quorum), daemon=True).start()
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
                    page = _page(self.manager) or ""
                    least = re.search(r"only have \d+ part\w+, need min_replicas (\d+)", page)
                    if least and int(least[1]) > 1:
                        raise TrainingFailed(
                            f"fewer workers than the lighthouse's --min-workers={least[1]} came"
                            f" within {limit}: start more"
                        ) from error
                    said = re.search('message: "(.*?)"', str(error))
                    reason = said[1] if said else error
                    raise _lost(f"has not answered within {limit} ({reason})") from error
            self._look_up()
            looks = looks + 1 if _is_refused(self.manager) else 0
            if looks * _LOOK >= _REFUSED:
                raise _lost("is gone")

    def _look_up(self) -> None:
        """Leave, if that is asked for."""
        if self.interrupted():
            raise Stopped(self._optimizer.param_groups[0]["steps"])

    def _rebuild(self) -> bool:
        """Make the exchanges for the workers of this quorum, if it is a new one."""
        group = self.manager._pg.parent
        if group is self._group:
            return True
        optimizer = self._optimizer
        rank, count = self.manager.participating_rank(), self.manager.num_participants()
        optimizer.workers = Workers(rank, count, group=group)
        optimizer.channel.move(optimizer.workers)
        before, optimizer.channel.traffic = optimizer.channel.traffic, Traffic()
        try:
            steps = optimizer.param_groups[0]["steps"]
            mine = torch.tensor([[self._id, self._lineage, steps, len(self._ahead)]])
            everyones, *seen, ahead = optimizer.channel.gather(mine).T.tolist()
        except RuntimeError as error:  # somebody has left already
            self._give_up(error)
            return False
        finally:
            optimizer.channel.traffic = before  # it is not part of any step
        if steps == 0 and any(ahead):
            self._give_up(RuntimeError("those who have begun the run are busy, or gone"))
            time.sleep(_RETRY)
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
        for bucket in optimizer.buckets:
            exchange = optimizer.make_exchange(bucket)
            bucket.renew(exchange)
            saving.publish(bucket, optimizer.state, Workers())
            self._deal(bucket, everyones)
        self._everyones = everyones
        return True

    def _deal(self, bucket: Bucket, everyones: list[int]) -> None:
        """Give a new exchange the known part of its state."""
        known, state = self._known.get(bucket.index, {}), bucket.exchange.state
        rank = self._optimizer.workers.rank
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
            self.manager.should_commit()  # not after an error, which makes all ask again
        return self.open

    # ---- a step

    def keep(self, bucket: Bucket) -> None:
        """Remember the worker's own state of a bucket, which encoding is about to move."""
        rows = [*bucket.own.values(), *bucket.own_counters.values()]
        kept = self._kept.get(bucket, [])
        if [id(row) for row, _ in kept] != [id(row) for row in rows]:
            kept = self._kept[bucket] = [(row, torch.empty_like(row)) for row in rows]
        for row, copy in kept:
            copy.copy_(row)

    def require_open(self) -> None:
        """Refuse a message without a receiver."""
        if not self.open:
            raise RuntimeError(
                "no step has begun: with manager=, zero_grad() begins a step, so call it before"
                " backward()"
            )

    def commit(self, wait: Callable[[Sequence[Bucket]], None]) -> bool:
        """Wait for all answers, here and elsewhere; return whether all have them.

        Args:
            wait: waits for the answers of buckets here.
        """
        optimizer = self._optimizer
        buckets, error = optimizer.buckets, None
        try:
            with self._watched():
                wait(buckets)
                if optimizer.after_step is not None:
                    optimizer.after_step(buckets, optimizer.channel)
                optimizer.channel.barrier()
        except TrainingFailed as failed:
            if not self._others_are_odd():
                raise
            error = failed
        except RuntimeError as failed:
            error = failed
        if error is not None:
            self._give_up(error)
        self.open = False
        self.committed = self.manager.should_commit()
        if self.committed:
            seen = f"{self._lineage} {self.manager._quorum_id}".encode()
            self._lineage = int.from_bytes(hashlib.sha256(seen).digest()[:7], "little")
            for bucket in buckets:
                self._note(bucket)
        else:
            self._abort()  # so that the next quorum makes exchanges again: they have moved too
        return self.committed

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Wait for peers inside, unless the lighthouse has not heard of one for a while.

        Who stops, or loses power or network, closes no connection: all would wait for ``timeout``.
        """
        over, lock = Event(), Lock()
        Thread(target=self._watch, args=(over, lock), daemon=True).start()
        try:
            yield
        finally:
            with lock:
                over.set()

    def _watch(self, over: Event, lock: Lock) -> None:
        began, seconds = time.monotonic(), _SILENT
        while not over.wait(seconds):
            # rarer and rarer: answers may come over the same link as the page
            seconds = max(_LOOK, (time.monotonic() - began) / 4)
            silent = self._silent_peers()
            with lock:
                if silent and not over.is_set():
                    self._suspects |= silent
                    self.manager._pg.abort()  # whoever waits gets an error
                    return

    def _silent_peers(self) -> set[str]:
        """Return which workers of this quorum the lighthouse has not heard of for too long.

        One that comes back was alive, behind a link that is busy with messages, say: from then on
        it takes twice as long.
        """
        page = _page(self.manager) or ""
        steps, silence = _steps_and_silence(page)
        if silence.get(self.manager._logger._replica_id, 0.0) > _SILENT:
            return set()  # the lighthouse has stopped for a while, or this worker
        if any(silence.get(name, self._silence) < _SILENT for name in self._suspects & {*steps}):
            self._suspects.clear()
            self._silence *= 2
        return {name for name in steps if silence.get(name, 0.0) > self._silence}

    def put_back(self) -> None:
        """Undo what encoding has moved, as the step was not committed."""
        for kept in self._kept.values():
            for row, copy in kept:
                row.copy_(copy)

    def _others_are_odd(self) -> bool:
        """Whether this worker's headers equal those of most workers."""
        for bucket in self._optimizer.buckets:
            read = bucket.header.decode(bucket.exchange.headers)
            if any(broken is not None for broken in read.broken):
                return False
            said = list(zip(read.steps, read.checksums, strict=True))
            (most, _), *_ = Counter(said).most_common()
            if said[self._optimizer.workers.rank] != most:
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
        return _packed({name: state() for name, state in states.items()})

    def restore(self, snapshot: Tensor) -> None:
        """Start from a :meth:`snapshot`. Nothing in it is executed."""
        for name, state in _unpacked(snapshot).items():
            self.manager._load_state_dict_fns[name](state)
        self.resume(self._optimizer.param_groups[0]["steps"])

    def _state(self) -> dict[str, Any]:
        optimizer = self._optimizer
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
        optimizer = self._optimizer
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


def alone(named: Any) -> Workers:
    """Return this process alone, as a manager names its peers at every step."""
    if named is not None:
        raise ValueError(
            "manager= names the participants: give no workers, process_group, mesh or dense_group"
        )
    return Workers()


def check_dealt(bucket: Bucket, method: str) -> None:
    """Refuse an exchange whose owners keep state that no other worker has."""
    lost = sorted(bucket.exchange.state.keys() - _DEALT)
    if lost:
        raise ValueError(
            f"{method} with these settings does not work with workers that come and go (manager=):"
            f" its exchange keeps {', '.join(lost)}, which is not transferred when workers change:"
            " choose dlion_mavo, lion_cub or another method without a memory in its exchange"
        )


def check_lighthouse(address: str, typed: str) -> str:
    """Refuse an address where no lighthouse answers; ``typed`` is what an error names.

    Whoever else listens there, torchft would ask thirty times a second, and wait.

    Returns:
        This machine's address, as the lighthouse sees it.
    """
    try:
        page, own = _read_page(split_address(address, typed), _ANSWERING)
    except (OSError, UnicodeError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{typed}: no lighthouse there ({reason}): {_START}") from error
    if "quorum" not in page:
        raise UserError(f"{typed}: another service listens there: {_START}")
    return own


def _settle(result: Future[None], work: Callable[[], None]) -> None:
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)


def _page(manager: Any) -> str | None:
    """Return the page of the lighthouse; None: it does not answer, or is not known."""
    address = getattr(manager, "lighthouse", None)
    if address is None:  # it was not made here
        return None
    try:
        return _read_page(address, _CONNECTING)[0]
    except (OSError, HTTPException):
        return None


def _steps_and_silence(page: str) -> tuple[dict[str, int], dict[str, float]]:
    """Return the steps of the workers of the latest quorum, and seconds since all were heard of."""
    steps = re.findall(r"<b>(\S+)</b>\s*<br/>\s*Step: (\d+)", page)
    seen = re.findall(r"(\S+): seen ([\d.]+)s ago", page)
    return {name: int(step) for name, step in steps}, {name: float(ago) for name, ago in seen}


def _read_page(address: tuple[str, int], limit: float) -> tuple[str, str]:
    """Return the page of a lighthouse, and this machine's address, as the lighthouse sees it."""
    connection = HTTPConnection(*address, timeout=limit)
    try:
        connection.connect()
        own = connection.sock.getsockname()[0]
        connection.request("GET", "/status")
        return connection.getresponse().read(_PAGE).decode(errors="replace"), own
    finally:
        connection.close()


def _is_refused(manager: Any) -> bool:
    """Whether nobody listens at the lighthouse's address. A link that is down shows nothing."""
    address = getattr(manager, "lighthouse", None)
    if address is None:  # it was not made here
        return False
    try:
        socket.create_connection(address, _LOOK).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _lost(how: str) -> TrainingFailed:
    return TrainingFailed(
        f"the lighthouse {how}: unless the run has ended, start it again at the same address, and"
        " this run from its last checkpoint"
    )


def _packed(state: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


class GroupTransport:
    """Sends state to joining workers through the process group, and executes nothing of it.

    torchft's own HTTPTransport opens a port on every interface and unpickles what it gets; this
    uses the connections that messages use, and ``torch.load(weights_only=True)``.

    Attributes:
        sent_bytes: to workers that have joined, but for those that were there before any step.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent_bytes = 0

    def metadata(self) -> str:
        return ""

    def send_checkpoint(
        self, dst_ranks: Iterable[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        data = _packed(state_dict)
        for rank in dst_ranks:
            for part in (torch.tensor([len(data)]), data):
                self._group.parent.send([part], rank, 0).wait()
            self.sent_bytes += len(data) if step else 0

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        self._group.parent.recv([size], src_rank, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.parent.recv([data], src_rank, 0).wait()
        return _unpacked(data)

    def disallow_checkpoint(self) -> None:
        """Nothing is under way once :meth:`send_checkpoint` has returned."""

    def shutdown(self, wait: bool = True) -> None:
        """There is nothing to end."""


def join(
    lighthouse: str,
    min_workers: int = 1,
    name: str = "",
    address: str | None = None,
    timeout: float = 30.0,
    patience: float = 60.0,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Connect to a lighthouse; return the ``torchft.Manager`` that optimizers take as ``manager``.

    ::

        manager = dlion.join("10.0.0.1:29510", min_workers=2)
        optimizer = dlion.DLion(model.parameters(), lr=1e-4, manager=manager)

    The lighthouse is a process that ``dlion lighthouse`` (or ``torchft_lighthouse``) starts. What a
    loop keeps besides (a schedule, buffers of a model) joins too, once it is registered with
    ``manager.register_state_dict_fn(name, load, save)``; it must consist of tensors, numbers,
    texts, lists and dictionaries, as nothing else is unpickled.

    Args:
        lighthouse: its HOST:PORT.
        min_workers: with fewer, all wait.
        name: workers are numbered in the order of their names, then at random.
        address: of this machine, for the other workers; None: the one that it reaches the
            lighthouse from. Gloo, which carries messages, listens on its interface, unless the
            environment variable GLOO_SOCKET_IFNAME names another.
        timeout: seconds that a worker may hang, and still say that it is alive, before the others
            continue without it.
        patience: seconds to wait for a lighthouse that does not answer, or for min_workers.
        group: of the processes that are one worker, over which FSDP2 shards the model. They live
            and die together, as torchrun's do. All call this, with the same arguments.

    Raises:
        UserError: if torchft is not installed, or there is no lighthouse.
    """
    with importing_torchft("elastic workers need"):
        from torchft import Manager
    typed = f"lighthouse={lighthouse}"
    host, port = split_address(lighthouse, typed)
    if min_workers < 1:
        raise UserError(f"min_workers={min_workers} is not possible: give 1 or more")
    for which, seconds in (("timeout", timeout), ("patience", patience)):
        if not 0 < seconds <= _LONGEST:
            raise UserError(f"{which}={seconds} is not possible: give 0 to {_LONGEST} seconds")
    for logger in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # what matters is raised
    place = Workers() if group is None else Workers.current(group=group).with_cpu_group()
    try:
        own = check_lighthouse(lighthouse, typed)
        address = (address or own).strip("[]")
        _choose_interface(address)
        store = _make_store(address, place)
    except OSError as error:
        raise UserError(
            f"this machine cannot listen at {address} ({error}): give one of its own as address="
        ) from error
    ring = _make_group(timeout)
    try:
        with _listening_on(address):
            manager = Manager(
                pg=ring,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=min_workers,
                use_async_quorum=False,
                timeout=timedelta(seconds=timeout),
                quorum_timeout=timedelta(seconds=patience),
                quorum_retries=math.ceil(patience / _RETRY),  # of a lighthouse that began again
                connect_timeout=timedelta(seconds=_CONNECTING),
                rank=place.rank,
                world_size=place.processes,
                store_addr=store.host,
                store_port=store.port,
                lighthouse_addr=f"http://{_bracketed(host)}:{port}",
                replica_id=name,
                hostname=_bracketed(address),
                checkpoint_transport=cast(Any, GroupTransport(ring)),
            )
    except (RuntimeError, TimeoutError) as error:
        raise UserError(f"{typed}: no lighthouse there: {_START}") from error
    manager.lighthouse = host, port  # pyrefly: ignore[missing-attribute]
    manager.inside = place.group  # pyrefly: ignore[missing-attribute]
    ring.own_store = store  # it lives as long as the group
    return manager


def _make_store(address: str, place: Workers) -> dist.TCPStore:
    """Make the store of a worker, in the first of its processes."""
    listening = None
    where = torch.zeros(_ADDRESS, dtype=torch.uint8)
    if place.rank == 0:
        # a store that listens on every interface would be one door more
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        text = f"{address}:{listener.getsockname()[1]}".encode()
        listening = listener.detach()
        where = torch.frombuffer(bytearray(text.ljust(_ADDRESS)), dtype=torch.uint8)
    if place.group is not None:
        dist.broadcast(where, group=place.group, group_src=0)
    host, _, port = bytes(where.tolist()).decode().strip().rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        is_master=listening is not None,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


@contextmanager
def _listening_on(address: str) -> Iterator[None]:
    """Let managers made inside listen on one address; torchft 0.2 has them listen on all."""
    from torchft import manager

    server = manager.ManagerServer

    def serve(**options: Any) -> Any:
        port = options.pop("bind").rpartition(":")[2]
        return server(**options, bind=f"{_bracketed(address)}:{port}")

    manager.ManagerServer = cast(Any, serve)
    try:
        yield
    finally:
        manager.ManagerServer = server


def _make_group(timeout: float) -> Any:
    """Return torchft's gloo group, with three repairs for torchft 0.2, gloo and torch.

    A worker that dies while others connect is waited for in vain, as long as for a message: here it
    is four times as long as connecting took before, and twice that if as many workers fail again.
    If the store is a dead worker's, torch asks for it again for two seconds, and writes a trace of
    fifty lines. And abort() closes nothing as long as anyone has the group, a thread that waits for
    a message say; peers would wait until ``timeout``.
    """
    from torchft import ProcessGroupGloo

    class Group(ProcessGroupGloo):
        usual = limit = _MEETING  # seconds
        failed = 0  # workers that could not all connect
        sockets: frozenset[tuple[int, int]] = frozenset()  # of the connections between workers

        def configure(self, *args: Any, **kwargs: Any) -> None:
            store, _, _, workers, *_ = args
            again = workers == self.failed
            self.limit = min(timeout, 2 * self.limit) if again else self.usual
            self.set_timeout(timedelta(seconds=self.limit))
            self.failed, began, others = workers, time.monotonic(), _open_sockets()
            host, port = split_address(store.partition("/")[0], store)
            socket.create_connection((host, port), self.limit).close()
            try:
                super().configure(*args, **kwargs)
            finally:
                self.sockets = _open_sockets() - others
            self.failed, self.usual = 0, max(_AGAIN, 4 * (time.monotonic() - began))
            gloo = cast(Any, self.parent)._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(timedelta(seconds=timeout))

        def abort(self, errored: bool = True) -> None:
            for descriptor, inode in self.sockets:
                _shut_down(descriptor, inode)
            self.sockets = frozenset()
            super().abort(errored)

    return Group(timeout=timedelta(seconds=timeout))


def _open_sockets() -> frozenset[tuple[int, int]]:
    """Return descriptor and inode of the sockets of this process that programs would inherit.

    Gloo's are such, unlike those that Python, Rust and torch's store open, on other threads say.
    """
    found = set()
    for link in Path("/dev/fd").iterdir():
        with suppress(OSError):  # that of iterdir itself
            status = os.fstat(int(link.name))
            if stat.S_ISSOCK(status.st_mode) and os.get_inheritable(int(link.name)):
                found.add((int(link.name), status.st_ino))
    return frozenset(found)


def _shut_down(descriptor: int, inode: int) -> None:
    """Shut down a connection, unless its descriptor is another's now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.getpeername()  # fails for what listens
            connection.shutdown(socket.SHUT_RDWR)


def check_torchft(who: str) -> None:
    """Refuse to go on without torchft, which is not imported for that."""
    if find_spec("torchft") is None:
        raise UserError(f"{who} torchft, which is not installed: {_INSTALL}")


@contextmanager
def importing_torchft(who: str) -> Iterator[None]:
    """Turn a package that an import inside lacks into a sentence that begins with ``who``."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft writes ten lines a step otherwise
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{who} {error.name}, which is not installed: {_INSTALL}") from error


def split_address(address: str, typed: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``; an error names ``typed``."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise UserError(f"{typed} is not an address: give HOST:PORT")
    return host, int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


_INSTALL = "type pip install 'dlion[elastic]'"
_START = "start one with `dlion lighthouse`, or correct the address"


def _choose_interface(address: str) -> None:
    """Let gloo listen where this machine has an address, unless the environment names another.

    Gloo would take the address of this machine's own name: Debian's is 127.0.1.1.
    """
    there = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wrong := [name for name in chosen.split(",") if name and name not in there]:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={chosen}: this machine has no interface {wrong[0]}: choose from"
            f" {', '.join(there)}"
        )
    if not chosen and (name := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty if there is none."""
    import fcntl  # `import dlion` works where it is missing

    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket() as asking:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    with suppress(OSError):  # IPv6: Linux lists all
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if digits == wanted:
                return name
    return ""
