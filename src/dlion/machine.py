"""The machine that this process runs on."""

import os
import platform
from pathlib import Path

import torch


def machine(device: str) -> str:
    """Processor, cores that this process may use, and the GPU if the run is on one."""
    gpu = [torch.cuda.get_device_name()] if device == "cuda" else []
    return ", ".join([_processor(), f"{cores()} cores", *gpu])


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
