"""A run that was interrupted ends with the bits of one that was not, on any spread."""

import json
import shutil
import time

import pytest

from tests.conftest import ROOT
from tests.runs import latest_step, record, start, wait_for_step

METHODS = sorted(p.stem for p in (ROOT / "conf" / "optimizer").glob("*.yaml"))
SETTINGS = ["dataset=digits", "logger=none", "workers=4", "steps=8", "eval_every=4", "log_every=3"]
VARIANTS = {method: [] for method in METHODS} | {
    "lion_cub": ["optimizer.momentum_sync=2"],
    "dgc": ["optimizer.warmup_steps=6"],
    "dlion_avg": ["precision=bf16"],
    "g_lion": ["faults.byzantine=1", "faults.attack=stale", "faults.stale_steps=4"],
    "g_adamw": ["participation=0.5", "local_steps=2"],
    "signum_mavo": ["optimizer.weighted=true"],
    "dlion_mavo": [
        "model=resnet18",
        "batch_size=4",
    ],  # BatchNorm's statistics are each worker's own
}


@pytest.fixture
def train(train_py, tmp_path):
    def run(name: str, *overrides: str, code: int = 0):
        done = train_py(*SETTINGS, *overrides, f"output_dir={tmp_path / name}")
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_resuming_continues_to_the_bit(train, tmp_path, method):
    settings = [f"optimizer={method}", *VARIANTS[method]]
    train("whole", *settings, "processes=1")
    stopped = train("cut", *settings, "processes=1", "stop_after=5", code=75)
    assert "stopped after step 5; the same command with resume=auto goes on" in stopped.stderr
    train("cut", *settings, "processes=2", "resume=auto")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


@pytest.mark.slow
def test_every_spread_reads_every_checkpoint(train, tmp_path):
    train("whole", "processes=1")
    for saved, resumed in ((4, 1), (2, 4), (1, 2)):
        name = f"{saved}-{resumed}"
        train(name, f"processes={saved}", "stop_after=5", code=75)
        train(name, f"processes={resumed}", "resume=auto")
        assert record(tmp_path / name) == record(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_goes_on(train, tmp_path):
    settings = [*SETTINGS, "steps=60", "eval_every=30", "checkpoint_every=1", "processes=2"]
    cut = tmp_path / "cut"
    train("whole", *settings)
    for attempt in range(3):
        run = start(*settings, *(["resume=auto"] if attempt else []), f"output_dir={cut}")
        wait_for_step(cut, 10 * (attempt + 1))
        run.kill()
        run.communicate()
        time.sleep(0.5)  # the kernel ends its workers
    assert 30 <= latest_step(cut) < 60
    train("cut", *settings, "resume=auto")
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


def damage_foreign(folder):
    state = json.loads((folder / "state.json").read_text())
    state["run"]["seed"] = 7
    (folder / "state.json").write_text(json.dumps(state))


DAMAGES = {
    damage_last: "bytes instead of",
    damage_byte: "common.safetensors is damaged",
    damage_state: "state.json is damaged",
    damage_missing: "worker-00000.safetensors",
    damage_foreign: "it is of another run, with another seed",
}


@pytest.mark.slow
def test_a_checkpoint_that_is_not_whole_is_left_out(train, tmp_path):
    train("whole", "processes=1")
    train("saved", "processes=1", "checkpoint_every=2", "stop_after=6", code=75)
    checkpoints = sorted(p.name for p in (tmp_path / "saved" / "checkpoint").iterdir())
    assert checkpoints == ["step-00000004", "step-00000006"]
    for damage, reason in DAMAGES.items():
        cut = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "saved", cut)
        damage(cut / "checkpoint" / "step-00000006")
        resumed = train(damage.__name__, "processes=1", "resume=auto")
        assert "left out: " in resumed.stderr and reason in resumed.stderr
        assert record(cut) == record(tmp_path / "whole")


def test_without_a_good_checkpoint_nothing_is_overwritten(train, tmp_path):
    train("run", "processes=1", "stop_after=3", code=75)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    damage_last(tmp_path / "run" / "checkpoint" / "step-00000003")
    refused = train("run", "resume=auto", code=2)
    assert "no checkpoint can be used" in refused.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_resume_by_path_and_what_is_refused(train, tmp_path):
    train("run", "processes=1", "stop_after=3", code=75)
    refused = train("run", code=2)
    assert "or type resume=auto to go on with it" in refused.stderr
    refused = train("other", f"resume={tmp_path / 'run'}", "optimizer.lr=1", code=2)
    assert "it is of another run, with another optimizer" in refused.stderr
    refused = train("other", f"resume={tmp_path}", code=2)
    assert "holds no checkpoint" in refused.stderr
    train("other", f"resume={tmp_path / 'run'}")
    train("whole", "processes=1")
    assert record(tmp_path / "other")[0] == record(tmp_path / "whole")[0]
    again = train("other", "resume=auto")
    assert "is finished; nothing is left to do" in again.stdout
