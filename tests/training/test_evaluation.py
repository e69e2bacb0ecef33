"""An evaluation may be one of a part of the test set, and says how far it is when it takes long."""

import pytest
import torch

from dlion.exchange import Channel
from dlion.suite.data import TextData, next_line
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.training.console import RunConsole
from dlion.suite.training.evaluation import box_state, evaluate
from dlion.workers import Workers


def text() -> TextData:
    """Twelve test batches, each of letters of its own, so that all have other losses."""
    tokens = torch.arange(12 * 8192 + 1) // 8192
    return TextData(tokens, tokens, vocabulary=256, context=8)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Embedding(256, 256)


def result(limit: int | None, workers: Workers | None = None) -> float:
    channel = Channel(workers or Workers(local=5))
    return evaluate(model(), text(), channel, "cpu", limit)["test_loss"]


def test_the_box_has_room_for_what_the_loss_does_not_use():
    used = model()
    both = torch.nn.Sequential(used)
    both.register_parameter("unused", torch.nn.Parameter(torch.full((4,), 9.0)))
    with_it, without = (box_state(net, text(), 0.5, "cpu", 0) for net in (both, used))
    assert with_it["kkt_score"] == without["kkt_score"] and with_it["box_distance"] == 7.0


def results_of_two_processes() -> list[float]:
    join_process_group("gloo", 60)
    return [result(limit, Workers.current(2)) for limit in (None, 3, 7)]


def test_the_batches_of_a_limited_evaluation_are_spread_over_the_test_set():
    def loss(start: int) -> float:
        x, y = text().test_batch(start, start + 1024)
        return text().score(model()(x), y, start)[0].item()

    means = [(loss(0) + loss(4 * 1024) + loss(8 * 1024)) / (3 * 8192)]
    assert result(3) == pytest.approx(means[0])
    assert result(1) == pytest.approx(loss(0) / 8192)
    assert result(12) == result(100) == result(None)


@pytest.mark.slow
def test_a_limited_evaluation_is_the_same_for_every_spread():
    assert run_processes(2, results_of_two_processes) == [result(None), result(3), result(7)]


def results_after_a_death() -> list[float]:
    join_process_group("gloo", 60)
    workers, data, net = Workers.current(), text(), model()
    batches: list[int] = []
    known: dict[int, torch.Tensor] = {}
    if workers.rank == 1:  # it had tested its part as one of three, one of whom has died
        for start in range(0, data.test_size, data.test_batch_size)[1::3]:
            x, y = data.test_batch(start, start + data.test_batch_size)
            known[start] = data.score(net(x), y, start).detach()
    net.register_forward_hook(lambda *_: batches.append(1))
    found: list[float] = []
    for _ in range(2):
        results = evaluate(net, data, Channel(workers), "cpu", known=known)
        found += [results["test_loss"], len(batches)]
    return found


@pytest.mark.slow
def test_what_was_tested_before_a_worker_died_is_not_tested_again():
    loss = result(None)
    assert run_processes(2, results_after_a_death) == [loss, 4, loss, 4]


def test_a_limited_evaluation_of_choices_counts_the_questions_it_asked():
    data = next_line(train=20, test=20)
    found = evaluate(model(), data, Channel(Workers(local=3)), "cpu", limit=4)
    assert round(8 * found["test_accuracy"]) == 8 * found["test_accuracy"]  # four batches of two


def test_a_long_evaluation_shows_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("dlion.suite.training.console.QUIET_INTERVAL", -1.0)
    console = RunConsole(steps=1, active=True)
    evaluate(model(), text(), Channel(Workers(local=2)), "cpu", watch=console.watch)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 12 and shown[6] == "evaluating: 50% of the test set"
