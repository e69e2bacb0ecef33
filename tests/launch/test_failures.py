"""A worker that fails ends the run, by name; an interrupted run leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

BROKEN = """
import os, torch
class Broken(torch.nn.Linear):
    passes = 0
    def forward(self, x):
        self.passes += 1
        if self.passes == 9 and os.environ["RANK"] == "1":
            raise ValueError("boom in the forward pass")
        return super().forward(x.flatten(1))
def build(data, **options):
    return Broken(784, 10)
"""


def start(*overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train.py", "logger=none", "processes=4", "steps=100000", *overrides],
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs, and what they start, are born with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_workers(launcher: subprocess.Popen[str]) -> list[int]:
    """The process ids of the workers, once the run prints its table."""
    for line in launcher.stdout:
        if line.startswith("output"):
            break
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_a_worker_that_raises_is_named_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    run = start(
        f"output_dir={tmp_path / 'run'}",
        "model._target_=broken.build",
        env={"PYTHONPATH": str(tmp_path)},
    )
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert (
        errors.splitlines()[-1] == "error: process 1 failed: ValueError: boom in the forward pass"
    )
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path):
    run = start(f"output_dir={tmp_path}")
    workers = wait_for_workers(run)
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    _, errors = run.communicate(timeout=10)
    assert run.returncode == 1
    assert "error: process 2 was killed by SIGKILL" in errors
    assert_all_gone(workers)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_launcher(tmp_path, how):
    run = start(f"output_dir={tmp_path}")
    workers = wait_for_workers(run)
    run.send_signal(how)
    _, errors = run.communicate(timeout=10)
    assert run.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert "Traceback" not in errors
    assert_all_gone(workers)
