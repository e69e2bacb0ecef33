"""An extension of a user's own: when it is asked, and what its answers do."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlion.core.bucket import Bucket
from dlion.core.header import Headers
from dlion.extensions.protocol import Extension
from dlion.optim import DistributedOptimizer, DLion
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.small_model import flat, loss_of, net, samples


class Recorder(Extension):
    """Notes the points that it is asked at, in a list that several may share."""

    header_bytes = 1

    def __init__(self, calls: list[str], name: str = ""):
        self.calls, self.name = calls, name

    def _note(self, *what: object) -> None:
        self.calls.append(self.name + " ".join(map(str, what)))

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        self._note("on_groups", len(groups))

    def on_bucket(self, bucket: Bucket) -> None:
        self._note("on_bucket", bucket.index)

    def before_step(self) -> bool:
        self._note("before_step")
        return True

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        self._note("before_encode", [bucket.index for bucket in buckets], local)

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        self._note("write_header", bucket.index, local)
        return bytes([local])

    def veto(self, bucket: Bucket, local: int) -> None:
        self._note("veto", bucket.index, local)

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        self._note("read_headers", bucket.index)

    @contextmanager
    def around_exchange(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        self._note("exchange begins", [bucket.index for bucket in buckets])
        yield
        self._note("exchange ends")

    def may_update(self) -> bool:
        self._note("may_update")
        return True

    @contextmanager
    def around_update(self, bucket: Bucket) -> Iterator[None]:
        self._note("update begins", bucket.index)
        yield
        self._note("update ends", bucket.index)

    def after_step(self, counts: bool) -> None:
        self._note("after_step", counts)

    def after_zero_grad(self) -> None:
        self._note("after_zero_grad")


class Says(Extension):
    """Sends bytes of a local worker's, and keeps what it reads."""

    def __init__(self, header_bytes: int, says: Callable[[int], bytes]):
        self.header_bytes, self.says = header_bytes, says
        self.read: list[list[list[str]]] = []  # of each call the senders and what they say

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        return self.says(local)

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        rows = headers.extra[:, self.place]
        self.read.append([senders, [row.tobytes().decode() for row in rows]])


class Refuses(Extension):
    """Says no where it is asked to, in one call."""

    def __init__(self, call: int):
        self.call, self.calls = call, 0

    def _answer(self) -> bool:
        self.calls += 1
        return self.calls != self.call


class LeavesOut(Refuses):
    def before_step(self) -> bool:
        return self._answer()


class KeepsBack(Refuses):
    def may_update(self) -> bool:
        return self._answer()


def made(*extensions: Extension, local: int = 1, **options: Any) -> tuple[Any, Any]:
    model = net()
    workers = Workers(local=local)
    given = {"lr": 1e-2, "bucket_cap_mb": 1e-3, "workers": workers, **options}
    return model, DLion(model.named_parameters(), extensions=extensions, **given)


def take(model: torch.nn.Module, optimizer: DistributedOptimizer, step: int) -> None:
    """Take a step; the last worker's messages are left to step()."""
    last = optimizer.workers.local - 1
    for local in range(last + 1):
        loss_of(model, *samples(10 * step + local)).backward()
        if local < last:
            optimizer.collect(local)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("local", [1, 2])
def test_an_extension_is_asked_in_the_order_that_it_documents(local):
    calls: list[str] = []
    model, optimizer = made(Recorder(calls), local=local)
    every = range(len(optimizer.buckets))
    assert len(every) > 1
    assert calls == ["on_groups 1", *[f"on_bucket {index}" for index in every]]
    calls.clear()

    def of_worker(worker: int) -> list[str]:
        points = [f"{point} {b} {worker}" for b in every for point in ("write_header", "veto")]
        return [f"before_encode {[*every]} {worker}", *points]

    read = [f"read_headers {b}" for b in every] if local > 1 else []  # one worker's are the same
    expected = [
        *(of_worker(0) if local > 1 else []),
        "before_step",
        *of_worker(local - 1),
        f"exchange begins {[*every]}",
        *read,
        "exchange ends",
        "may_update",
        *[f"update {point} {b}" for b in every for point in ("begins", "ends")],
        "after_step True",
        "after_zero_grad",
    ]
    for step in range(2):
        take(model, optimizer, step)
        assert calls == expected
        calls.clear()


def test_what_an_extension_does_not_override_is_not_asked_and_changes_no_bit():
    (plain, without), (model, optimizer) = made(local=2), made(Recorder([]), local=2)
    for step in range(3):
        take(plain, without, step)
        take(model, optimizer, step)
    assert torch.equal(flat(model), flat(plain))
    _, optimizer = made(Extension())
    assert vars(optimizer.hooks).keys() == vars(without.hooks).keys()
    for name, methods in vars(without.hooks).items():
        if name != "header_bytes":
            assert len(vars(optimizer.hooks)[name]) == len(methods), name


def test_the_first_extension_is_the_innermost_around_an_exchange():
    calls: list[str] = []
    model, optimizer = made(Recorder(calls, "first "), Recorder(calls, "second "))
    take(model, optimizer, 0)
    seen = [call.partition(" [")[0] for call in calls if "exchange" in call]
    assert seen == [
        "second exchange begins",
        "first exchange begins",
        "first exchange ends",
        "second exchange ends",
    ]


def test_header_bytes_of_two_extensions_do_not_disturb_each_other():
    one, two = Says(3, lambda local: b"ab%d" % local), Says(2, lambda local: b"yz")
    model, optimizer = made(one, Extension(), two, local=2)
    take(model, optimizer, 0)
    senders = ["worker 0", "worker 1"]
    assert one.read == [[senders, ["ab0", "ab1"]]] * len(optimizer.buckets)
    assert two.read == [[senders, ["yz", "yz"]]] * len(optimizer.buckets)


def test_headers_that_are_all_the_same_are_not_read():
    says = Says(2, lambda local: b"yz")
    model, optimizer = made(says, local=2)
    take(model, optimizer, 0)
    assert says.read == []


def in_each_process() -> list[Any]:
    join_process_group("gloo", 60)
    rank, found = dist.get_rank(), []
    for says in (Says(4, lambda local: b"from"), Says(5, lambda local: b"from%d" % rank)):
        model, optimizer = made(says, workers=None)
        loss_of(model, *samples(rank)).backward()
        optimizer.step()
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, says.read)
        found.append((everyone, len(optimizer.buckets)))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_different_bytes_of_processes_are_read_by_all_and_equal_ones_by_none():
    (same, _), (different, buckets) = run_processes(2, in_each_process)
    assert same == [[], []]
    assert different == [[[["worker 0", "worker 1"], ["from0", "from1"]]] * buckets] * 2


def test_a_step_that_is_left_out_changes_nothing():
    (plain, without), (model, optimizer) = made(), made(LeavesOut(2))
    for step in range(4):
        before, taken = flat(model), optimizer.param_groups[0]["steps"]
        take(model, optimizer, step)
        if step == 1:
            assert torch.equal(flat(model), before)
            assert optimizer.param_groups[0]["steps"] == taken
        else:
            take(plain, without, step)
    assert torch.equal(flat(model), flat(plain))


@pytest.mark.parametrize(("local", "overlap"), [(2, False), (1, True)])
def test_a_step_whose_messages_are_made_cannot_be_left_out(local, overlap):
    model, optimizer = made(LeavesOut(1), local=local, overlap=overlap)
    for worker in range(local):
        loss_of(model, *samples(worker)).backward()
        if worker < local - 1:
            optimizer.collect(worker)
    with pytest.raises(RuntimeError, match="left out"):
        optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("local", [1, 2])
def test_without_leave_to_update_no_parameter_moves_and_the_next_step_works(local, overlap):
    model, optimizer = made(KeepsBack(2), local=local, overlap=overlap)
    for step in range(4):
        before = flat(model)
        take(model, optimizer, step)
        assert torch.equal(flat(model), before) == (step == 1)
        assert optimizer.committed == (step != 1)
    assert optimizer.param_groups[0]["steps"] == 3


class Breaks(DLion):
    """A method that fails in the middle of a step, at its second bucket."""

    broken = False

    def encode(self, bucket: Bucket, local: int) -> None:
        if self.broken and bucket.index == 1:
            raise ArithmeticError("broken")
        super().encode(bucket, local)


def test_after_a_failure_half_way_a_state_must_be_loaded():
    (plain, without), model = made(), net()
    optimizer = Breaks(model.named_parameters(), lr=1e-2, bucket_cap_mb=1e-3)
    take(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.broken = True
    with pytest.raises(ArithmeticError):
        take(model, optimizer, 1)
    optimizer.broken = False
    for _ in range(2):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="failed half-way"):
            take(model, optimizer, 1)
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    take(model, optimizer, 1)
    for step in range(2):
        take(plain, without, step)
    assert torch.equal(flat(model), flat(plain))
