"""A worker that fails ends the run, by name; an interrupted run leaves nothing behind."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dlion.errors import RunFailed, Stopped, TrainingFailed, UserError
from dlion.launch.environment import LOOPBACK
from dlion.launch.local import lost_peer, run_processes
from tests.conftest import ROOT
from tests.launch.test_meeting import free_port
from tests.runs import TORCHRUN, assert_all_gone, latest_step, record, start, train

pytestmark = pytest.mark.slow

LONG = ["logger=none", "processes=4", "steps=100000"]
FAULTY = [
    "model._target_=tests.launch.faulty.model",
    "optimizer._target_=tests.launch.faulty.Optimizer",
    "dataset=digits",
    "logger=none",
    "workers=4",
    "processes=2",
    "steps=12",
    "eval_every=4",
    "log_every=2",
]
SMALL = ["dataset=digits", "logger=none", "workers=4", "eval_every=10"]


def run_faulty(directory, *overrides: str, fault: str = "", code: int = 0) -> list[str]:
    """Run a training that fails in process 1; return the lines of its standard error."""
    env = {"FAULT": fault, "MARKER": f"{directory}.marker"}
    done = train(*FAULTY, f"output_dir={directory}", *overrides, env=env, code=code)
    return done.stderr.splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of the same training without a fault."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert run_faulty(directory) == []
    return record(directory)


def _end(how: str):
    if how == "stop":
        raise Stopped(3)
    if how == "fail" and os.environ["RANK"] == "1":
        raise ValueError('boom: "quoted",\nand on a second line')
    if how == "refuse":
        raise UserError("x=1 is not possible: type x=2")
    return {"stopped_after": how, "failed": [1, None]}


def test_what_process_0_returns_arrives_whatever_its_keys_are():
    assert run_processes(2, _end, "return") == {"stopped_after": "return", "failed": [1, None]}
    with pytest.raises(Stopped, match="stopped after step 3"):
        run_processes(2, _end, "stop")
    with pytest.raises(RunFailed, match=r"^process 1 failed: and on a second line$"):
        run_processes(2, _end, "fail")
    with pytest.raises(RunFailed, match=r"^process [01] failed: x=1 is not possible: type x=2$"):
        run_processes(2, _end, "refuse")


def test_where_no_more_processes_can_be_started_none_is_left(monkeypatch):
    fork, forks = os.fork, iter(range(3))

    def third_fails() -> int:
        if next(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", third_fails)
    with pytest.raises(RunFailed, match=r"^not all of 3 processes could be started \(Resource"):
        run_processes(3, time.sleep, 600)
    assert not multiprocessing.active_children()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("under", [[], TORCHRUN])
def test_a_worker_that_raises_is_named_with_its_error(tmp_path, under):
    run = tmp_path / "run"
    done = train(*FAULTY, f"output_dir={run}", env={"FAULT": "error:9"}, under=under, code=1)
    reason = "process 1 failed: ValueError: boom in the forward pass"
    assert f"error: {reason}" in done.stderr.splitlines()
    assert not (run / "summary.json").exists()
    assert (run / "failure.txt").read_text() == f"{reason}\n"  # though process 0 holds the run


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), True),
        (dist.DistNetworkError("The client socket has timed out after 600000ms"), True),
        (RuntimeError("DataLoader timed out after 300 seconds"), False),
        (TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), False),
        (TrainingFailed("x could not be written ([Errno 110] Connection timed out)"), False),
    ],
)
def test_only_a_collective_loses_peers(error, lost):
    assert lost_peer(error) == lost


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path):
    run = start(*LONG, f"output_dir={tmp_path}")
    workers = run.workers()
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    done = run.wait(timeout=60)
    assert done.returncode == 1
    assert "error: process 2 was killed by SIGKILL" in done.stderr
    assert_all_gone(workers)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_worker_outlives_the_launcher(tmp_path, how, code):
    run = start(*LONG, f"output_dir={tmp_path}")
    workers = run.workers()
    run.send_signal(how)
    done = run.wait(timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert_all_gone(workers)


@pytest.mark.parametrize("fault", ["forward:11", "exchange:5", "saving:6"])
def test_a_killed_worker_is_started_again_and_nothing_is_lost(whole, tmp_path, fault):
    settings = ["checkpoint_every=2", "max_restarts=1"]
    lines = run_faulty(tmp_path / "cut", *settings, fault=fault)
    assert lines == ["process 1 was killed by SIGKILL; restart 1 of 1"]
    assert record(tmp_path / "cut") == whole


def test_torchrun_starts_again_from_the_checkpoint(whole, tmp_path):
    done = train(
        *FAULTY,
        "checkpoint_every=2",
        f"output_dir={tmp_path / 'cut'}",
        env={"FAULT": "exchange:5", "MARKER": str(tmp_path / "marker")},
        under=[*TORCHRUN, "--max-restarts=1"],
        code=0,
    )
    assert (tmp_path / "marker").exists()
    assert "Traceback" not in done.stderr
    assert record(tmp_path / "cut") == whole


def test_all_leave_out_a_damaged_checkpoint_of_which_one_has_read_it(whole, tmp_path):
    saved = [*FAULTY, "checkpoint_every=2", f"output_dir={tmp_path / 'cut'}"]
    train(*saved, "stop_after=7", code=75)
    flip_last_byte(tmp_path / "cut" / "checkpoint" / "step-00000007" / "worker-00000.safetensors")
    done = train(*saved, "resume=auto", under=TORCHRUN, code=0)
    assert "worker-00000.safetensors is damaged" in done.stderr
    assert record(tmp_path / "cut") == whole


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_dies_as_it_starts_is_not_taken_for_finished(tmp_path):
    more = ["steps=null", "schedule=constant"]
    run_faulty(tmp_path / "whole", *more, "epochs=2")
    run_faulty(tmp_path / "more", *more, "epochs=1")
    again = [*more, "epochs=2", "resume=auto"]
    run_faulty(tmp_path / "more", *again, fault="building", code=1)
    run_faulty(tmp_path / "more", *again)
    both = [record(tmp_path / name)[0] for name in ("more", "whole")]
    assert both[0] == both[1] and both[0]["steps"] == 22


def test_agents_of_two_machines_start_again_together(whole, tmp_path):
    """Only one of them counts it as a restart: the other's process ended because of its peer."""
    elastic = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=1", "--rdzv-backend=c10d"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    overrides = [*FAULTY, "checkpoint_every=2", f"output_dir={tmp_path / 'cut'}"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, endpoint, "--rdzv-id=two"]
    faults = {"FAULT": "exchange:5", "MARKER": str(tmp_path / "marker")}
    agents = [
        subprocess.Popen(
            [*command, "--local-addr=127.0.0.1", "train.py", *overrides],
            cwd=ROOT,
            env=os.environ | faults | {"GLOO_SOCKET_IFNAME": LOOPBACK},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for agent in agents:
        _, errors = agent.communicate(timeout=120)
        assert agent.returncode == 0, errors
        assert "holds another run" not in errors
    assert (tmp_path / "marker").exists()
    assert record(tmp_path / "cut") == whole


def test_a_run_that_is_told_to_end_saves_and_goes_on_later(tmp_path):
    settings = [*SMALL, "steps=60"]
    run = start(*settings, "processes=2", f"output_dir={tmp_path / 'cut'}")
    for pid in (*run.workers(), run.pid):  # as a scheduler does, to all of a group
        os.kill(pid, signal.SIGTERM)
    stopped = run.wait(timeout=60)
    assert stopped.returncode == 75
    step = latest_step(tmp_path / "cut")
    assert f"stopped after step {step}; to go on: " in stopped.stderr
    assert 0 < step < 60
    train(*settings, "resume=auto", "processes=4", f"output_dir={tmp_path / 'cut'}", code=0)
    train(*settings, "processes=1", f"output_dir={tmp_path / 'whole'}", code=0)
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def test_a_stopped_worker_is_named(tmp_path):
    run = start(*LONG, "timeout=3", f"output_dir={tmp_path}")
    workers = run.workers()
    os.kill(workers[2], signal.SIGSTOP)
    done = run.wait(timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: process 2 does not answer: it was stopped (SIGSTOP, or a debugger)"
    )
    assert "Traceback" not in done.stderr
    assert_all_gone(workers)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk (tmpfs) needs root")
@pytest.mark.skipif(shutil.which("mount") is None, reason="a small disk needs mount")
def test_a_full_disk_ends_the_run_with_its_checkpoints_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(disk)]
    if subprocess.run(small, capture_output=True).returncode:
        pytest.skip("this machine does not allow to mount a small disk (tmpfs)")
    settings = [*SMALL, "workers=2", "processes=2", "steps=12", "checkpoint_every=2"]
    try:
        failed = train(*settings, f"output_dir={disk / 'run'}", code=1)
        last = failed.stderr.splitlines()[-1]
        assert "No space left on device" in last
        assert "the same command with resume=auto goes on" in last
        assert "Traceback" not in failed.stderr
        assert latest_step(disk / "run") > 0
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        train(*settings, "resume=auto", f"output_dir={disk / 'run'}", code=0)
        train(*settings, f"output_dir={tmp_path / 'whole'}", code=0)
        assert record(disk / "run") == record(tmp_path / "whole")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_left_out(tmp_path):
    lines = run_faulty(tmp_path / "stop", fault="nan:7", code=1)
    assert lines[-1].startswith(
        "error: process 1 failed: the gradient of bias is not finite on worker 2 in step 4: "
    )
    assert "Traceback (most recent call last):" not in lines
    assert run_faulty(tmp_path / "skip", "nonfinite=skip", fault="nan:7") == []
    _, rows = record(tmp_path / "skip")
    assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 1, 1]


def test_replicas_that_drift_apart_are_named(tmp_path):
    *_, last = run_faulty(tmp_path, "check_replicas_every=2", fault="drift:7", code=1)
    assert last.startswith(
        (
            "error: process 0 failed: after step 4 process 1 holds other parameters than process 0",
            "error: process 1 failed: after step 4 process 1 holds other parameters than process 0",
        )
    )
