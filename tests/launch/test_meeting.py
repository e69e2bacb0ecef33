"""The processes of a run find each other, and nobody else, whatever listens at their ports."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dlion.errors import RunFailed, UserError
from dlion.suite.launch.environment import detect
from dlion.suite.launch.meeting import claim_gpu, join_process_group
from tests.support.runs import start, train

pytestmark = pytest.mark.slow

_fork = multiprocessing.get_context("fork")


def task(number: int, job: int = 7, **more: str) -> dict[str, str]:
    """What SLURM tells one of two tasks of a job."""
    slurm = {"JOB_ID": job, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "PROCID": number, "LOCALID": number}
    return {f"SLURM_{name}": str(value) for name, value in slurm.items()} | more


def join(env: dict[str, str], timeout: float = 30) -> Callable[[], str]:
    """Start a process that joins its run; what is returned waits for its words.

    They are the sum of the ranks of all who joined, or the error.
    """
    told, tell = _fork.Pipe(duplex=False)

    def work() -> None:
        os.environ.update(env)
        try:
            detect().export()
            join_process_group("gloo", timeout)
            rank = torch.tensor(dist.get_rank())
            dist.all_reduce(rank)
            tell.send(str(rank.item()))
            dist.destroy_process_group()
        except RunFailed as error:
            tell.send(str(error))

    process = _fork.Process(target=work)
    process.start()

    def words() -> str:
        process.join(60)
        assert process.exitcode == 0
        return told.recv()

    return words


def torchrun(rank: int, port: int, name: str) -> dict[str, str]:
    """What torchrun tells one of two processes."""
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return env | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": name}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def silent(port: int) -> socket.socket:
    """Listen at a port, and never say a word."""
    return socket.create_server(("127.0.0.1", port))


def test_a_gpu_that_another_process_has_is_refused(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 3)
    for rank, gpu in enumerate(("a 0", "a 1")):
        claim_gpu(store, rank, gpu)
    with pytest.raises(RunFailed, match=r"^processes 1 and 2 share a GPU, which backend=nccl"):
        claim_gpu(store, 2, "a 1")


def test_two_jobs_at_one_port_keep_apart():
    """Of each a task waits there already when the other task of both comes."""
    port = {"MASTER_PORT": str(free_port())}
    jobs = [[join(task(i, job, **port))] for i, job in ((0, 8), (1, 208))]
    jobs[1].append(join(task(0, 208, **port)))
    jobs[0].append(join(task(1, 8, **port)))
    assert [[words() for words in tasks] for tasks in jobs] == [["1", "1"], ["1", "1"]]


def test_a_silent_stranger_at_the_port_does_not_keep_them_apart():
    port = free_port()
    with silent(port):
        tasks = [join(task(i, MASTER_PORT=str(port))) for i in range(2)]
        assert [words() for words in tasks] == ["1", "1"]


def test_a_run_may_have_a_long_name():
    port = free_port()
    tasks = [join(torchrun(rank, port, 300 * "long")) for rank in range(2)]
    assert [words() for words in tasks] == ["1", "1"]


def test_without_a_free_port_it_says_so_and_who_waits_in_vain_does_in_time():
    last = "65535"
    with silent(int(last)):
        taken, lost = join(task(0, MASTER_PORT=last)), join(task(1, MASTER_PORT=last), timeout=1)
        alone = join(task(0, MASTER_ADDR="nowhere.invalid"), timeout=1)
        of_an_agent = join(torchrun(0, 65535, "a") | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        assert {taken(), of_an_agent()} == {
            f"process 0 cannot listen at port {last} (Address already in use): set MASTER_PORT to"
            " a free one"
        }
        reason = (
            "SLURM_STEP_ID=0 and SLURM_STEP_NUM_TASKS=2 say that SLURM starts 2 processes: start"
            " all of them with srun, or type `unset SLURM_STEP_ID` first to train without SLURM"
        )
        assert lost() == (
            f"process 0 was not found at 127.0.0.1, port {last}, within timeout=1 s: {reason}; if"
            " another program listens at that port, set MASTER_PORT to a free one"
        )
        assert alone() == f"1 of 2 processes were there after timeout=1 s: {reason}"


def test_a_task_that_waits_for_another_says_why_and_what_to_type():
    waiting = start("steps=1", "logger=none", "dataset=digits", "model=linear", env=task(0))
    try:
        deadline = time.monotonic() + 120
        while "still waiting" not in waiting.stdout and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "SLURM_STEP_ID=0 and SLURM_STEP_NUM_TASKS=2 say that SLURM starts" in waiting.stdout
        assert "type `unset SLURM_STEP_ID` first" in waiting.stdout
    finally:
        waiting.kill()


@pytest.mark.parametrize(
    "job", [{"JOB_NAME": "bash"}, {"JOB_NAME": "interactive"}, {"PTY_PORT": "1"}]
)
def test_in_an_interactive_job_slurm_is_ignored(tmp_path, job):
    env = task(0) | {f"SLURM_{name}": value for name, value in job.items()}
    settings = ["steps=1", "workers=1", "logger=none", "dataset=digits", "model=linear"]
    train(*settings, f"output_dir={tmp_path}", env=env, code=0)


@pytest.mark.parametrize(
    ("command", "is_task"),
    [("./told", False), ("sh -c './told; true'", False), ("exec ./told", True)],
)
def test_what_is_typed_in_the_shell_of_a_task_is_no_task(tmp_path, command, is_task):
    """What takes the shell's place is one, and so is all without a terminal."""
    script = tmp_path / "told"
    script.write_text(
        f"#!{sys.executable}\n"
        "from dlion.suite.launch.environment import detect\n"
        "open('answer', 'w').write(repr(detect()))\n"
    )
    script.chmod(0o755)
    line = f"export SLURM_TASK_PID=$$; {command}; exit\n".encode()
    env = os.environ | task(0, SLURM_JOB_NAME="interactive")
    ours, terminal = os.openpty()
    shell = subprocess.Popen(["bash", "--norc"], stdin=terminal, env=env, cwd=tmp_path)
    os.write(ours, line)
    shell.wait(120)
    assert ((tmp_path / "answer").read_text() != "None") == is_task
    subprocess.run(["bash"], input=line, env=env, cwd=tmp_path, timeout=120, check=True)
    assert (tmp_path / "answer").read_text() != "None"


def test_a_name_of_no_machine_is_refused_at_once():
    for name in ("nowhere.invalid", "a..b"):
        words = join(task(1, MASTER_ADDR=name, SLURM_STEP_NUM_NODES="2"), timeout=50)
        assert words().startswith(f"MASTER_ADDR={name} is not ")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[03-05,7],login1", "gpu03"),
        ("login1,gpu[03-05]", "login1"),
        ("node[01-02]-ib", "node01-ib"),
        ("rack[0-1]node[007-016],x", "rack0node007"),
        ("a[1,3-4].b[2-3].c", "a1.b2.c"),
    ],
)
def test_the_first_machine_of_a_list_of_slurm(monkeypatch, hosts, first):
    for key, value in task(0, SLURM_STEP_NODELIST=hosts, SLURM_STEP_NUM_NODES="2").items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("RANK", raising=False)
    assert detect().address == first


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_do_not_train_alone(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert detect() is None
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match="mpirun started 2 processes"):
        detect()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, "RANK and WORLD_SIZE are set, but not MASTER_ADDR and not MASTER_PORT: start"),
        ({"MASTER_ADDR": "127.0.0.1"}, "RANK and WORLD_SIZE are set, but not MASTER_PORT: start"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT=y, which must be a number"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "1", "RANK": "2"}, "RANK=2 is not possible with"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "1", "RANK": "-1"}, "RANK=-1 is not possible with"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "1", "WORLD_SIZE": "0"}, "not possible with WORLD_"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port: set it to"),
    ],
)
def test_ranks_without_a_place_to_meet_are_refused(monkeypatch, env, sentence):
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | env).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(sentence)):
        detect()
