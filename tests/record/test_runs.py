"""The record of a run survives what may happen to it."""

import json
import os
from pathlib import Path

import pytest

from dlion.errors import UserError
from dlion.suite.record.runs import RunRecord, holds_run, load_run, record_failure
from dlion.suite.record.studies import find_runs


def test_what_is_written_is_read(tmp_path):
    record = RunRecord(tmp_path)
    assert holds_run(tmp_path)
    record.append({"step": 1, "train_loss": 2.0})
    record.append({"step": 2, "train_loss": float("nan")})
    assert load_run(tmp_path).metrics[1] == {"step": 2, "train_loss": None}
    assert not load_run(tmp_path).finished
    record.finish({"test_accuracy": 0.5, "test_loss": float("inf")})
    run = load_run(tmp_path)
    assert run.finished and run.summary == {"test_accuracy": 0.5, "test_loss": None}
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "summary.json"}


def test_the_status_of_a_run(tmp_path):
    record = RunRecord(tmp_path / "a")
    assert load_run(tmp_path / "a").status == "running"
    os.utime(tmp_path / "a" / "metrics.jsonl", (0, 0))
    assert load_run(tmp_path / "a").status == "stopped"
    record_failure(tmp_path / "a", "boom")
    record_failure(tmp_path / "a", "an echo of it")
    run = load_run(tmp_path / "a")
    assert run.status == "failed" and run.failure == "boom"
    (tmp_path / "b").mkdir()
    record_failure(tmp_path / "b", "before the first line")
    assert [run.status for run in find_runs([tmp_path])] == ["failed", "failed"]
    record.finish({})
    assert load_run(tmp_path / "a").status == "finished"


def test_a_torn_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "tr')
    assert load_run(tmp_path).metrics == [{"step": 1}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"test_'),
        (".hydra/config.yaml", "lr: [1"),
        (".hydra/config.yaml", "lr: '${oc.select:'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text):
    RunRecord(tmp_path).append({"step": 1})
    (tmp_path / ".hydra").mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name} is damaged \("):
        find_runs([tmp_path])


def test_runs_are_found_at_any_depth(tmp_path):
    for name in ("b", "a/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert [r.directory for r in find_runs([tmp_path, tmp_path / "b"])] == [
        tmp_path / "a" / "c",
        tmp_path / "b",
    ]


@pytest.mark.parametrize(("name", "sentence"), [("nowhere", "is not a directory"), ("", "no run")])
def test_paths_without_runs_are_named(tmp_path: Path, name, sentence):
    with pytest.raises(UserError, match=sentence):
        find_runs([tmp_path / name])
