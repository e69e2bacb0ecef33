"""A worker that fails ends the run, by name; an interrupted run leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from dlion.errors import RunFailed, Stopped
from dlion.launch.local import run_processes
from tests.runs import assert_all_gone, latest_step, record, start, wait_for_workers

LONG = ["processes=4", "steps=100000"]
FAULTY = [
    *(
        "model._target_=tests.launch.faulty.model",
        "optimizer._target_=tests.launch.faulty.Optimizer",
    ),
    *("dataset=digits", "workers=4", "processes=2", "steps=12", "eval_every=4", "log_every=2"),
]


def run_faulty(directory, *overrides: str, fault: str = "") -> tuple[int, str]:
    """Exit code and stderr of a run that fails in process 1."""
    env = {"FAULT": fault, "MARKER": f"{directory}.marker", "PYTHONPATH": "."}
    run = start(*FAULTY, f"output_dir={directory}", *overrides, env=env)
    _, errors = run.communicate(timeout=120)
    return run.returncode, errors


def _end(how: str):
    if how == "stop":
        raise Stopped(3)
    if how == "fail" and os.environ["RANK"] == "1":
        raise ValueError('boom: "quoted",\nand on a second line')
    return {"stopped_after": how, "failed": [1, None]}


def test_what_process_0_returns_arrives_whatever_its_keys_are():
    assert run_processes(2, _end, "return") == {"stopped_after": "return", "failed": [1, None]}
    with pytest.raises(Stopped, match="stopped after step 3"):
        run_processes(2, _end, "stop")
    with pytest.raises(RunFailed, match=r"^process 1 failed: and on a second line$"):
        run_processes(2, _end, "fail")


def test_a_worker_that_raises_is_named_with_its_error(tmp_path):
    code, errors = run_faulty(tmp_path / "run", fault="error:9")
    assert code == 1
    assert (
        errors.splitlines()[-1] == "error: process 1 failed: ValueError: boom in the forward pass"
    )
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path):
    run = start(*LONG, f"output_dir={tmp_path}")
    workers = wait_for_workers(run)
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "error: process 2 was killed by SIGKILL" in errors
    assert_all_gone(workers)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_worker_outlives_the_launcher(tmp_path, how, code):
    run = start(*LONG, f"output_dir={tmp_path}")
    workers = wait_for_workers(run)
    run.send_signal(how)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == code
    assert "Traceback" not in errors
    assert_all_gone(workers)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward:11", "exchange:5", "saving:6"])
def test_a_killed_worker_is_started_again_and_nothing_is_lost(tmp_path, fault):
    settings = ["checkpoint_every=2", "max_restarts=1"]
    code, errors = run_faulty(tmp_path / "cut", *settings, fault=fault)
    assert code == 0, errors
    assert "process 1 was killed by SIGKILL; restart 1 of 1" in errors
    assert run_faulty(tmp_path / "whole", *settings) == (0, "")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_starts_again_from_the_checkpoint(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("--max-restarts=1", "train.py", "logger=none", *FAULTY, "checkpoint_every=2"),
        f"output_dir={tmp_path / 'cut'}",
    ]
    env = {"FAULT": "exchange:5", "MARKER": str(tmp_path / "marker"), "PYTHONPATH": "."}
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run_faulty(tmp_path / "whole") == (0, "")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


@pytest.mark.slow
def test_told_to_leave_a_run_saves_and_goes_on_later(tmp_path):
    settings = ["dataset=digits", "workers=4", "steps=300", "eval_every=10"]
    run = start(*settings, "processes=2", f"output_dir={tmp_path / 'cut'}")
    for pid in (*wait_for_workers(run), run.pid):  # as a scheduler does, to all of a group
        os.kill(pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 75
    step = latest_step(tmp_path / "cut")
    assert f"stopped after step {step}; the same command with resume=auto goes on" in errors
    assert 0 < step < 300
    for name, more in (("cut", ["resume=auto", "processes=4"]), ("whole", ["processes=1"])):
        again = start(*settings, *more, f"output_dir={tmp_path / name}")
        _, errors = again.communicate(timeout=120)
        assert again.returncode == 0, errors
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def test_a_stopped_worker_is_named(tmp_path):
    run = start(*LONG, "timeout=3", f"output_dir={tmp_path}")
    workers = wait_for_workers(run)
    os.kill(workers[2], signal.SIGSTOP)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert errors.splitlines()[-1] == (
        "error: process 2 does not answer: it was stopped (SIGSTOP, or a debugger)"
    )
    assert "Traceback" not in errors
    assert_all_gone(workers)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk (tmpfs) needs root")
@pytest.mark.skipif(shutil.which("mount") is None, reason="a small disk needs mount")
def test_a_full_disk_ends_the_run_with_its_checkpoints_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(disk)]
    if subprocess.run(small, capture_output=True).returncode:
        pytest.skip("this machine does not allow to mount a small disk (tmpfs)")
    settings = ["dataset=digits", "workers=2", "processes=2", "steps=12", "checkpoint_every=2"]
    try:
        run = start(*settings, f"output_dir={disk / 'run'}")
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 1
        assert "No space left on device" in errors.splitlines()[-1]
        assert "the same command with resume=auto goes on" in errors.splitlines()[-1]
        assert "Traceback" not in errors
        assert latest_step(disk / "run") > 0
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        again = start(*settings, "resume=auto", f"output_dir={disk / 'run'}")
        _, errors = again.communicate(timeout=120)
        assert again.returncode == 0, errors
        whole = start(*settings, f"output_dir={tmp_path / 'whole'}")
        whole.communicate(timeout=120)
        assert record(disk / "run") == record(tmp_path / "whole")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_left_out(tmp_path):
    code, errors = run_faulty(tmp_path / "stop", fault="nan:7")
    assert code == 1
    assert errors.splitlines()[-1].startswith(
        "error: process 1 failed: the gradient of bias is not finite on worker 2 in step 4: "
    )
    assert "Traceback" not in errors
    code, errors = run_faulty(tmp_path / "skip", "nonfinite=skip", fault="nan:7")
    assert code == 0, errors
    _, rows = record(tmp_path / "skip")
    assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 1, 1]


def test_replicas_that_drift_apart_are_named(tmp_path):
    code, errors = run_faulty(tmp_path, "check_replicas_every=2", fault="drift:7")
    assert code == 1
    assert errors.splitlines()[-1].startswith(
        "error: process 1 failed: after step 4 process 1 holds other parameters than process 0"
    ) or errors.splitlines()[-1].startswith(
        "error: process 0 failed: after step 4 process 1 holds other parameters than process 0"
    )
