"""Published runs tell where they come from."""

import csv
import json
import subprocess
import sys

import yaml

from tests.compare.runs import write_run
from tests.conftest import ROOT


def publish(*arguments) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlion.compare.publish", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def complete(directory, overrides: list[str], **origin) -> None:
    """Give a recorded run its seed, its overrides, and where it comes from."""
    summary = json.loads((directory / "summary.json").read_text())
    seed = int(directory.name.split("-")[1])
    (directory / "summary.json").write_text(json.dumps(summary | {"seed": seed} | origin))
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))


def test_provenance_stands_beside_the_figures(tmp_path):
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
    rows = list(csv.DictReader((target / "runs.csv").read_text().splitlines()))
    assert [row["directory"] for row in rows] == [f"runs/g_lion-n8-s{seed}" for seed in range(3)]
    assert [row["commit"] for row in rows] == ["abc+changes", "abc+changes", ""]
    again = publish(sweep, "-o", target)
    assert again.returncode == 2 and "publish each run once" in again.stderr


def test_runs_published_later_are_told_of_behind_the_first(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "g_lion", seed)
        run = tmp_path / f"g_lion-{seed}-0.001"
        complete(run, [f"seed={seed}"], commit=f"commit{seed}")
        assert publish(run, "-o", tmp_path / "published").returncode == 0
    told = (tmp_path / "published" / "provenance.txt").read_text()
    assert [block.split()[1] for block in told.split("\n\n")] == ["commit0", "commit1"]
