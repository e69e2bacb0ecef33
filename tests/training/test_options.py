"""Settings of the loop: accumulation, precision, and the theory's quantities."""

import itertools
import json

import pytest

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
