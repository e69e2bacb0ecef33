"""Sweeps on a real SLURM cluster: two nodes, a process on each."""

import csv
import io
import json
import os
import shlex
import subprocess
import time

import pytest

from tests.conftest import ROOT
from tests.launch import slurm
from tests.support.runs import FORKED_PYTHON, Run, python, record, train

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
if slurm.reason_to_skip():
    pytestmark.append(pytest.mark.skip(reason=slurm.reason_to_skip()))
SWEEP = [
    *("-m", "hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1"),
    *("workers=4", "logger=none"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for a cluster, whose jobs are copies of the fork server."""
    executable = tmp_path_factory.mktemp("python") / "python"
    executable.write_text(f'#!/bin/sh\nexec {FORKED_PYTHON} "$@"\n')
    executable.chmod(0o755)
    with slurm.cluster(nodes=2, cpus=4) as env:
        clusters = {name: env[name] for name in env.keys() - os.environ.keys()}
        # the nodes' names mean nothing to this machine's resolver
        local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        yield clusters | local | {"EXECUTABLE": str(executable)}


def start(environment, *overrides: str) -> Run:
    return Run(["train.py", *SWEEP, *overrides], environment)


def slurms(environment, *command: str) -> str:
    """Run a program of SLURM, and return what it prints."""
    env = os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def collect(directory, env) -> list[dict[str, str]]:
    done = python("-m", "dlion", "collect", directory, env=env)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def wait_for_statuses(directory, env, expected: list[str]) -> list[dict[str, str]]:
    """Until the table of a sweep has these; accounting is told a little later."""
    deadline = time.monotonic() + 60
    while True:
        rows = collect(directory, env)
        if [row["status"] for row in rows] == expected or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


def states(environment) -> list[str]:
    """State and number of nodes of every job."""
    return slurms(environment, "sacct", "-XPno", "State,NNodes").split()


def wait_for_rows(directory, run: str = "*") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(file.stat().st_size for file in directory.glob(f"{run}/metrics.jsonl")):
            return
        time.sleep(0.1)


def arrays(environment) -> list[str]:
    """The job arrays in the queue."""
    return sorted(slurms(environment, "squeue", "--noheader", "--format=%F").split(), key=int)


def test_a_sweep_whose_jobs_are_requeued_is_finished_and_collected(environment, tmp_path):
    """They go on from their checkpoints, and end with the bits of runs on this machine."""
    settings = ["dataset=digits", "model=linear", "steps=400", "eval_every=50"]
    methods = ["dlion_mavo", "g_lion"]
    folder = tmp_path / "sweep"
    sweep = start(
        environment, *settings, f"optimizer={','.join(methods)}", f"hydra.sweep.dir={folder}"
    )
    preemptions = [
        ["scancel", "--signal=USR2"],  # what submitit has SLURM send before a preemption
        ["scontrol", "requeue"],  # SIGTERM, a few seconds, SIGKILL, and back into the queue
    ]
    for index, (method, preempt) in enumerate(zip(methods, preemptions, strict=True)):
        wait_for_rows(folder, f"*{method}*")
        job = f"{arrays(environment)[-1]}_{index}"
        slurms(environment, *preempt, job)
    done = sweep.wait(240)
    assert done.returncode == 0, done.stderr
    rows = collect(folder, environment)
    assert [(row["optimizer"], row["status"]) for row in rows] == [
        (method, "finished") for method in methods
    ]
    deadline = time.monotonic() + 60  # accounting is told a little later
    while (found := states(environment)) != 2 * ["COMPLETED|2"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert found == 2 * ["COMPLETED|2"]
    for index, method in enumerate(methods):
        alone = tmp_path / method
        more = [*settings, f"optimizer={method}", f"output_dir={alone}"]
        train("workers=4", "logger=none", *more, code=0)
        (summary,) = folder.glob(f"*{method}*/summary.json")
        assert record(summary.parent) == record(alone)
        files = folder.glob(f".submitit/*/*_{index}_*_log.*")
        logs = "".join(file.read_text() for file in files)
        assert logs.count("2 processes of 2 virtual workers") == 2  # it began twice
        assert "stopped after step" in logs


def test_cancelled_jobs_are_reported_even_if_they_never_began(environment, tmp_path):
    sweep = start(
        environment, "steps=1000000", "eval_every=5", "seed=0,1,2",
        "hydra.launcher.array_parallelism=1", f"hydra.sweep.dir={tmp_path}",
    )  # fmt: skip
    wait_for_rows(tmp_path)
    array = arrays(environment)[0]
    slurms(environment, "scancel", f"{array}_1")
    rows = wait_for_statuses(tmp_path, environment, ["running", "cancelled", "pending"])
    assert [row["status"] for row in rows] == ["running", "cancelled", "pending"]
    assert rows[0]["optimizer"] == "dlion_mavo" and int(rows[0]["step"]) > 0
    assert ["seed=0" in rows[0]["overrides"], "seed=2" in rows[2]["overrides"]] == [True, True]
    slurms(environment, "scancel", "--user", os.environ.get("USER", "root"))
    done = sweep.wait(120)
    assert done.returncode == 1
    assert "cancelled" in done.stderr and "Traceback" not in done.stderr
    rows = wait_for_statuses(tmp_path, environment, 3 * ["cancelled"])
    assert [row["status"] for row in rows] == 3 * ["cancelled"]


def test_what_is_typed_in_an_interactive_job_trains_alone_and_srun_in_it_does_not(
    environment, tmp_path
):
    python = shlex.quote(environment["EXECUTABLE"])
    train = f"{python} train.py dataset=digits model=linear workers=2 steps=1 logger=none"
    typed = [
        f"{train} processes=1 output_dir={tmp_path}/alone",
        f"srun --overlap --ntasks=2 {train} output_dir={tmp_path}/together </dev/null",
        "exit",
    ]
    done = subprocess.run(
        ["script", "-qc", "srun --ntasks=2 --pty bash --norc", "/dev/null"],
        input="\n".join([*typed, ""]),
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    for name, processes in (("alone", 1), ("together", 2)):
        summary = tmp_path / name / "summary.json"
        assert summary.exists(), done.stdout
        assert json.loads(summary.read_text())["processes"] == processes
