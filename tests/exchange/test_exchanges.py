"""Answers of the exchanges, and what ties become."""

import pytest
import torch

from dlion.exchange import (
    Channel,
    DenseMean,
    LevelMean,
    ScaledSignMean,
    Vote,
    WeightedVote,
)
from dlion.workers import Workers
from tests.support.exchanges import SIZE, D, ask, assert_absent_do_not_count, assert_lossy, votes


def vote(n: int, **options) -> Vote:
    return Vote(Channel(Workers(local=n)), D, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("levels", [2, 3, 15, 255])
def test_sign_of_the_sum(n, levels):
    rows = votes(n, levels)
    balance = (2 * rows - (levels - 1)).sum(0)
    expected = {"zero": balance.sign(), "plus": balance.sign().where(balance != 0, 1)}
    for ties, answer in expected.items():
        exchange = vote(n, levels=levels, ties=ties)
        values = rows.bool() if levels == 2 else rows.int()
        assert torch.equal(ask(exchange, values), answer.float())


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
def test_mean_of_signs(n):
    rows = votes(n)
    answer = ask(LevelMean(Channel(Workers(local=n)), D), rows.bool())
    torch.testing.assert_close(answer, (2 * rows - 1).float().mean(0))


def test_ties_alternate_with_the_step():
    rows = torch.stack([torch.ones(D), torch.zeros(D)]).bool()
    exchange = vote(2, ties="alternate")
    assert (ask(exchange, rows, step=0) == 1).all()
    assert (ask(exchange, rows, step=1) == -1).all()


def test_random_ties_are_fair_and_repeatable():
    rows = torch.stack([torch.ones(D), torch.zeros(D)]).bool()
    first = ask(vote(2, ties="random", seed=1), rows)
    assert abs(first.mean().item()) < 0.2
    assert torch.equal(ask(vote(2, ties="random", seed=1), rows), first)
    assert not torch.equal(ask(vote(2, ties="random", seed=1), rows, step=1), first)


def test_previous_ties_repeat_the_last_answer():
    exchange = vote(2, ties="previous")
    clear = votes(1).bool().repeat(2, 1)
    tied = torch.stack([torch.ones(D), torch.zeros(D)]).bool()
    assert (ask(exchange, tied) == 1).all()
    answer = ask(exchange, clear)
    assert torch.equal(ask(exchange, tied), answer)


def test_ties_cost_bits_only_for_zero_and_even_n():
    assert vote(4, ties="zero").down.bits == 1.6
    assert vote(3, ties="zero").down.bits == 1
    assert vote(4, ties="random").down.bits == 1


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("spans", [None, [(0, 100), (128, 130), (192, D)]])
def test_scaled_signs_of_equal_sizes_are_exact_whatever_the_padding(n, spans):
    """So each tensor has its scale, no padding is in it, and none gets a value or an error."""
    exchange = ScaledSignMean(Channel(Workers(local=n)), D, spans)
    values = torch.zeros(exchange.numel)
    for size, (start, stop) in enumerate(spans or [(0, D)]):
        values[start:stop] = size * (2 * votes(1)[0, start:stop] - 1)
    rows = values.repeat(n, 1)
    for local, row in enumerate(rows):
        assert torch.equal(exchange.encode(local, row), values)
    exchange.run(0)
    assert torch.equal(exchange.decode(), values)
    assert not exchange.state["error"].any()


def test_a_message_has_as_many_scales_as_the_slice_with_most_pieces():
    spans = [(0, 100), (128, 130), (192, D)]
    for n, scales in ((1, 3), (2, 3), (4, 3), (8, 2)):  # of 1024, 512, 256 and 128 elements
        exchange = ScaledSignMean(Channel(Workers(local=n)), D, spans)
        signs = exchange.slice // 8
        assert exchange.up.nbytes(exchange.slice) == 4 * scales + signs
        exchange.encode(0, torch.zeros(exchange.numel))
        exchange.run(0)
        assert exchange.answer.shape == (n, 4 * scales + signs)


@pytest.mark.parametrize("threads", [2, 4])
def test_scales_do_not_depend_on_the_number_of_threads(threads):
    size = 10**6
    row = torch.randn(size, generator=torch.Generator().manual_seed(0))
    row = torch.nn.functional.pad(row, (0, -size % 64))
    before, answers = torch.get_num_threads(), []
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            exchange = ScaledSignMean(
                Channel(Workers()), size, [(0, 7), (64, 70_000), (70_016, size)]
            )
            exchange.encode(0, row)
            exchange.run(0)
            answers.append(exchange.decode())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*answers)


def test_dense_mean_adds_in_the_order_of_the_workers():
    rows = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    expected = rows[0].clone()
    for row in rows[1:]:
        expected += row
    answer = ask(DenseMean(Channel(Workers(local=5)), D), rows)
    assert torch.equal(answer, expected / 5)


def test_a_weighted_vote_learns_whom_to_trust():
    exchange = WeightedVote(Channel(Workers(local=4)), D)
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        truth = torch.randint(2, (D,), generator=generator).bool()
        noise = torch.randint(2, (D,), generator=generator).bool()
        # two that know, one that guesses, one that lies half of the time
        rows = torch.stack([truth, truth, noise, torch.where(noise, truth, ~truth)])
        answer = ask(exchange, rows, step)
    assert torch.equal(answer > 0, truth)
    lies = ask(exchange, torch.stack([truth, truth, ~truth, ~truth]), step)
    assert torch.equal(lies > 0, truth)  # two against two
    plain = ask(vote(4, ties="plus"), torch.stack([truth, truth, ~truth, ~truth]))
    assert (plain == 1).all()


@pytest.mark.parametrize("n", [1, 3])
def test_scaled_signs_return_what_a_message_says_and_leave_the_values_alone(n):
    assert_lossy(lambda c: ScaledSignMean(c, SIZE), n)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda c: DenseMean(c, D), torch.float32),
        (lambda c: Vote(c, D), torch.bool),
        (lambda c: Vote(c, D, ties="zero"), torch.bool),
        (lambda c: LevelMean(c, D), torch.bool),
    ],
)
def test_the_absent_do_not_count_and_do_not_send(make, dtype):
    assert_absent_do_not_count(make, dtype)
