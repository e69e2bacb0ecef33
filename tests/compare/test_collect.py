"""The table of runs has a row for each, whatever became of it."""

import csv
import io
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from dlion.suite.compare.collect import main
from dlion.suite.record.runs import record_failure
from dlion.suite.record.studies import PACKED, add_to_packed, find_runs
from tests.compare.runs import write_run


@pytest.fixture
def run_collect(command, monkeypatch):
    monkeypatch.setenv(
        "PATH", str(Path(sys.executable).parent)
    )  # SLURM, if it is here, is not asked
    return partial(command, main)


@pytest.fixture
def collect(run_collect):
    def rows(*arguments) -> dict[str, dict[str, str]]:
        """The rows, by the name of their directory."""
        done = run_collect(*arguments)
        assert done.returncode == 0, done.stderr
        table = csv.DictReader(io.StringIO(done.stdout))
        return {row["directory"].rpartition("/")[2]: row for row in table}

    return rows


def test_runs_without_a_summary_tell_what_they_have(tmp_path, collect):
    for seed in range(4):
        write_run(tmp_path, "g_lion", seed)
    running, silent, broken = (tmp_path / f"g_lion-{seed}-0.001" for seed in (1, 2, 3))
    for directory in (running, silent, broken):
        (directory / "summary.json").unlink()
    for directory in (silent, broken):  # they died before their first line
        (directory / "metrics.jsonl").unlink()
    os.utime(silent / ".hydra" / "config.yaml", (0, 0))
    record_failure(broken, 'it said: "no", twice\nand more')
    rows = collect(tmp_path)
    statuses = {name: row["status"] for name, row in rows.items()}
    assert list(statuses.values()) == ["finished", "running", "stopped", "failed"]
    row = rows[running.name]
    assert (row["optimizer"], row["model"], row["dataset"]) == ("g_lion", "m", "d")
    assert (row["workers"], row["seed"], row["step"]) == ("8", "1", "20")
    assert (row["test_accuracy"], row["test_loss"]) == ("0.71", "1.0")
    assert float(row["sent_bytes_per_step"]) == 500_000
    assert rows[silent.name]["optimizer"] == "g_lion" and not rows[silent.name]["step"]
    assert rows[broken.name]["failure"] == 'it said: "no", twice\nand more'


def test_damaged_lines_of_a_packed_file_are_listed_once(tmp_path, run_collect):
    (tmp_path / PACKED).write_text('{"name": 1}\n{"name": 2}\n')
    done = run_collect(tmp_path)
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert "line 1 and 1 more are no packed runs" in row["failure"]


def submit(sweep, job: str, launcher: str = "SlurmLauncher", **sweeper) -> None:
    """What hydra-submitit-launcher leaves of a job of a sweep."""
    folder = sweep / ".submitit" / job
    folder.mkdir(parents=True)
    (folder / f"{job}_submitted.pkl").write_bytes(b"to be run, never read")
    hydra = {
        "launcher": {"_target_": f"launchers.{launcher}"},
        "sweeper": {"params": {"optimizer": "g_lion,dlion_avg"}, "max_batch_size": None} | sweeper,
        "overrides": {"task": ["seed=0,1", "workers=4", "optimizer=dgc"]},
    }
    (sweep / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))


def begin(sweep, job: str) -> None:
    """A finished run in a job."""
    write_run(sweep, "g_lion", 0)
    hydra = {"launcher": {"_target_": "launchers.SlurmLauncher"}, "job": {"id": job}}
    file = sweep / "g_lion-0-0.001" / ".hydra" / "hydra.yaml"
    file.write_text(yaml.safe_dump({"hydra": hydra}))


def test_jobs_that_never_began_are_there(tmp_path, collect):
    for job in ("7_0", "7_1"):
        submit(tmp_path, job)
    rows = collect(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "submitted")
    typed = {name: row["overrides"] for name, row in rows.items()}
    assert typed == {
        "7_0": "optimizer=dgc seed=0 workers=4",
        "7_1": "optimizer=dgc seed=1 workers=4",
    }
    begin(tmp_path, "9_0")  # started again, with a new number
    assert list(collect(tmp_path)) == ["g_lion-0-0.001", "7_1"]
    submit(tmp_path, "11_0", max_batch_size=1)
    rows = collect(tmp_path)
    assert list(rows) == ["g_lion-0-0.001", "7_1", "11_0"] and not rows["11_0"]["overrides"]


def test_processes_of_this_machine_are_no_slurm_jobs(tmp_path, collect):
    submit(tmp_path, "1234", "LocalLauncher")
    assert collect(tmp_path) == {}


def test_what_cannot_be_collected_is_said(tmp_path, run_collect, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, sentence in (
        ([], "outputs is not a directory"),
        ([tmp_path], "holds no run"),
        ([tmp_path / "nowhere"], "is not a directory"),
    ):
        done = run_collect(*arguments)
        assert done.returncode == 2 and sentence in done.stderr and not done.stdout


def test_packed_runs_are_collected(tmp_path, collect):
    write_run(tmp_path / "loose", "g_lion", 0)
    (run,) = find_runs([tmp_path / "loose"])
    (tmp_path / "packed").mkdir()
    add_to_packed(tmp_path / "packed" / PACKED, [("one", run)])
    expected = collect(tmp_path / "loose")["g_lion-0-0.001"]
    row = collect(tmp_path / "packed")["one"]
    assert row["directory"].endswith("packed/runs.jsonl/one")
    assert row | {"directory": ""} == expected | {"directory": ""}
