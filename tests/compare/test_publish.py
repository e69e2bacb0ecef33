"""Published runs tell where they come from."""

import json
import shutil
from functools import partial

import pytest
import yaml

from dlion.suite.compare.publish import main
from dlion.suite.record.studies import find_runs
from tests.compare.runs import write_run


@pytest.fixture
def publish(command):
    return partial(command, main)


def complete(directory, overrides: list[str], **origin) -> None:
    """Give a recorded run its seed, its overrides, and where it comes from."""
    summary = json.loads((directory / "summary.json").read_text())
    seed = int(directory.name.split("-")[1])
    (directory / "summary.json").write_text(json.dumps(summary | {"seed": seed} | origin))
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))


def test_provenance_stands_beside_the_figures(tmp_path, publish):
    sweep, target = tmp_path / "sweep", tmp_path / "published"
    for seed in range(3):
        write_run(sweep, "g_lion", seed)
    versions = {"python": "3.12.1", "torch": "2.12.0"}
    origin = {"commit": "abc+changes", "machine": "Abacus, 4 cores", "versions": versions}
    for seed in (0, 1):
        overrides = ["optimizer=g_lion", f"seed={seed}", "optimizer.betas=[0.9,0.99]"]
        complete(sweep / f"g_lion-{seed}-0.001", overrides, **origin)
    # of an older commit, started by itself
    complete(sweep / "g_lion-2-0.001", ["seed=2", "output_dir=/home/somebody/x"])
    hydra = {
        "sweeper": {"params": {"optimizer": "g_lion"}},
        "overrides": {"task": ["seed=0,1", "optimizer.betas=[0.9,0.99]"]},
    }
    (sweep / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    done = publish(sweep, "-o", target)
    assert done.returncode == 0, done.stderr
    assert (target / "provenance.txt").read_text().splitlines() == [
        "commit    abc+changes (2 of 3 runs)",
        "commit    not recorded (1 of 3 runs)",
        "machine   Abacus, 4 cores (2 of 3 runs)",
        "machine   not recorded (1 of 3 runs)",
        "versions  python 3.12.1, torch 2.12.0 (2 of 3 runs)",
        "versions  not recorded (1 of 3 runs)",
        "command   python train.py -m seed=0,1 'optimizer.betas=[0.9,0.99]' (2 of 3 runs)",
        "command   python train.py seed=2 (1 of 3 runs)",
    ]
    runs = find_runs([target])
    assert [run.directory for run in runs] == [
        target / "runs.jsonl" / f"g_lion-n8-s{seed}" for seed in range(3)
    ]
    for published, loose in zip(runs, find_runs([sweep]), strict=True):
        for part in ("metrics", "summary", "config", "overrides", "status"):
            assert getattr(published, part) == getattr(loose, part)
    assert (target / "curves.png").exists() and "g_lion" in done.stdout
    again = publish(sweep, "-o", target)
    assert again.returncode == 2 and "publish each run once" in again.stderr


def test_runs_published_later_are_behind_the_first(tmp_path, publish):
    for seed in (0, 1):
        write_run(tmp_path, "g_lion", seed)
        run = tmp_path / f"g_lion-{seed}-0.001"
        complete(run, [f"seed={seed}"], commit=f"commit{seed}")
        assert publish(run, "-o", tmp_path / "published").returncode == 0
    text = (tmp_path / "published" / "provenance.txt").read_text()
    assert [block.split()[1] for block in text.split("\n\n")] == ["commit0", "commit1"]
    assert len(find_runs([tmp_path / "published"])) == 2


def test_runs_of_a_sweep_over_settings_keep_the_names_of_their_directories(tmp_path, publish):
    for lr in (1e-3, 1e-2):
        write_run(tmp_path / "sweep", "g_lion", 0, lr=lr)
        complete(tmp_path / "sweep" / f"g_lion-0-{lr}", [f"optimizer.lr={lr}"])
    assert publish(tmp_path / "sweep", "-o", tmp_path / "published").returncode == 0
    names = [run.directory.name for run in find_runs([tmp_path / "published"])]
    assert names == ["g_lion-0-0.001", "g_lion-0-0.01"]


def test_a_run_that_is_not_finished_is_not_published(tmp_path, publish):
    write_run(tmp_path / "runs", "g_lion", 0)
    (tmp_path / "runs" / "g_lion-0-0.001" / "summary.json").unlink()
    done = publish(tmp_path / "runs", "-o", tmp_path / "published")
    assert done.returncode == 2 and "not finished: " in done.stderr
    assert not (tmp_path / "published").exists()


def test_a_run_is_published_once_whatever_it_is_called(tmp_path, publish):
    for lr in (1e-3, 1e-2):
        write_run(tmp_path / "sweep", "g_lion", 0, lr=lr)
        complete(tmp_path / "sweep" / f"g_lion-0-{lr}", [f"optimizer.lr={lr}"])
    first, target = tmp_path / "sweep" / "g_lion-0-0.001", tmp_path / "published"
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    done = publish(first, copy, "-o", target)
    assert done.returncode == 2 and f"{first} is a copy of {copy}" in done.stderr
    assert not target.exists()
    assert publish(first, "-o", target).returncode == 0
    (target / "curves.png").unlink()  # as if the command had been cut off before its end
    whole = (target / "provenance.txt").read_text()
    assert publish(first, "-o", target).returncode == 0 and (target / "curves.png").exists()
    assert (target / "provenance.txt").read_text() == whole and len(find_runs([target])) == 1
    done = publish(tmp_path / "sweep", "-o", target)
    assert done.returncode == 2 and "is in" in done.stderr and "as g_lion-n8-s0: pu" in done.stderr


def test_a_study_has_one_metric(tmp_path, publish):
    for seed, accuracy in enumerate((True, False)):
        write_run(tmp_path, "g_lion", seed, accuracy)
        complete(tmp_path / f"g_lion-{seed}-0.001", [f"seed={seed}"])
    first, second = (tmp_path / f"g_lion-{seed}-0.001" for seed in (0, 1))
    assert publish(first, "-o", tmp_path / "published").returncode == 0
    before = {file: file.read_bytes() for file in (tmp_path / "published").iterdir()}
    done = publish(second, "-o", tmp_path / "published")
    assert done.returncode == 2 and "give runs of one kind" in done.stderr
    assert {file: file.read_bytes() for file in (tmp_path / "published").iterdir()} == before


def test_another_run_of_a_name_gets_a_number(tmp_path, publish):
    for lr in (1e-3, 1e-2, 1e-1):
        write_run(tmp_path, "g_lion", 0, lr=lr)
        complete(tmp_path / f"g_lion-0-{lr}", [f"optimizer.lr={lr}"])
        done = publish(tmp_path / f"g_lion-0-{lr}", "-o", tmp_path / "published")
        assert done.returncode == 0, done.stderr
    names = [run.directory.name for run in find_runs([tmp_path / "published"])]
    assert names == ["g_lion-n8-s0", "g_lion-n8-s0-2", "g_lion-n8-s0-3"]


def test_the_figure_of_a_study_is_of_its_own_runs(tmp_path, publish):
    for method, place in (("dgc", "short"), ("g_lion", "")):
        write_run(tmp_path / method, method, 0)
        complete(tmp_path / method / f"{method}-0-0.001", [])
        done = publish(tmp_path / method, "-o", tmp_path / "published" / place)
        assert done.returncode == 0, done.stderr
    assert "g_lion" in done.stdout and "dgc" not in done.stdout
