"""Training while workers die (SIGKILL) and come back, against runs that lose nobody or stop.

    python benchmarks/churn.py [--methods dlion_mavo g_adamw] [--deaths 0 1 3] [--away 10 60]

Every worker dies after an exponential time, so many times a minute, and another takes its place
after so many seconds away. Cases of a point: `churn`; `whole`, as many worker-steps without
failures; `restart`, the same failures where the run stops and all restart from a checkpoint
(max_restarts), with the seconds away added for each death. Writes churn.json after every point,
and churn.png: workers present and loss over time.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Parser, Points, run
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from dlion.errors import RunFailed
from dlion.suite.arguments import number, whole
from dlion.suite.config import resolve
from dlion.suite.launch.check import check
from dlion.suite.launch.elastic import Meeting, serving
from dlion.suite.launch.environment import LOOPBACK
from dlion.suite.machine import die_with
from dlion.suite.record.runs import load_run
from dlion.suite.training import Job
from dlion.suite.training.signals import SIGNALS

METHODS = ["g_adamw", "dlion_mavo", "dlion_avg", "lion_cub", "sign_muon_mavo", "diloco"]
TASK = ["logger=none", "log_every=1", "schedule=cosine"]
SMALL = ["dataset=digits", "model=linear", "batch_size=8"]
LIMIT = 1800  # seconds, at most, of a run without failures


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, ROOT / "results" / "churn", beside="torchft")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--deaths", nargs="+", type=number(0), default=[0, 0.2, 1, 3])
    parser.add_argument("--away", nargs="+", type=number(0), default=[10, 60], help="seconds")
    parser.add_argument("--seeds", nargs="+", type=whole(0), default=[0])
    parser.add_argument("--workers", type=whole(2), default=8)
    parser.add_argument("--steps", type=whole(1), default=800)
    parser.add_argument("--settings", nargs="*", default=["dataset=mnist5k"], help="of the task")
    return parser.read(
        arguments, methods=["dlion_mavo"], deaths=[10], away=[1], workers=3, steps=60,
        settings=SMALL,
    )  # fmt: skip


def settings_of(args: argparse.Namespace, key: dict[str, Any], steps: int) -> list[str]:
    """Return the settings of a run."""
    return [
        f"optimizer={key['method']}",
        f"seed={key['seed']}",
        f"workers={args.workers}",
        f"steps={steps}",
        f"eval_every={max(1, steps // 20)}",
        *TASK,
        *args.settings,
    ]


def make_job(settings: list[str], directory: Path) -> Job:
    """Check settings and load the data, as train.py does before it starts processes."""
    overrides = [*settings, "elastic.lighthouse=here", f"output_dir={directory}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=overrides, return_hydra_config=True)
    directory.mkdir()
    return check(resolve(config, config.hydra), directory, None)


class Crew:
    """Forked workers, some of which die and come back."""

    def __init__(self, job: Job, deaths: float, away: float, rng: random.Random):
        self.job, self.deaths, self.away, self.rng = job, deaths, away, rng
        self.processes: dict[int, BaseProcess] = {}
        self.dies: dict[int, float] = {}
        self.returns: dict[int, float] = {}
        self.died = 0

    def start(self, seat: int, job: Job) -> None:
        self.returns.pop(seat, None)
        process = multiprocessing.get_context("fork").Process(
            target=_worker, args=(job, seat, os.getpid())
        )
        process.start()
        self.processes[seat] = process
        mean = 60 / self.deaths if self.deaths else float("inf")
        later = self.rng.expovariate(1 / mean) if self.deaths else mean
        self.dies[seat] = time.monotonic() + later

    def train(self) -> None:
        """Train to the end."""
        together = replace(self.job, meeting=Meeting(self.job.workers.processes))
        deadline = time.monotonic() + LIMIT
        try:
            for seat in range(self.job.workers.processes):
                self.start(seat, together)
            while not any(process.exitcode == 0 for process in self.processes.values()):
                now = time.monotonic()
                alive = [seat for seat, p in self.processes.items() if p.exitcode is None]
                if not alive or now > deadline:
                    raise RunFailed("nobody is left to train" if not alive else "it hangs")
                for seat in alive:  # the state is lost with the last one
                    if now > self.dies[seat] and len(alive) > 1:
                        alive.remove(seat)
                        self.processes[seat].kill()
                        self.died += 1
                        self.dies[seat] = float("inf")
                        self.returns[seat] = now + self.away
                for seat in [seat for seat, when in self.returns.items() if now > when]:
                    self.start(seat, replace(self.job, begins=False))
                time.sleep(0.02)
            for process in self.processes.values():  # they end together
                process.join(60)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()


def _worker(job: Job, seat: int, parent: int) -> None:
    from dlion.suite.training.elastic import train_elastic

    for signal_ in SIGNALS:
        signal.signal(signal_, signal.SIG_DFL if signal_ == signal.SIGTERM else signal.SIG_IGN)
    die_with(parent)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.environ |= {"RANK": str(seat), "DLION_LAUNCHED": "0", "GLOO_SOCKET_IFNAME": LOOPBACK}
    torch.set_num_threads(1)
    code = 1
    try:
        train_elastic(job)
        code = 0
    finally:
        os._exit(code)


def changing(
    args: argparse.Namespace, key: dict[str, Any], directory: Path, steps: int, deaths: float
) -> dict[str, Any]:
    """Train with workers that come and go; return what was measured."""
    with serving() as lighthouse:
        job = replace(make_job(settings_of(args, key, steps), directory), lighthouse=lighthouse)
        crew = Crew(job, deaths, key["away"], random.Random(key["seed"]))
        crew.train()
    rows = load_run(directory).metrics
    times = [row["seconds"] for row in rows]
    between = [after - before for before, after in itertools.pairwise(times)]
    curve = [[row["seconds"], row["workers"], row.get("test_loss")] for row in rows]
    return measured(directory) | {
        "deaths_seen": crew.died,
        "worker_steps": sum(row["workers"] for row in rows),
        "longest_stall": max(between, default=0.0),
        "steps_missing": steps - len({row["step"] for row in rows}),
        "curve": curve[:: max(1, len(curve) // 200)] if deaths else [],
    }


def restarting(args: argparse.Namespace, key: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train with processes that are all restarted from a checkpoint when one dies."""
    command = [sys.executable, "train.py", *settings_of(args, key, args.steps)]
    command += [f"processes={args.workers}", "max_restarts=100000", "checkpoint_every=20"]
    command += [f"output_dir={directory}", "resume=auto"]
    rng, died = random.Random(key["seed"]), 0
    mean = 60 / (key["deaths"] * args.workers)
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        due = time.monotonic() + rng.expovariate(1 / mean)
        while launcher.poll() is None:
            if time.monotonic() > due and (directory / "metrics.jsonl").exists():
                found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True)
                if pids := found.stdout.split():
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)
                    died += 1
                due = time.monotonic() + rng.expovariate(1 / mean)
            time.sleep(0.05)
    finally:
        launcher.terminate()
        launcher.wait()
    result = measured(directory)
    return result | {"deaths_seen": died, "seconds": result["seconds"] + died * key["away"]}


def measured(directory: Path) -> dict[str, Any]:
    """Return what a finished run says of itself."""
    summary, rows = load_run(directory).summary, load_run(directory).metrics
    if summary is None:
        raise RunFailed(f"{directory.name} has not finished")
    return {
        "test_loss": summary["test_loss"],
        "test_accuracy": summary["test_accuracy"],
        "seconds": summary["seconds"],
        "sent_bits_per_parameter": rows[-1]["sent_bits_per_parameter"],
    }


def main(args: argparse.Namespace) -> None:
    facts = {"workers": args.workers, "steps": args.steps, "task": args.settings}
    points = Points(args.output / "churn.json", facts, {}, args.fresh)
    keys = [
        {"method": method, "deaths": deaths, "away": away, "seed": seed}
        for method in args.methods
        for deaths in args.deaths
        for away in (args.away if deaths else args.away[:1])
        for seed in args.seeds
    ]
    for key in points.missing(keys):
        with tempfile.TemporaryDirectory(prefix="dlion-churn-") as scratch:
            place = Path(scratch)
            rows = [changing(args, key, place / "churn", args.steps, key["deaths"])]
            rows[0]["case"] = "churn"
            if key["deaths"]:
                steps = max(1, round(rows[0]["worker_steps"] / args.workers))
                rows.append(changing(args, key, place / "whole", steps, 0) | {"case": "whole"})
                rows.append(restarting(args, key, place / "restart") | {"case": "restart"})
        points.add(key, rows)
        for row in rows:
            shown = {name: value for name, value in row.items() if name != "curve"}
            print(json.dumps(shown), flush=True)
    draw(points.rows).savefig(args.output / "churn.png", dpi=150)


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw workers present and loss over time, of the run of each method with most deaths."""
    figure = Figure(figsize=(8, 5))
    above, below = figure.subplots(2, 1, sharex=True)
    for method in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == method and row.get("curve")]
        if runs:
            curve = max(runs, key=lambda row: row["deaths_seen"])["curve"]
            above.step([point[0] for point in curve], [point[1] for point in curve], lw=1)
            tested = [(seconds, loss) for seconds, _, loss in curve if loss is not None]
            below.plot(*zip(*tested, strict=True), marker=".", label=method)
    above.set_ylabel("workers present")
    below.set(xlabel="seconds", ylabel="test loss")
    below.legend(fontsize=8)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    run(main, parse())
