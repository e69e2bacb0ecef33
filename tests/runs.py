"""Real runs of train.py that tests start, disturb and compare."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conftest import ROOT


def start(*overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start train.py in the background."""
    return subprocess.Popen(
        [sys.executable, "train.py", "logger=none", *overrides],
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
    for line in launcher.stdout or ():
        if line.startswith("output"):
            break
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def wait_for_step(directory: Path, step: int, seconds: float = 120) -> None:
    """Until there is a checkpoint of that step, or a later one."""
    deadline = time.monotonic() + seconds
    while latest_step(directory) < step and time.monotonic() < deadline:
        time.sleep(0.02)


def latest_step(directory: Path) -> int:
    """Of the checkpoints in the directory of a run; 0: there is none."""
    found = (directory / "checkpoint").glob("step-????????")
    return max((int(p.name.removeprefix("step-")) for p in found), default=0)


def record(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows of a run, without what differs between any two runs."""
    summary = json.loads((directory / "summary.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in (summary, *rows):
        for key in ("seconds", "seconds_per_step", "processes", "commit", "machine", "versions"):
            row.pop(key, None)
    return summary, rows
