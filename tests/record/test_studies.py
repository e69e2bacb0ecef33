"""Runs of a study in one file are read like directories of runs."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dlion.errors import UserError
from dlion.suite.record.runs import Run, RunRecord
from dlion.suite.record.studies import PACKED, add_to_packed, find_runs, pack, read_packed

PARTS = ("metrics", "events", "summary", "config", "overrides", "status")


def write(directory, step: int = 1) -> None:
    record = RunRecord(directory)
    record.append({"step": step, "train_loss": 0.1 + 0.2, "test_loss": float("nan")})
    record.append({"step": step, "event": "left", "worker": "host-7"})
    record.append({"step": step + 1, "sent_bytes": 2**60, "name": "Übung\u2028"})
    record.finish({"test_loss": 1e-300, "nested": {"list": [1, 1.0, None, True]}})
    (directory / ".hydra").mkdir()
    (directory / ".hydra" / "config.yaml").write_text(
        "rates: {dgc: 1.5e-3}\noptimizer: {name: dgc, lr: '${rates.dgc}', betas: [0.9, 0.99]}\n"
        "output_dir: ${hydra:runtime.output_dir}\nlimit: .inf\n"
    )
    (directory / ".hydra" / "overrides.yaml").write_text("- optimizer=dgc\n- seed=0\n")


@pytest.fixture
def study(tmp_path):
    """A packed file of two runs that are still there as directories."""
    for name, step in (("a", 1), ("b", 5)):
        write(tmp_path / "loose" / name, step)
    (tmp_path / "study").mkdir()
    runs = [(run.directory.name, run) for run in find_runs([tmp_path / "loose"])]
    add_to_packed(tmp_path / "study" / PACKED, runs)
    return tmp_path


def test_a_packed_run_is_what_its_directory_was(study):
    packed, loose = find_runs([study / "study"]), find_runs([study / "loose"])
    assert [run.directory for run in packed] == [study / "study" / PACKED / name for name in "ab"]
    for one, other in zip(packed, loose, strict=True):
        for part in PARTS:
            # as text too: keys in their order, 1 and 1.0 apart
            assert repr(getattr(one, part)) == repr(getattr(other, part)), part
    assert packed[0].config["optimizer"]["lr"] == 1.5e-3
    assert packed[0].config["output_dir"] == "${hydra:runtime.output_dir}"
    assert packed[0].study == "study" and loose[0].study is None


def test_packed_and_loose_runs_are_found_together_and_once(study):
    file = study / "study" / PACKED
    assert len(find_runs([study])) == 4
    assert [run.directory.name for run in find_runs([file, study / "study"])] == ["a", "b"]
    assert len((file.read_text()).splitlines()) == 2
    for line in file.read_text().splitlines():  # what any other tool can read
        assert json.loads(line)["summary"]["test_loss"] == 1e-300


def test_packing_again_gives_the_same_lines(study):
    file = study / "study" / PACKED
    again = "".join(pack(run, run.directory.name) for run in read_packed(file))
    assert again == file.read_text()


def test_a_run_is_added_once_and_behind_the_others(study):
    file = study / "study" / PACKED
    before, (a, b) = file.read_text(), find_runs([study / "loose"])
    other = replace(a, metrics=a.metrics[:1])
    for name in ("b", "d"):
        with pytest.raises(UserError, match=r"loose/b is in .*runs.jsonl already, as b"):
            add_to_packed(file, [("c", other), (name, b)])
    assert file.read_text() == before
    third = replace(a, metrics=2 * a.metrics)
    add_to_packed(file, [("c", other), ("c", third), ("b", replace(b, metrics=[]))])
    assert file.read_text().startswith(before)
    assert [run.directory.name for run in read_packed(file)] == ["a", "b", "c", "c-2", "b-2"]


GOOD = {"name": "x", "overrides": [], "config": None, "summary": None, "metrics": []}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"name": "x", "over', "Unterminated string"),
        ("[1, 2]", "not a JSON object"),
        ("[" * 100_000, "recursion"),
        ("{}", "name is missing or not a str"),
        (json.dumps(GOOD | {"name": "../x"}), "no file name"),
        (json.dumps(GOOD | {"name": ""}), "no file name"),
        (json.dumps(GOOD | {"metrics": {}}), "metrics is missing or not a list"),
        (json.dumps(GOOD | {"metrics": [1]}), "metrics are not a list of objects"),
        (json.dumps(GOOD | {"summary": 3}), "summary is missing or not a dict"),
        (json.dumps(GOOD | {"config": "lr"}), "config is missing or not a dict"),
        (json.dumps(GOOD | {"name": "a"}), "a second run called a"),
    ],
)
def test_a_damaged_line_is_named_in_one_sentence(study, line, reason):
    file = study / "study" / PACKED
    file.write_text(f"{file.read_text()}{line}\n")
    sentence = rf"runs.jsonl, line 3 is no packed run \(.*({reason})"
    with pytest.raises(UserError, match=sentence) as caught:
        find_runs([study])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_of_many_damaged_lines_the_first_is_named(study):
    file, told = study / "study" / PACKED, []
    good = len(find_runs([study]))
    file.write_text(file.read_text() + 9 * "{}\n")
    assert len(find_runs([study], left_out=lambda place, reason: told.append(reason))) == good
    assert len(told) == 1 and "line 3 and 8 more are no packed runs (name is missing" in told[0]


def test_a_file_that_is_no_text_is_named(study):
    (study / "study" / PACKED).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is not a file of packed runs .*, as it is not text"):
        find_runs([study / "study"])


def test_what_a_packed_file_says_is_never_looked_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", "hunter2")
    config = {"optimizer": {"lr": "${oc.env:PLANTED}", "_target_": "os.abort"}}
    (tmp_path / PACKED).write_text(json.dumps(GOOD | {"config": config}) + "\n")
    assert find_runs([tmp_path])[0].config == config


def test_an_unfinished_run_may_be_packed_too(tmp_path):
    run = Run(tmp_path, [{"step": 1}], None, None)
    add_to_packed(tmp_path / PACKED, [("x", run)])
    (read,) = read_packed(tmp_path / PACKED)
    assert not read.finished and read.status == "stopped" and read.metrics == [{"step": 1}]


def test_what_may_not_be_read_is_said():
    with tempfile.TemporaryDirectory() as folder:  # one that others than root may enter
        root, told = Path(folder), {}
        root.chmod(0o755)
        for name in ("closed", "file", "whole"):
            write(root / name)
        (root / "closed").chmod(0)
        (root / "file" / "summary.json").chmod(0)
        if is_root := os.geteuid() == 0:
            os.seteuid(65534)
        try:
            found = find_runs([root], left_out=lambda place, reason: told.update({place: reason}))
        finally:
            if is_root:
                os.seteuid(0)
            (root / "closed").chmod(0o700)
    assert [run.directory.name for run in found] == ["whole"]
    assert told.keys() == {root / "closed", root / "file"}
    assert all("Permission denied" in reason for reason in told.values())
