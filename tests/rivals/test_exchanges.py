"""Answers of the rivals' exchanges."""

import weakref

import pytest
import torch

from dlion.errors import TrainingFailed
from dlion.exchange import Channel, DenseMean, ScaledSignMean
from dlion.rivals.exchange.low_rank import LowRankMean, Matrix
from dlion.rivals.exchange.sparse import SparseMean
from dlion.rivals.exchange.switch import Switch
from dlion.rivals.exchange.ternary import ScaledTernaryMean, TernaryMean
from dlion.rivals.exchange.topk import Block, CosineTopKMean, TopKMean
from dlion.rivals.exchange.tracking import TrackingVote
from dlion.rivals.wire import Sparse
from dlion.workers import Workers
from tests.support.exchanges import SIZE, D, ask, assert_absent_do_not_count, assert_lossy, votes


@pytest.mark.parametrize("n", [1, 3, 8])
def test_ternary_mean(n):
    rows = votes(n, 3) - 1
    answer = ask(TernaryMean(Channel(Workers(local=n)), D), rows.to(torch.int8))
    torch.testing.assert_close(answer, rows.float().mean(0))


def test_scaled_ternary_mean_shares_the_largest_scale_and_is_unbiased():
    n, sizes, steps = 4, [600, D - 600], 500
    exchange = ScaledTernaryMean(Channel(Workers(local=n)), D, sizes)
    rows = torch.linspace(-1, 1, n * D).view(n, D)
    total = torch.zeros(D)
    for step in range(steps):
        for i, row in enumerate(rows):
            scales = torch.stack([part.abs().max() for part in row.split(sizes)])
            padded = torch.nn.functional.pad(row, (0, exchange.numel - D))
            exchange.encode(i, (padded, scales))
        exchange.run(step)
        total += exchange.decode()[:D]
    assert (total / steps - rows.mean(0)).abs().max() < 5 * 0.5 / (n * steps) ** 0.5
    assert exchange.decode()[:D].abs().max() <= 1.0


def low_rank(channel: Channel) -> LowRankMean:
    draws = torch.randn(2 * 36, generator=torch.Generator().manual_seed(1))
    return LowRankMean(channel, SIZE, [Matrix(0, 1080, 30), Matrix(1080, SIZE, 1)], [2, 2], draws)


def test_vectors_alone_are_sent_as_they_are():
    exchange = LowRankMean(Channel(Workers()), SIZE, [Matrix(0, SIZE, 1)], [2], torch.zeros(0))
    row = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    exchange.encode(0, row)
    exchange.run(0)
    assert torch.equal(exchange.sent(0), row) and torch.equal(exchange.decode(), row)
    assert not exchange.state


def test_a_switch_runs_the_first_exchange_until_it_is_told_and_then_gives_it_up():
    channel, first, made = Channel(Workers(local=2)), True, []

    def make() -> DenseMean:
        made.append(weakref.ref(exchange := DenseMean(channel, SIZE)))
        return exchange

    exchange = Switch(make, ScaledSignMean(channel, SIZE), lambda: first)
    rows = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        for local, row in enumerate(rows):
            exchange.encode(local, row)
        exchange.run(0)
        return exchange.decode()

    assert torch.equal(run(), rows.mean(0)) and torch.equal(run(), rows.mean(0))
    assert not exchange.state["error"].any()
    first = False
    assert torch.equal(exchange.decode(), rows.mean(0))  # the latest answer is still that
    answer = run()
    assert answer.abs().unique().numel() == 2 and exchange.state["error"].any()
    assert len(made) == 1 and made[0]() is None
    first = True  # of an older checkpoint
    assert torch.equal(run(), rows.mean(0))


def test_a_tracking_vote_goes_on_counting_the_absent():
    channel, rows = Channel(Workers(local=3)), 2.0 * votes(3) - 1  # sizes of 1 are followed exactly
    exchange = TrackingVote(channel, D)
    assert torch.equal(ask(exchange, rows), rows.sum(0).sign())
    channel.set_participants([1])
    exchange.encode(1, torch.nn.functional.pad(-rows[1], (0, exchange.numel - D)))
    exchange.run(1)
    assert torch.equal(exchange.decode()[:D], (rows[0] - rows[1] + rows[2]).sign())
    assert torch.equal(exchange.state["estimate"][:, :D], torch.stack([rows[0], -rows[1], rows[2]]))
    assert not exchange.state["estimate"][:, D:].any()


def test_a_tracking_vote_of_exactly_zero_goes_back_and_forth():
    exchange, row = TrackingVote(Channel(Workers(local=2)), D), 2.0 * votes(1)[0] - 1
    assert torch.equal(ask(exchange, torch.stack([row, row])), row)
    nobody = torch.stack([row, -row])
    assert torch.equal(ask(exchange, nobody), -row)
    assert torch.equal(ask(exchange, nobody), row)


@pytest.mark.parametrize("entries", [0, 1, 40, D])
def test_sparse_mean(entries):
    n = 4
    exchange = SparseMean(Channel(Workers(local=n)), D)
    dense = torch.zeros(n, D)
    for i in range(n):
        generator = torch.Generator().manual_seed(i)
        indices = torch.randperm(D, generator=generator)[:entries].sort().values
        dense[i, indices] = torch.randn(entries, generator=generator)
        exchange.encode(i, indices, dense[i, indices])
    exchange.run(0)
    torch.testing.assert_close(exchange.decode()[:D], dense.mean(0))


class TooManyEntries(Channel):
    """Delivers the announcement of entries that do not come."""

    def scatter(self, parts, out=None):
        received = super().scatter(parts, out).clone()
        received[-1, 0, 3] = 1  # of the number of entries, the highest byte
        return received


class OtherPlaces(Sparse):
    """Writes entries with indices behind the end of the slice."""

    def encode(self, values):
        return super().encode((values[0] + 10**6, values[1]))


@pytest.mark.parametrize("lie", ["count", "index"])
def test_entries_that_there_are_not_are_refused(lie):
    channel = TooManyEntries if lie == "count" else Channel
    exchange = SparseMean(channel(Workers(local=2)), D)
    for i in range(2):
        if lie == "index" and i == 1:
            exchange.up = OtherPlaces()
        exchange.encode(i, torch.tensor([3, 60]), torch.tensor([1.0, 2.0]))
    exchange.up = Sparse()
    with pytest.raises(TrainingFailed, match=r"a worker (announced|sent)"):
        exchange.run(0)


@pytest.mark.parametrize(("k", "smooth"), [(1, True), (3, False), (64, False)])
def test_cosines_say_constants_in_one_number_and_anything_in_all(k, smooth):
    """Of tiles of 6 by 7, 7 by 7 and, along a vector, 8 or 7; places between tensors stay 0."""
    matrices, n = [Matrix(0, 273, 13), Matrix(320, 359, 1)], 2
    exchange = CosineTopKMean(Channel(Workers(local=n)), 384, matrices, 8, k, 32)
    rows = torch.randn(n, 384, generator=torch.Generator().manual_seed(k))
    if smooth:
        rows = torch.arange(1.0, n + 1).unsqueeze(1).repeat(1, 384)
    rows[:, 273:320] = rows[:, 359:] = 0
    coefficients = [exchange.transform(row) for row in rows]
    for row, found in zip(rows, coefficients, strict=True):
        torch.testing.assert_close(found.norm(), row.norm())
    for i, found in enumerate(coefficients):
        found -= exchange.encode(i, found)
    exchange.run(0)
    answer, rest = exchange.decode(), sum(found.norm() for found in coefficients)
    if k == 3:
        assert rest > 1
    else:
        assert rest < 1e-4
        torch.testing.assert_close(answer, rows.mean(0))
    assert not answer[273:320].any() and not answer[359:].any()


def test_the_absent_say_nothing_to_everyone():
    channel = Channel(Workers(local=3))
    exchange = TopKMean(channel, 128, [Block(0, 2, 50)], 2, 32)
    channel.set_participants([0, 2])
    for local in (0, 2):
        exchange.encode(local, torch.arange(128.0) * (local + 1))
    exchange.run(0)
    expected = torch.zeros(128)
    expected[[48, 49, 98, 99]] = 2 * torch.tensor([48.0, 49, 98, 99])
    assert torch.equal(exchange.decode(), expected)
    message = 4 * 4 + 6  # values, and a byte for each bit of the four indices
    assert channel.traffic.sent_bytes == channel.traffic.received_bytes == 2 * 2 * message


LOSSY = {"top k": lambda c: TopKMean(c, SIZE, [Block(0, 18, 64)], 5, 2), "low rank": low_rank}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("make", LOSSY.values(), ids=LOSSY)
def test_a_lossy_exchange_returns_what_a_message_says_and_leaves_the_values_alone(make, n):
    assert_lossy(make, n)


def test_the_absent_do_not_count_in_a_ternary_mean_and_do_not_send():
    assert_absent_do_not_count(lambda c: TernaryMean(c, D), torch.int8)


def test_answers_of_a_tracking_vote_have_no_scales():
    exchange = TrackingVote(Channel(Workers(local=2)), D, [(0, 100), (128, 130), (192, D)])
    assert exchange.down.nbytes(512) == 64
