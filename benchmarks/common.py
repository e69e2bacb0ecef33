"""Shared by the benchmarks: order, statistics, and where results go."""

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlion.files import write_atomically
from dlion.machine import machine as machine_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "speed"


def interleaved(
    cases: dict[str, Callable[[], Any]], rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of every case in every round; each round runs all cases, in a new random order.

    What else happens on the machine then hits all alike. One round before is not counted.
    """
    order, rng = list(cases), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            start = time.perf_counter()
            cases[name]()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "rounds": len(values)}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    commit = git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    return {
        "machine": machine_of("cpu"),
        "torch": torch.__version__,
        "commit": commit,
        "load": os.getloadavg()[0],
    }


def save(name: str, data: dict[str, Any]) -> Path:
    """Write ``results/speed/NAME.json``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    return path
