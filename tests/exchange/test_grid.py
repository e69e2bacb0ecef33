"""Votes and means counted on a grid of workers are those of direct-send, to the bit."""

import hashlib
import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist

from dlion.exchange import Channel, LevelMean, Shape, Topology, Vote, make_sum
from dlion.exchange.grid import Costs, OnGrid, bits_up, bytes_along, grid_shape
from dlion.optim import DLion
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.properties import given, settings, st

D = 1000
TIES = ("zero", "plus", "alternate", "random", "previous")
Steps = Sequence[list[int] | None]  # who takes part in each


def seen(exchange: LevelMean | Vote, steps: Steps) -> list[torch.Tensor]:
    """Return all answers and headers of steps with random messages, which the absent write, too."""
    found = []
    for step, participants in enumerate(steps):
        exchange.channel.set_participants(participants)
        for local, worker in enumerate(exchange.channel.workers.ids):
            generator = torch.Generator().manual_seed(1000 * step + worker)
            row = torch.randint(exchange.levels, (exchange.numel,), generator=generator)
            exchange.encode(local, row.bool() if exchange.levels == 2 else row.int())
            exchange.encode_header(local, torch.full((8,), worker, dtype=torch.uint8))
        exchange.run(step)
        found += [exchange.answer.clone(), exchange.decode().clone(), exchange.headers.clone()]
    return found


def made(
    channel: Channel, topology: Topology | Shape, levels: int, ties: str | None
) -> Vote | LevelMean:
    """Return an exchange; ``ties=None``: the mean."""
    if ties is None:
        return make_sum(LevelMean, topology, channel, D, levels, header_bytes=8)
    return make_sum(Vote, topology, channel, D, levels, ties, 3, header_bytes=8)


def assert_as_direct(shape: tuple[int, ...], steps: Steps, levels: int, ties: str | None) -> None:
    """Compare a grid with the direct exchange; ``ties=None``: the mean."""
    found = []
    for topology in ("direct", shape):
        exchange = made(Channel(Workers(local=math.prod(shape))), topology, levels, ties)
        found.append([*seen(exchange, steps), *exchange.state.values()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("n", "ties"), [*product([6, 12, 16, 24, 36], [*TIES, None]), (256, "previous")]
)
def test_a_grid_answers_as_direct_send_does(n, ties):
    steps = [None, [0, n - 1], None, [n // 2], list(range(1, n, 2))]
    assert_as_direct(grid_shape(n), steps, 2, ties)


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 6)])
@pytest.mark.parametrize("levels", [2, 3, 15, 255])
def test_it_adds_any_levels_in_two_and_three_dimensions(levels, shape):
    for ties in ("zero", "previous", None):
        assert_as_direct(shape, [None, list(range(13))], levels, ties)


@given(st.data())
@settings(max_examples=40)
def test_whatever_the_grid_the_levels_and_who_takes_part(data):
    sizes = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)
    shape = data.draw(sizes.filter(lambda sizes: math.prod(sizes) <= 30))
    some = st.sets(st.integers(0, math.prod(shape) - 1), min_size=1).map(sorted)
    steps = data.draw(st.lists(st.none() | some, min_size=1, max_size=3))
    levels = data.draw(st.sampled_from([2, 3, 4, 15]))
    assert_as_direct(shape, steps, levels, data.draw(st.sampled_from([*TIES, None])))


def test_a_grid_has_few_messages_and_no_place_for_a_prime_number():
    assert [grid_shape(n) for n in (6, 12, 24, 36)] == [(2, 3), (3, 4), (4, 6), (6, 6)]
    assert [grid_shape(n) for n in (256, 512, 4096)] == [(16, 16), (8, 8, 8), (16, 16, 16)]
    assert grid_shape(64, dimensions=3) == (4, 4, 4)
    assert [grid_shape(n) for n in (1, 2, 7, 1021)] == [(1,), (2,), (7,), (1021,)]
    optimizer = DLion(
        [torch.nn.Parameter(torch.zeros(D))], workers=Workers(local=7), exchange="grid"
    )
    assert not isinstance(optimizer.buckets[0].exchange, OnGrid)


def test_buckets_grow_with_the_workers_if_asked():
    def count(n: int, cap: float | str) -> int:
        params = [torch.nn.Parameter(torch.empty(125_000, device="meta")) for _ in range(60)]
        return len(DLion(params, workers=Workers(local=n), bucket_cap_mb=cap).buckets)

    assert count(2, "auto") == count(8, "auto") == count(8, 5) > count(24, "auto") == count(24, 15)


@pytest.mark.parametrize(
    ("n", "shape"), [(256, (16, 16)), (64, (8, 8)), (36, (6, 6)), (24, (2, 3, 4))]
)
def test_bytes_are_counted_for_each_dimension(n, shape):
    """One-bit votes first, then sums in as many bits as they need, then answers of one bit."""
    channel, d = Channel(Workers(local=n)), 64 * n * 5
    vote = make_sum(Vote, shape, channel, d)
    vote.run(0)
    expected, stride = {}, 1
    for size in reversed(shape):
        up = (size - 1) * stride.bit_length() * d / (stride * size)
        outer = n // (stride * size)
        expected[stride] = up / 8 + (size - 1) * outer * (d // n) / 8
        stride *= size
    traffic, along = channel.traffic, bytes_along([vote])
    assert {stride: sent / n for stride, sent in along.items()} == expected
    assert traffic.sent_bytes == traffic.received_bytes == sum(along.values())
    back = (n - 1) / n
    assert traffic.sent_bytes == n * d / 8 * (bits_up(shape, 1) + back)
    more = (bits_up(shape, 1) + back) / (2 * back)  # than direct-send
    ratios = {(16, 16): 19 / 17, (8, 8): 7 / 6, (6, 6): 8 / 7, (2, 3, 4): 57 / 46}
    assert more == pytest.approx(ratios[shape])


def test_the_absent_send_nothing_but_the_sums_of_others():
    some = Channel(Workers(local=16))
    exchange = make_sum(Vote, (4, 4), some, D)
    exchange.run(0)
    everyone, back = some.traffic.sent_bytes, 15 * 16 * exchange.slice // 8
    some.set_participants([5])
    exchange.run(1)
    one = 8 * (3 * 4 + 4 * 3) * exchange.words  # its line, and from there to the owners
    assert some.traffic.sent_bytes - everyone == one + back


def test_auto_weighs_messages_against_bytes():
    costs = Costs({(64,): 2e-3, (8, 8): 5e-4, (4, 4, 4): 4e-4}, byte=1e-9)
    assert costs.best(10**4, 1) == (4, 4, 4)
    assert costs.best(5 * 10**6, 1) == (8, 8)
    assert costs.best(10**8, 1) == (64,)


KINDS = [(2, "previous"), (2, "random"), (15, "zero"), (3, "alternate"), (2, None)]  # levels, ties


def hashes(workers: Workers, on_grid: bool) -> list[str]:
    """Return a hash of what comes of each kind of exchange, then of a trained model."""
    n, found = workers.count, []
    for levels, ties in KINDS:
        topology = "grid" if on_grid else "direct"
        exchange = made(Channel(workers), topology, levels, ties)
        found.append(seen(exchange, [None, [0, n - 1], None, list(range(1, n, 2))]))
    param = torch.nn.Parameter(torch.zeros(D))
    optimizer = DLion([param], lr=1e-2, workers=workers, exchange="auto" if on_grid else "direct")
    for local, worker in enumerate(workers.ids):
        param.grad = torch.randn(D, generator=torch.Generator().manual_seed(worker))
        optimizer.collect(local)
    optimizer.step()
    found.append([param.detach()])
    return [
        hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
        for parts in found
    ]


def _on_grids(processes: int, counts: list[int]) -> list[list[str]]:
    join_process_group("gloo")
    found = [hashes(Workers.current(n // processes), on_grid=True) for n in counts]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "counts"), [(2, [6]), (4, [4, 12]), (8, [16])])
def test_every_spread_of_a_grid_answers_as_direct_send_does(processes, counts):
    """Lines within processes, between them, and cut by them."""
    direct = [hashes(Workers(local=n), on_grid=False) for n in counts]
    assert run_processes(processes, _on_grids, processes, counts) == direct


@pytest.mark.parametrize("sizes", ["grid", (3, 2)])
def test_a_state_saved_on_a_grid_goes_on_without(sizes):
    param = torch.nn.Parameter(torch.zeros(D))

    def make(exchange: Topology | Shape) -> DLion:
        return DLion([param], lr=1e-2, workers=Workers(local=6), exchange=exchange)

    def step(optimizer: DLion, seed: int) -> None:
        for worker in range(6):
            param.grad = torch.randn(D, generator=torch.Generator().manual_seed(seed + worker))
            optimizer.collect(worker)
        optimizer.step()

    on_grid, direct = make(sizes), make("direct")
    step(on_grid, 0)
    direct.load_state_dict(on_grid.state_dict())
    before = param.detach().clone()
    step(on_grid, 10)
    expected = param.detach().clone()
    with torch.no_grad():
        param.copy_(before)
    step(direct, 10)
    assert torch.equal(param, expected)
