"""Settings of the loop: accumulation, precision, faults, and the theory's quantities."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

from dlion.training.local_steps import LocalSteps
from dlion.training.participation import Participation

SETTINGS = ["dataset=digits", "model=linear", "logger=none", "workers=2", "processes=1"]


@pytest.fixture
def train(train_py, tmp_path):
    def run(name: str, *overrides: str) -> tuple[dict, list[dict]]:
        out = tmp_path / name
        done = train_py(*SETTINGS, *overrides, f"output_dir={out}")
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return json.loads((out / "summary.json").read_text()), rows

    return run


def test_accumulated_gradients_are_those_of_the_whole_batch(train):
    settings = ["optimizer=g_adamw", "steps=20", "batch_size=16"]
    whole, _ = train("whole", *settings)
    parts, _ = train("parts", *settings, "accumulate=4")
    assert parts["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)
    assert parts["sent_bytes_per_step"] == whole["sent_bytes_per_step"]


def test_precisions_learn_alike(train):
    settings = ["optimizer=dlion_mavo", "optimizer.lr=3e-3", "steps=40", "model=vit_tiny"]
    found = {p: train(p, *settings, f"precision={p}")[0] for p in ("float32", "bf16_mixed", "bf16")}
    assert len({summary["parameters_sha256"] for summary in found.values()}) == 3
    losses = [summary["test_loss"] for summary in found.values()]
    assert max(losses) < 2.0 and max(losses) < 1.2 * min(losses)


@pytest.mark.parametrize("method", ["g_lion", "dlion_mavo", "dlion_avg"])
def test_parameters_are_drawn_into_the_box(train, method):
    """Theorem 3.4 of arXiv 2404.00438: the distance shrinks by 1 - lr wd a step, at least."""
    rate, decay = 1e-3, 50
    _, rows = train(
        *(method, f"optimizer={method}", f"optimizer.lr={rate}", f"optimizer.weight_decay={decay}"),
        *("model=vit_tiny", "schedule=constant", "steps=80", "eval_every=10", "box=true"),
    )
    rows = [row for row in rows if "kkt_score" in row]
    distances = [row["box_distance"] for row in rows]
    assert distances[0] > 0
    for before, after in itertools.pairwise(distances):
        assert after <= (1 - rate * decay) ** 10 * before + 1e-6
    assert rows[-1]["outside_box"] < 0.5 * rows[0]["outside_box"]


def test_wrong_values_are_one_clear_line(train_py):
    for overrides, sentence in (
        (["accumulate=64"], "type accumulate=31 or less"),
        (["precision=fp16"], "choose float32, bf16_mixed, bf16"),
        (["box=true", "optimizer.weight_decay=0"], "type optimizer.weight_decay=1"),
    ):
        done = train_py(*SETTINGS, *overrides)
        assert done.returncode == 2 and sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_local_steps_say_the_mean_gradient_of_their_path():
    torch.manual_seed(0)
    model, path = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    path.load_state_dict(model.state_dict())
    batches = [torch.randn(4, 5) for _ in range(3)]
    local, sgd = LocalSteps(model, 3, lr=0.1), torch.optim.SGD(path.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    local.begin()
    for turn, x in enumerate(batches):
        if turn:
            local.move()
        (model(x).square().mean() / 3).backward()
        sgd.zero_grad()
        path(x).square().mean().backward()
        sgd.step()
    local.end()
    assert torch.equal(model.weight, start)
    torch.testing.assert_close(model.weight.grad, (start - path.weight.detach()) / (3 * 0.1))


def test_liars_say_the_opposite(train, tmp_path):
    settings = ["steps=1", "optimizer=dlion_mavo", "optimizer.weight_decay=0", "batch_size=16"]
    moved = {}
    for name, more in (
        ("start", ["optimizer.lr=0"]),
        ("true", []),
        ("lie", ["faults.byzantine=2"]),
    ):
        train(name, *settings, *more)
        saved = tmp_path / name / "checkpoint" / "step-00000001" / "common.safetensors"
        moved[name] = load_file(saved)["0.parameters"]
    honest, lied = ((moved[name] - moved["start"]).sign() for name in ("true", "lie"))
    # the opposite where both workers agree; ties go to the owner's last answer, +1, either way
    opposite = honest == -lied
    assert opposite.float().mean() > 0.4
    assert (honest[~opposite] == lied[~opposite]).all()


def test_attendance_is_drawn_anew_and_nobody_is_left_alone():
    steps = [Participation(10, 0.3, 0.0, seed=1).at(step) for step in range(200)]
    assert {len(participants) for participants in steps} == {3}
    assert {worker for participants in steps for worker in participants} == set(range(10))
    dropping = [Participation(4, 1.0, 0.9, seed=1).at(step) for step in range(200)]
    assert min(map(len, dropping)) == 1 and sum(map(len, dropping)) < 400
    assert Participation(4, 1.0, 0.0, seed=1).at(7) == [0, 1, 2, 3]
