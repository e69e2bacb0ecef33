"""Provenance of a run's figures: commit, machine, versions and day."""

import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dlion.suite.machine import machine

PACKAGE = Path(__file__).resolve().parents[2]
_OF_A_RUN = (".", ":/train.py", ":/conf", ":/src")  # from the directory, and from the root


def provenance(device: str) -> dict[str, Any]:
    """Return the origin of a run for its summary.

    Args:
        device: where the run computes, cpu or cuda.
    """
    return {
        "commit": commit(),
        "machine": machine(device),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "date": datetime.now(UTC).date().isoformat(),
    }


def commit(directory: Path = PACKAGE) -> str | None:
    """Return the git commit of a directory's files, with ``+changes`` if they were changed since.

    As what a command means stands in train.py, conf/ and src/, too, changes of these count. It is
    None without git, and for files that no repository keeps (an installed package).
    """
    if shutil.which("git") is None:
        return None
    head = _git(directory, "rev-parse", "HEAD")
    if head is None or not _git(directory, "ls-files"):
        return None
    return head + ("+changes" if _git(directory, "status", "--porcelain", "--", *_OF_A_RUN) else "")


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output, None if it fails. It takes no lock: a commit may be under way."""
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
