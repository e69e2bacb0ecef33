"""train.py as a user types it: one clear line for a wrong value, records for a right one."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.support.runs import TORCHRUN, start, train

pytestmark = pytest.mark.slow

QUICK = ["logger=none", "steps=4", "eval_every=4"]


def test_device_cuda_without_one():
    run = train("device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 2 and "type device=cpu" in run.stderr


def test_a_folder_with_wrong_columns(tmp_path):
    for split in ("train", "test"):
        table = pyarrow.table({"image": [b""], "label": [1]})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-0.parquet")
    run = train("dataset=cifar10", f"dataset.path={tmp_path}")
    assert run.returncode == 2
    assert "has the columns image, label: img and label are needed" in run.stderr


def test_a_run_is_recorded_and_not_overwritten(tmp_path):
    out = tmp_path / "run"
    run = train("steps=4", "workers=4", "processes=2", "profile=true", f"output_dir={out}")
    assert run.returncode == 0, run.stderr
    assert "1/3" in run.stdout and "collectives" in run.stdout
    assert f"wandb sync {out}/wandb/offline-run" in run.stdout
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4 and 0 <= rows[-1]["test_accuracy"] <= 1
    assert rows[-1].keys() >= {"epoch", "train_loss", "seconds", "sent_bytes", "received_bytes"}
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == [
        "optimizer",
        "model",
        "dataset",
        "workers",
        "processes",
        "steps",
        "batch_size",
        "seed",
        "device",
        "parameters",
        "test_accuracy",
        "test_loss",
        "train_loss",
        "paper_bits_up",
        "paper_bits_down",
        "state_bytes_per_parameter",
        "sent_bytes_per_step",
        "seconds",
        "seconds_per_step",
        "nic_bytes",
        "parameters_sha256",
        "model_sha256",
        "commit",
        "machine",
        "versions",
        "date",
    ]
    assert (summary["paper_bits_up"], summary["paper_bits_down"]) == (1, 1)
    profile = json.loads((out / "profile.json").read_text())
    assert all(profile[phase] > 0 for phase in ("forward", "backward", "encode", "vote", "apply"))
    before = (out / ".hydra" / "overrides.yaml").read_text()
    hydra = sorted(p.name for p in (out / ".hydra").iterdir())
    assert hydra == ["config.yaml", "hydra.yaml", "overrides.yaml"]

    here, sweep = f"output_dir={out}", f"hydra.sweep.dir={tmp_path}"
    for typed, code, reason in (
        ([here, "steps=8"], 2, "holds another run"),
        (["-m", sweep, f"hydra.sweep.subdir={out.name}", "steps=8"], 2, "holds another run"),
        (
            [here, "steps=8", "resume=auto"],
            2,
            "is finished, with other settings (workers is 8 here and 4",
        ),
    ):
        again = train(*typed)
        assert again.returncode == code and reason in again.stderr + again.stdout
        assert (out / ".hydra" / "overrides.yaml").read_text() == before
        assert not (out / "failure.txt").exists()


def test_a_run_that_cannot_go_on_says_so_beside_its_own_settings(tmp_path):
    out = tmp_path / "run"
    settings = ["dataset=digits", "workers=2", "processes=1", "steps=4", "logger=none"]
    run = train(*settings, "stop_after=2", f"output_dir={out}")
    assert run.returncode == 75, run.stderr
    before = (out / ".hydra" / "overrides.yaml").read_text()
    sweep = [f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=run", "resume=auto"]
    again = train("-m", *settings, *sweep, "optimizer.lr=0.5")
    changed = "(optimizer.lr is 0.5 here and 0.0015 in the run): type optimizer.lr=0.0015 to resume"
    assert again.returncode == 2 and changed in again.stderr
    assert changed in (out / "failure.txt").read_text()
    assert (out / ".hydra" / "overrides.yaml").read_text() == before


def test_torchrun_slurm_plain_and_the_reference_kernels_give_the_same_bits(tmp_path):
    settings = [*QUICK, "workers=4"]
    train(*settings, "processes=1", f"output_dir={tmp_path / 'plain'}", code=0)
    train(*settings, f"output_dir={tmp_path / 'torchrun'}", under=TORCHRUN, code=0)
    slow = {"DLION_KERNELS": "reference"}
    train(*settings, f"output_dir={tmp_path / 'reference'}", env=slow, code=0)

    tasks = []
    for task in range(2):
        slurm = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "2"}
        slurm |= {"PROCID": str(task), "LOCALID": str(task)}
        env = {f"SLURM_{key}": value for key, value in slurm.items()}
        tasks.append(start(*settings, f"output_dir={tmp_path / 'slurm'}", env=env))
    assert [task.wait(120).returncode for task in tasks] == [0, 0]

    hashes = {
        json.loads((tmp_path / how / "summary.json").read_text())["parameters_sha256"]
        for how in ("plain", "torchrun", "reference", "slurm")
    }
    assert len(hashes) == 1
    for how in ("plain", "torchrun", "slurm"):  # every process wrote to the same place
        assert len(list((tmp_path / how / "checkpoint" / "step-00000004").iterdir())) == 6


@pytest.mark.parametrize("method", ["terngrad", "dgc"])
def test_a_profile_knows_every_phase_of_every_exchange(tmp_path, method):
    settings = [*QUICK, f"optimizer={method}", "workers=2", "processes=2", "profile=true"]
    run = train(*settings, f"output_dir={tmp_path}")
    assert run.returncode == 0, run.stderr
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert all(milliseconds > 0 for milliseconds in profile.values()), profile


def test_a_multirun_keeps_every_run(tmp_path):
    typed = ["workers=2", "-m", *QUICK, "optimizer=g_lion,dlion_avg", "batch_size=4,5000"]
    run = train(*typed, f"hydra.sweep.dir={tmp_path}")
    assert run.returncode == 2 and "batch_size=5000 is more than" in run.stderr
    summaries = [json.loads(p.read_text()) for p in tmp_path.rglob("summary.json")]
    assert {s["optimizer"] for s in summaries} == {"g_lion", "dlion_avg"}
    failures = [p.read_text() for p in tmp_path.rglob("failure.txt")]
    assert len(failures) == 2 and all("batch_size=5000" in reason for reason in failures)


def test_a_recipe_has_settings_for_each_method_and_what_is_typed_wins(tmp_path):
    recipe = ["experiment=dlion_finetune", "optimizer=g_adamw,lion_cub", "optimizer.weight_decay=0"]
    small = ["model.hidden_size=16", "model.num_hidden_layers=1", "workers=2", "processes=1"]
    run = train(*recipe, *small, *QUICK, "steps=1", f"hydra.sweep.dir={tmp_path}")
    assert run.returncode == 0, run.stderr
    configs = [OmegaConf.load(p) for p in sorted(tmp_path.rglob(".hydra/config.yaml"))]
    listed, unlisted = (OmegaConf.to_container(c.optimizer, resolve=False) for c in configs)
    assert (listed["name"], listed["lr"], listed["weight_decay"]) == ("g_adamw", 1e-3, 0)
    own = OmegaConf.load(ROOT / "conf" / "optimizer" / "lion_cub.yaml")
    assert unlisted == {**own, "weight_decay": 0} and "methods" not in configs[0]
    assert "the recipe has no settings for optimizer=lion_cub" in run.stderr


def test_in_a_folder_that_was_deleted_it_says_so(tmp_path):
    script = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} {ROOT / 'train.py'}"
    left = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert left.returncode == 2
    assert left.stderr == "error: the folder you are in was deleted: type cd DIR first\n"


def test_a_sweep_of_submitit_prints_its_results(tmp_path):
    settings = [*QUICK, "workers=1", "dataset=digits", "model=linear", "seed=0,1"]
    sweep = ["-m", "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}"]
    done = train(*settings, *sweep, code=0)
    for summary in tmp_path.glob("*/summary.json"):
        accuracy = json.loads(summary.read_text())["test_accuracy"]
        assert f"{summary.parent}: {accuracy}" in done.stdout
    assert f"dlion table {tmp_path}" in done.stdout
