"""Where a run's figures come from: the commit, the machine and the versions that made them."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from dlion.machine import machine

PACKAGE = Path(__file__).resolve().parents[1]


def provenance(device: str) -> dict[str, Any]:
    """What a summary tells of its origin; ``device``: cpu or cuda, where the run computes."""
    return {
        "commit": commit(),
        "machine": machine(device),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def commit(directory: Path = PACKAGE) -> str | None:
    """The git commit of a directory's files, ``+changes`` if they are not those of the commit.

    None without git, and for files that no repository keeps (an installed package).
    """
    if shutil.which("git") is None:
        return None
    head = _git(directory, "rev-parse", "HEAD")
    if head is None or not _git(directory, "ls-files"):
        return None
    return head + ("+changes" if _git(directory, "status", "--porcelain", "--", ".") else "")


def _git(directory: Path, *command: str) -> str | None:
    """What git says, None if it refuses. It takes no lock: somebody may be committing."""
    whole = ["git", "--no-optional-locks", "-C", str(directory), *command]
    done = subprocess.run(whole, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
