"""A run that was interrupted ends with the bits of one that was not, on any spread."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from dlion.suite import training
from dlion.suite.config import resolve
from dlion.suite.launch.check import check
from dlion.suite.launch.environment import detect
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.training import Job
from dlion.suite.training.checkpoint import find
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.support.runs import assert_all_gone, latest_step, record, start, train, wait_for_step

pytestmark = pytest.mark.slow

METHODS = sorted(p.stem for p in (ROOT / "conf" / "optimizer").glob("*.yaml"))
SETTINGS = ["dataset=digits", "logger=none", "workers=4", "steps=8", "eval_every=4", "log_every=3"]
VARIANTS = {method: [] for method in METHODS} | {
    "dgc": ["optimizer.warmup_steps=6"],
    "onebit_adam": ["optimizer.warmup_steps=3"],
    "sparseloco": ["optimizer.local_steps=3"],
    "diloco": ["optimizer.local_steps=3", "optimizer.wire=sign"],
    "muloco": ["optimizer.local_steps=3"],
    "dlion_avg": ["precision=bf16"],
    "g_lion": ["faults.byzantine=1", "faults.attack=stale", "faults.stale_steps=4"],
    "g_adamw": ["participation=0.5", "local_steps=2"],
    "lion_cub": ["optimizer.momentum_sync=2", "local_steps=2"],
    "signum_mavo": ["optimizer.weighted=true"],
}
# small, and each worker has its own BatchNorm statistics; other tests here resume a transformer
NET = ["model._target_=tests.training.test_spread.net", "bucket_cap_mb=0.005"]


def run(directory, *overrides: str, code: int = 0):
    """Run train.py in a directory, and expect an exit code."""
    return train(*SETTINGS, *overrides, f"output_dir={directory}", code=code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts, with checkpoints of steps 2, 4, 6 and 8."""
    directory = tmp_path_factory.mktemp("whole")
    run(directory, "processes=1", "checkpoint_every=2", "keep_checkpoints=4")
    return directory


def jobs(directory: Path, *overrides: str) -> Iterator[Job]:
    """What train.py would do in ``directory/METHOD``, for each of them."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for method, settings in VARIANTS.items():
            typed = [*SETTINGS, *NET, f"optimizer={method}", *settings]
            typed += [override.format(method=method) for override in overrides]
            config = compose("config", typed, return_hydra_config=True)
            yield check(resolve(config, config.hydra), directory / method, detect())


def train_all(found: list[Job]) -> None:
    join_process_group("gloo")
    for job in found:
        training.train(replace(job, workers=Workers.current(job.workers.local)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    """Runs of all methods in one process, and gone on with after step 5 in two, with overlap."""
    whole, resumed = (tmp_path_factory.mktemp(name) for name in ("whole", "resumed"))
    alone = ["processes=1", "overlap=false", "checkpoint_every=5"]
    run_processes(1, train_all, list(jobs(whole, *alone)))
    checkpoint = f"resume={whole}/{{method}}/checkpoint/step-00000005"
    run_processes(2, train_all, list(jobs(resumed, "processes=2", "overlap=true", checkpoint)))
    return whole, resumed


@pytest.mark.parametrize("method", METHODS)
def test_resuming_continues_to_the_bit(every_method, method):
    whole, resumed = (directory / method for directory in every_method)
    summary, rows = record(whole)
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert record(resumed) == (summary, rows[2:])


def test_every_spread_reads_every_checkpoint(whole, tmp_path):
    for saved, resumed in ((4, 1), (2, 4), (1, 2)):
        directory = tmp_path / f"{saved}-{resumed}"
        stopped = run(directory, f"processes={saved}", "stop_after=5", code=75)
        assert f"stopped after step 5; to resume: {sys.executable} train.py" in stopped.stderr
        run(directory, f"processes={resumed}", "resume=auto")
        assert record(directory) == record(whole)


def test_a_run_whose_launcher_is_killed_goes_on(tmp_path):
    settings = ["steps=45", "eval_every=30", "checkpoint_every=1", "processes=2"]
    cut = tmp_path / "cut"
    run(tmp_path / "whole", *settings)
    for attempt in range(3):
        more = ["resume=auto"] if attempt else []
        killed = start(*SETTINGS, *settings, *more, f"output_dir={cut}")
        wait_for_step(cut, 5 * (attempt + 1))
        workers = killed.children()
        killed.kill()
        assert_all_gone(workers)  # the kernel ends them
    assert 15 <= latest_step(cut) < 45
    run(cut, *settings, "resume=auto")
    assert record(cut) == record(tmp_path / "whole")


def damage_last(folder):
    """Cut off the end of a file, as a full disk would."""
    file = folder / "worker-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def damage_byte(folder):
    file = folder / "common.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def damage_state(folder):
    (folder / "state.json").write_text('{"run": {}, "progress"')


def damage_missing(folder):
    (folder / "worker-00000.safetensors").unlink()


DAMAGES = {
    damage_last: "bytes instead of",
    damage_byte: "common.safetensors is damaged",
    damage_state: "state.json is damaged",
    damage_missing: "worker-00000.safetensors",
}


def test_a_checkpoint_that_is_not_whole_is_left_out(whole, tmp_path):
    state = whole / "checkpoint" / "step-00000006" / "state.json"
    identity = json.loads(state.read_text())["run"]
    run(tmp_path / "saved", "processes=1", "checkpoint_every=2", "stop_after=6", code=75)
    checkpoints = sorted(p.name for p in (tmp_path / "saved" / "checkpoint").iterdir())
    assert checkpoints == ["step-00000004", "step-00000006"]
    for damage, reason in DAMAGES.items():
        cut = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "saved", cut)
        damage(cut / "checkpoint" / "step-00000006")
        found, (complaint,) = find(cut, identity)
        assert found.progress.step == 4 and reason in complaint
    resumed = run(cut, "processes=1", "resume=auto")
    assert f"left out: {complaint}" in resumed.stderr
    assert record(cut) == record(whole)


def test_a_run_of_an_earlier_version_goes_on(whole, tmp_path):
    """Some settings were others, and components had other names, which may be typed today."""
    run(tmp_path, "processes=1", "stop_after=6", code=75)
    file = tmp_path / "checkpoint" / "step-00000006" / "state.json"
    state = json.loads(file.read_text().replace("dlion.suite.", "dlion."))
    assert state["run"]["model"]["_target_"] == "dlion.models.vit"
    del state["sha256"]
    state["run"] |= {"local_optimizer": "sgd", "local_betas": [0.9, 0.99]}
    state["sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(state))
    run(tmp_path, "processes=1", "resume=auto", "model._target_=dlion.models.vit")
    assert record(tmp_path) == record(whole)


def test_without_a_good_checkpoint_nothing_is_overwritten(tmp_path):
    run(tmp_path, "processes=1", "stop_after=3", code=75)
    before = (tmp_path / "metrics.jsonl").read_text()
    damage_last(tmp_path / "checkpoint" / "step-00000003")
    refused = run(tmp_path, "resume=auto", code=2)
    assert "no checkpoint can be used" in refused.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_resume_by_path_and_what_is_refused(whole, tmp_path):
    other = tmp_path / "other"
    run(tmp_path / "run", "processes=1", "stop_after=3", code=75)
    refused = run(tmp_path / "run", code=2)
    assert "or type resume=auto to resume it" in refused.stderr
    refused = run(other, f"resume={tmp_path / 'run'}", "optimizer.lr=1", code=2)
    assert (
        "is of a run with other settings (optimizer.lr is 1 here and 0.0015 in the run): type"
        in refused.stderr
    )
    refused = run(other, f"resume={tmp_path}", code=2)
    assert "holds no checkpoint" in refused.stderr
    run(other, f"resume={tmp_path / 'run'}")
    assert record(other)[0] == record(whole)[0]
    again = run(other, "resume=auto")
    assert "is finished; nothing is left to do" in again.stdout


def test_a_round_of_local_steps_that_was_cut_short_is_not_extended(tmp_path):
    settings = ["optimizer=diloco", "schedule=constant", "processes=1"]
    run(tmp_path, *settings, "steps=5")
    refused = run(tmp_path, *settings, "steps=6", "resume=auto", code=2)
    assert "optimizer.local_steps=30 was cut short after step 5" in refused.stderr
