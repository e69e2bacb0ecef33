"""The machine that this process runs on."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
from pathlib import Path

import torch


def machine(device: str) -> str:
    """Describe the processor, the usable cores, and the GPU if ``device`` is ``cuda``."""
    gpu = [torch.cuda.get_device_name()] if device == "cuda" else []
    return ", ".join([_processor(), f"{cores()} cores", *gpu])


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int | None:
    """Return the bytes of memory that this process may use at most, where that is known."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):  # of a container; "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def _processor() -> str:
    """Return the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def die_with(parent: int) -> None:
    """Let the kernel end this process if its parent is killed, where the kernel is Linux."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
