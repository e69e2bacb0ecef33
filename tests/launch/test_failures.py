"""A worker that fails ends the run, by name; an interrupted run leaves nothing behind."""

import errno
import faulthandler
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlion.errors import RunFailed, Stopped, TrainingFailed, UserError
from dlion.optim import DLion
from dlion.suite.launch.environment import LOOPBACK
from dlion.suite.launch.local import lost_peer, run_processes
from dlion.suite.launch.meeting import process_group
from dlion.suite.launch.process_killer import ProcessKiller
from tests.launch.test_meeting import free_port
from tests.support.runs import TORCHRUN, assert_all_gone, latest_step, record, start, train

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


def _is_free() -> bool:
    """Whether the directory of this run may be removed, as systemd sees it."""
    descriptor = os.open(Path(os.environ["DLION_RENDEZVOUS"]).parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_run_of_many_days_keeps_its_directory():
    assert run_processes(1, _is_free) is False


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
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error"), False),
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


def test_processes_die_as_often_as_a_setting_says_and_all_restart(tmp_path):
    settings = ["dataset=digits", "logger=none", "workers=2", "processes=2", "steps=25"]
    settings += ["model._target_=tests.training.slow.model", "checkpoint_every=5"]
    # with this seed one dies after 1.6 s, and nobody for three minutes after that
    dying = ["faults.deaths=1", "faults.away=0.1", "seed=1429", f"output_dir={tmp_path / 'run'}"]
    done = train(*settings, *dying, env={"MARKER": str(tmp_path / "never")}, code=0)
    assert done.stderr == "process 1 was killed by SIGKILL; all restart when it returns\n"
    assert [row["step"] for row in record(tmp_path / "run")[1]] == [10, 20, 25]


def _be_there(folder: Path, begun) -> str:
    """Wait until so many processes have begun; the first alone has the state of the run."""
    rank = os.environ["RANK"]
    (folder / f"{rank}-{os.getpid()}").touch()
    begun[int(rank)] = rank == "0"
    while len(list(folder.iterdir())) < 9:
        time.sleep(0.01)
    return rank


def test_who_dies_while_others_continue_returns_but_for_the_last_with_the_state(tmp_path, capfd):
    begun, killer = RawArray("b", 3), ProcessKiller(1000, 0.01, 0)
    killer.begun = begun
    run_processes(3, _be_there, tmp_path, begun, apart=True, again=(tmp_path, begun), killer=killer)
    assert len(list(tmp_path.glob("0-*"))) == 1
    assert "process 1 was killed by SIGKILL; 2 here continue, and" in capfd.readouterr()[1]


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
    under = [*TORCHRUN[:2], *elastic, endpoint, "--rdzv-id=two", "--local-addr=127.0.0.1"]
    env = {"FAULT": "exchange:5", "MARKER": str(tmp_path / "marker")}
    env |= {"GLOO_SOCKET_IFNAME": LOOPBACK}
    agents = [start(*overrides, env=env, under=under) for _ in range(2)]
    for agent in agents:
        done = agent.wait()
        assert done.returncode == 0, done.stderr
        assert "holds another run" not in done.stderr
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
    assert f"stopped after step {step}; to resume: " in stopped.stderr
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
        assert "the same command with resume=auto resumes" in last
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
    # its header tells all processes, and any of them may be the first to say so
    assert re.match(
        "error: process [01] failed: the gradient of bias is not finite on worker 2 in step 4: ",
        lines[-1],
    )
    assert "Traceback (most recent call last):" not in lines
    (line,) = run_faulty(tmp_path / "skip", "nonfinite=skip", fault="nan:7")
    assert line.startswith("warning: the gradient of bias is not finite in step 4: nonfinite=skip ")
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


WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with"
TIMEOUT = (  # how torch words them
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLTOALL, NumelIn=64,"
    " NumelOut=64, Timeout(ms)=3000) ran for 3001 milliseconds before timing out."
)
REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5"
MEMORY = "CUDA error: an illegal memory access was encountered"
WAITING = 60  # seconds after which a process of these tests ends that waits for another
HANGS = "within timeout=: one of them hangs, or the network is down"


def _watched(error: str, stops: bool, fails: bool) -> None:
    """Process 0 is aborted as by torch's watchdog, which has waited for process 1."""
    if os.environ["RANK"] == "1":
        if fails:
            Path(os.environ["MARKER"]).touch()
            raise ValueError("boom")
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    while fails and not Path(os.environ["MARKER"]).exists():
        time.sleep(0.01)
    time.sleep(0.1)
    faulthandler.disable()  # pytest's, which would write about the abort
    os.write(2, f"[rank0]:[E1 ProcessGroupNCCL.cpp:1] {error}\nframe #0: more\n".encode())
    os.abort()


@pytest.mark.parametrize(
    ("error", "stops", "reason"),
    [
        (f"{WATCHDOG} exception: [Rank 0] {TIMEOUT}", False, f"{HANGS} ({TIMEOUT})"),
        (f"{WATCHDOG} exception: {REMOTE}", False, f"{HANGS} ({REMOTE})"),
        (f"{WATCHDOG} exception: [Rank 0] {TIMEOUT}", True, "process 1 does not answer: it was"),
        (f"{WATCHDOG} exception: {MEMORY}", False, f"process 0 failed: {MEMORY}"),
        ("double free or corruption", False, "process 0 was killed by SIGABRT"),
    ],
)
def test_what_the_watchdog_of_nccl_says_is_the_reason(capfd, error, stops, reason):
    with pytest.raises(RunFailed) as failure:
        run_processes(2, _watched, error, stops, False, watched=True)
    assert reason in str(failure.value)
    assert error in capfd.readouterr().err  # it is not kept from who reads the terminal


def test_an_error_of_its_own_counts_more_than_a_lost_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    with pytest.raises(RunFailed, match=r"^process 1 failed: ValueError: boom$"):
        run_processes(2, _watched, f"{WATCHDOG} exception: {REMOTE}", False, True, watched=True)


def _told(words: int) -> list[int]:
    for _ in range(words):
        os.write(2, b"word " * 20000)
    return [words]


def test_a_watched_process_may_say_more_than_a_pipe_holds(capfd):
    assert run_processes(2, _told, 30, watched=True) == [30]
    assert len(capfd.readouterr().err) == 2 * 30 * 100000


def _fails_while_others_are_gone(where: str, waits: str) -> None:
    """Process 0 fails while something in it waits for process 1, which has stopped."""
    if os.environ["RANK"] == "0":  # if it waits, it says so and ends
        told = Path(waits).open("w")  # noqa: SIM115
        faulthandler.dump_traceback_later(WAITING, exit=True, file=told)
    with process_group("gloo", 600):
        model = torch.nn.Linear(4, 4)
        optimizer = DLion(model.parameters(), overlap=where == "exchange")
        dist.barrier()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        model(torch.ones(1, 4)).sum().backward()
        assert (not optimizer.schedule.at_step) == (where == "exchange")
        if where == "collective":
            dist.all_reduce(torch.ones(1), async_op=True)
        if where == "thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("boom")


@pytest.mark.parametrize("where", ["exchange", "collective", "thread"])
def test_a_process_that_fails_waits_for_nobody(tmp_path, where):
    waits = tmp_path / "waits"
    with pytest.raises(RunFailed, match=r"^process 0 failed: ValueError: boom$"):
        run_processes(2, _fails_while_others_are_gone, where, str(waits))
    assert waits.read_text() == ""


WRONG = "optimizer.lr=-1"
ONE_LINE = {
    "all": (WRONG, WRONG, "error: optimizer.lr=-1 is not possible", [2, 2]),
    "first": (WRONG, "", "error: optimizer.lr=-1 is not possible", [2, 1]),
    "other": ("", WRONG, "error: optimizer.lr=-1 is not possible", [1, 2]),
    "unlike": (
        "",
        "seed=1",
        "error: process 1 was started with other settings than process 0 (seed is 1",
        [1, 1],
    ),
}


@pytest.mark.parametrize("who", ONE_LINE)
def test_of_several_processes_that_fail_one_tells_why(tmp_path, who):
    """And it has told before another ends, upon which torchrun would end it."""
    *typed, sentence, codes = ONE_LINE[who]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = ["dataset=digits", "model=linear", "logger=none", f"output_dir={tmp_path / 'run'}"]
    runs = {}
    for rank in (1, 0):
        wrong = [typed[rank]] if typed[rank] else []
        runs[rank] = start(*common, *wrong, env={"RANK": str(rank), **place})
    ended = [runs[1].wait().returncode]
    said = runs[0].stderr + runs[1].stderr
    assert [runs[0].wait().returncode, *ended] == codes
    assert said == runs[0].stderr + runs[1].stderr
    assert re.fullmatch(f"{re.escape(sentence)}[^\n]*\n", said), said


LEAVES = """
import threading, time
from dlion.errors import RunFailed
from dlion.suite.launch import cli

def main():
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise RunFailed("process 0 failed: boom")

cli.run(main, None)
"""


def test_nor_does_one_that_torchrun_has_started():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [sys.executable, "-c", LEAVES, "steps=1"]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: process 0 failed: boom\n")
