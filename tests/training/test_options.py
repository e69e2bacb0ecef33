"""Settings of the loop: accumulation, precision, faults, and the theory's quantities."""

import itertools
import math
import re

import pytest
import torch
from safetensors.torch import load_file

from dlion.suite.training.faults import Participation
from dlion.suite.training.local_steps import LocalSteps
from tests.support.runs import record, train

SETTINGS = ["dataset=digits", "model=linear", "logger=none", "workers=2", "processes=1"]


def trained(directory, *overrides: str):
    """Return summary and rows of a run."""
    train(*SETTINGS, *overrides, f"output_dir={directory}", code=0)
    return record(directory)


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    settings = ["optimizer=g_adamw", "steps=20", "batch_size=16"]
    whole, _ = trained(tmp_path / "whole", *settings)
    parts, _ = trained(tmp_path / "parts", *settings, "accumulate=4")
    assert parts["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)
    assert parts["sent_bytes_per_step"] == whole["sent_bytes_per_step"]


@pytest.mark.slow
def test_label_smoothing_is_in_the_training_loss_alone(tmp_path):
    summary, _ = trained(
        tmp_path, "optimizer=g_adamw", "steps=20", "optimizer.lr=3e-2", "label_smoothing=0.9"
    )
    # with 10 classes, a label is right by 0.1 + 0.09 and any other by 0.09: their entropy
    least = -0.19 * math.log(0.19) - 9 * 0.09 * math.log(0.09)
    assert summary["train_loss"] >= least - 1e-3
    assert summary["test_accuracy"] > 0.5


@pytest.mark.slow
def test_rows_have_the_rate_of_their_step_and_the_norm_of_what_is_sent(tmp_path):
    settings = ["steps=2", "log_every=1", "schedule.warmup_steps=2", "optimizer.lr=4e-3"]
    _, honest = trained(tmp_path / "honest", *settings)
    assert [row["learning_rate"] for row in honest] == [2e-3, 4e-3]
    _, loud = trained(tmp_path / "loud", *settings, "faults.byzantine=2", "faults.scale=8")
    assert loud[0]["gradient_norm"] == 8 * honest[0]["gradient_norm"] > 0


@pytest.mark.slow
def test_a_process_may_compute_with_several_threads(tmp_path):
    summary, _ = trained(tmp_path, "model=linear", "steps=1", "threads=2")
    assert summary["sent_bytes_per_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lion_cub", "signum_avg"])
def test_a_grid_says_what_travels_along_each_dimension_and_changes_no_bit(tmp_path, method):
    settings = [*SETTINGS, f"optimizer={method}", "workers=8", "processes=2", "steps=3"]
    train(*settings, f"output_dir={tmp_path / 'direct'}", code=0)
    grid = ["optimizer.exchange=grid", f"output_dir={tmp_path / 'grid'}"]
    done = train(*settings, *grid, code=0)
    assert re.search(
        r"on the grid +\S+ k?B to workers 1 apart, \S+ k?B to workers \d apart", done.stdout
    )
    runs = [record(tmp_path / name)[0] for name in ("direct", "grid")]
    assert len({summary["parameters_sha256"] for summary in runs}) == 1


@pytest.mark.slow
def test_precisions_learn_alike(tmp_path):
    settings = [*SETTINGS, "optimizer=dlion_mavo", "optimizer.lr=3e-3", "steps=40"]
    summaries, said = [], []
    for precision in ("float32", "bf16_mixed", "bf16"):
        directory = tmp_path / precision
        done = train(*settings, f"precision={precision}", f"output_dir={directory}", code=0)
        summaries.append(record(directory)[0])
        said += re.findall(r"^precision +(\w+)", done.stdout, re.M)
    assert said == ["bf16_mixed", "bf16"]
    assert len({summary["parameters_sha256"] for summary in summaries}) == 3
    losses = [summary["test_loss"] for summary in summaries]
    assert max(losses) < 2.0 and max(losses) < 1.2 * min(losses)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["g_lion", "dlion_mavo", "dlion_avg"])
def test_parameters_are_drawn_into_the_box(tmp_path, method):
    """Theorem 3.4 of arXiv 2404.00438: the distance shrinks by 1 - lr wd a step, at least."""
    rate, decay = 1e-3, 50
    _, rows = trained(
        tmp_path,
        f"optimizer={method}",
        f"optimizer.lr={rate}",
        f"optimizer.weight_decay={decay}",
        "schedule=constant",
        "steps=80",
        "eval_every=10",
        "box=true",
    )
    rows = [row for row in rows if "kkt_score" in row]
    assert rows[0]["step"] == 1 and rows[0]["box_distance"] > 0
    for before, after in itertools.pairwise(rows):
        steps = after["step"] - before["step"]
        assert after["box_distance"] <= (1 - rate * decay) ** steps * before["box_distance"] + 1e-6
    assert rows[-1]["outside_box"] < 0.5 * rows[0]["outside_box"]


def test_local_steps_send_the_mean_gradient_of_their_path():
    torch.manual_seed(0)
    model, path = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    path.load_state_dict(model.state_dict())
    batches = [torch.randn(4, 5) for _ in range(3)]
    local, sgd = LocalSteps(model, 3, lr=0.1), torch.optim.SGD(path.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    with local.path():
        for turn, x in enumerate(batches):
            if turn:
                local.move()
            (model(x).square().mean() / 3).backward()
            sgd.zero_grad()
            path(x).square().mean().backward()
            sgd.step()
    assert torch.equal(model.weight, start)
    torch.testing.assert_close(model.weight.grad, (start - path.weight.detach()) / (3 * 0.1))


@pytest.mark.slow
def test_byzantine_workers_send_the_opposite(tmp_path):
    settings = ["steps=1", "optimizer=dlion_mavo", "optimizer.weight_decay=0", "batch_size=16"]
    moved = {}
    for name, more in (
        ("start", ["optimizer.lr=0"]),
        ("true", []),
        ("byzantine", ["faults.byzantine=2"]),
    ):
        trained(tmp_path / name, *settings, *more)
        saved = tmp_path / name / "checkpoint" / "step-00000001" / "common.safetensors"
        moved[name] = load_file(saved)["0.parameters"]
    honest, false = ((moved[name] - moved["start"]).sign() for name in ("true", "byzantine"))
    # the opposite where both workers agree; ties go to the owner's last answer, +1, either way
    opposite = honest == -false
    assert opposite.float().mean() > 0.4
    assert (honest[~opposite] == false[~opposite]).all()


def test_participation_is_drawn_anew_and_nobody_is_left_alone():
    steps = [Participation(10, 0.3, 0.0, seed=1).at(step) for step in range(200)]
    assert {len(participants) for participants in steps} == {3}
    assert {worker for participants in steps for worker in participants} == set(range(10))
    dropping = [Participation(4, 1.0, 0.9, seed=1).at(step) for step in range(200)]
    assert min(map(len, dropping)) == 1 and sum(map(len, dropping)) < 400
    assert Participation(4, 1.0, 0.0, seed=1).at(7) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["adamw", "lion"])
def test_what_is_not_finite_moves_no_worker(tmp_path, monkeypatch, inner):
    """Lion makes a sign of NaN and of inf, so what it sends would not show them."""
    settings = [
        *("dataset=digits", "logger=none", "workers=2", "processes=2", "steps=4", "batch_size=8"),
        *("optimizer=diloco", "optimizer.local_steps=2", f"optimizer.inner={inner}"),
        "check_replicas_every=1",
        "model._target_=tests.launch.faulty.model",
    ]
    monkeypatch.setenv("FAULT", "nan:3")  # the first local step of the second exchange
    stopped = train(*settings, f"output_dir={tmp_path / 'stopped'}", code=1)
    assert "is not finite on worker 1 in step 3" in stopped.stderr
    train(*settings, "nonfinite=skip", f"output_dir={tmp_path / 'skipped'}", code=0)
    summary, rows = record(tmp_path / "skipped")
    assert rows[-1]["skipped"] == 1 and math.isfinite(summary["test_loss"])
    latest = max((tmp_path / "skipped" / "checkpoint").glob("step-*"))
    states = [load_file(file) for file in latest.glob("*.safetensors")]
    assert all(values.isfinite().all() for state in states for values in state.values())


@pytest.mark.slow
def test_a_model_that_the_last_step_makes_infinite_is_not_finished(tmp_path):
    words = [*SETTINGS, "steps=1", "optimizer.lr=1e38", "optimizer.weight_decay=1e38"]
    failed = train(*words, f"output_dir={tmp_path / 'stopped'}", code=1)
    assert "the model is not finite after the last step" in failed.stderr
    assert not (tmp_path / "stopped" / "summary.json").exists()
    train(*words, "nonfinite=null", f"output_dir={tmp_path / 'kept'}", code=0)
