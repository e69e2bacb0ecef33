"""Training while workers die (SIGKILL) and come back, against runs that lose nobody or restart.

    python benchmarks/churn.py [--methods dlion_mavo g_adamw] [--deaths 0 1 3] [--away 10 60]

Every worker dies after an exponential time, so many times a minute, and another takes its place
after so many seconds. Cases: `churn`; `whole`, as many worker-steps without failures; `restart`,
the same failures where the run stops and all restart from a checkpoint (max_restarts), with the
seconds away added for each death. Appends a line to runs.csv and to curves.jsonl after every run,
and leaves out what is there; churn.png shows workers present and loss over time.
"""

import argparse
import csv
import itertools
import json
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

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as train.py does, before torch's import

from common import ROOT, Parser, fork, run
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from dlion.errors import RunFailed
from dlion.suite.arguments import number, whole
from dlion.suite.config import resolve
from dlion.suite.launch.check import check
from dlion.suite.launch.elastic import Meeting, serving
from dlion.suite.record.provenance import commit
from dlion.suite.record.runs import load_run
from dlion.suite.training import Job

METHODS = ["g_adamw", "dlion_mavo", "dlion_avg", "lion_cub", "sign_muon_mavo", "diloco"]
CASES = ["churn", "whole", "restart"]
TASKS = {
    "digits": ["dataset=mnist5k"],
    "text": ["experiment=board_text", "schedule.warmup_steps=20", "eval_limit=2000"],
    "smoke": ["dataset=digits", "model=linear", "batch_size=8"],
}
LIMIT = 1800  # seconds, at most, of a run
KEY = ["task", "workers", "steps", "method", "deaths", "away", "seed", "case"]
FIELDS = [
    *KEY, "step", "worker_steps", "test_loss", "test_accuracy", "seconds", "bits", "died", "left",
    "joined", "longest_stall", "load", "commit",
]  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, ROOT / "results" / "churn", beside="torchft")
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--deaths", nargs="+", type=number(0), default=[0, 0.2, 1, 3])
    parser.add_argument("--away", nargs="+", type=number(0), default=[10, 60], help="seconds")
    parser.add_argument("--seeds", nargs="+", type=whole(0), default=[0])
    parser.add_argument("--workers", type=whole(2), default=8)
    parser.add_argument("--steps", type=whole(1), default=800)
    parser.add_argument("--minutes", type=number(0), default=600, help="no run starts after these")
    parser.add_argument("--patience", type=number(1), default=300, help="seconds of a `restart`")
    return parser.read(
        arguments, methods=["dlion_mavo"], deaths=[10], away=[1], workers=3, steps=60, seeds=[0],
        task="smoke", cases=CASES,
    )  # fmt: skip


def settings_of(args: argparse.Namespace, key: dict[str, Any], steps: int) -> list[str]:
    """Return the settings of a run."""
    return [
        *TASKS[args.task],
        f"optimizer={key['method']}",
        f"seed={key['seed']}",
        f"workers={args.workers}",
        f"steps={steps}",
        f"eval_every={max(1, steps // 20)}",
        "logger=none",
        "log_every=1",
    ]


def make_job(settings: list[str], directory: Path) -> Job:
    """Check settings and load the data, as train.py does before it starts processes."""
    overrides = [*settings, f"output_dir={directory}"]
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
        self.processes[seat] = fork(_worker, job, seat)
        later = self.rng.expovariate(self.deaths / 60) if self.deaths else float("inf")
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
                for seat in [seat for seat in alive if now > self.dies[seat]]:
                    if len(alive) > 1:  # the state is lost with the last one
                        alive.remove(seat)
                        self.processes[seat].kill()
                        self.died += 1
                        self.dies[seat] = float("inf")
                        self.returns[seat] = now + self.away
                for seat in [seat for seat, when in self.returns.items() if now > when]:
                    self.start(seat, self.job)
                time.sleep(0.02)
            for process in self.processes.values():  # they end together
                process.join(60)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()


def _worker(job: Job, seat: int) -> None:
    from dlion.suite.training.elastic import train_elastic

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.environ |= {"RANK": str(seat), "DLION_LAUNCHED": "0"}
    train_elastic(job)


def changing(
    args: argparse.Namespace, key: dict[str, Any], directory: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with workers that come and go; return what was measured, and curves over time."""
    with serving() as lighthouse:
        settings = [*settings_of(args, key, args.steps), "elastic.lighthouse=here"]
        job = replace(make_job(settings, directory), lighthouse=lighthouse)
        crew = Crew(job, key["deaths"], key["away"], random.Random(key["seed"]))
        crew.train()
    found = load_run(directory)
    rows, events = found.metrics, [row["event"] for row in found.events]
    steps = [0, *(row["step"] for row in rows)]  # of local updates, once a round
    taken = [after - before for before, after in itertools.pairwise(steps)]
    if steps[-1] != args.steps or min(taken) < 1 or max(taken) != taken[0]:
        raise RunFailed(f"rows are missing: {steps}")
    times = [row["seconds"] for row in rows]
    between = [after - before for before, after in itertools.pairwise(times)]
    present = [[row["seconds"], row["workers"]] for row in rows]
    changes = [b for a, b in itertools.pairwise(present) if a[1] != b[1]]
    return measured(directory) | {
        "died": crew.died,
        "left": events.count("left"),
        "joined": events.count("joined"),
        "worker_steps": sum(row["workers"] * count for row, count in zip(rows, taken, strict=True)),
        "longest_stall": max(between, default=0.0),
    }, {
        "present": [present[0], *changes, present[-1]],
        "loss": [[row["seconds"], row["test_loss"]] for row in rows if "test_loss" in row],
    }


def fixed(
    args: argparse.Namespace, key: dict[str, Any], directory: Path, worker_steps: int
) -> dict[str, Any]:
    """Train without failures, for as many worker-steps; the bits are those of elastic=true."""
    settings = settings_of(args, key, max(1, round(worker_steps / args.workers)))
    command = [sys.executable, "train.py", *settings, f"output_dir={directory}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(done.stderr.strip().splitlines()[-1])
    return measured(directory) | {"worker_steps": worker_steps}


def restarting(args: argparse.Namespace, key: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train with processes that are all restarted from a checkpoint when one dies."""
    command = [sys.executable, "train.py", *settings_of(args, key, args.steps)]
    command += [f"processes={args.workers}", "max_restarts=100000", "checkpoint_every=20"]
    command += [f"output_dir={directory}"]
    rng, died = random.Random(key["seed"]), 0
    rate = key["deaths"] * args.workers / 60
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while launcher.poll() is None and not (directory / "metrics.jsonl").exists():
            time.sleep(0.05)
        began = time.monotonic()
        due = began + rng.expovariate(rate)
        while launcher.poll() is None and time.monotonic() < began + args.patience:
            if time.monotonic() > due:
                found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True)
                if pids := found.stdout.split():
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)
                    died += 1
                due = time.monotonic() + rng.expovariate(rate)
            time.sleep(0.05)
        seconds = time.monotonic() - began
    finally:
        launcher.terminate()
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
    return measured(directory) | {"died": died, "seconds": seconds + died * key["away"]}


def measured(directory: Path) -> dict[str, Any]:
    """Return what a run says of itself; without a loss, it has not finished."""
    found = load_run(directory)
    summary, last = found.summary or {}, found.metrics[-1]
    return {
        "step": last["step"],
        "test_loss": summary.get("test_loss"),
        "test_accuracy": summary.get("test_accuracy"),
        "seconds": summary.get("seconds"),
        "bits": last["sent_bits_per_parameter"],
    }


class Runs:
    """The lines of runs.csv, one a run, and of curves.jsonl."""

    def __init__(self, folder: Path, fresh: bool):
        self.file, self.curves = folder / "runs.csv", folder / "curves.jsonl"
        if fresh or not self.file.exists():
            self.file.write_text(",".join(FIELDS) + "\n")
            self.curves.write_text("")
        with self.file.open(newline="") as lines:
            self.rows = list(csv.DictReader(lines))

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        wanted = {name: str(value) for name, value in key.items()}
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def add(
        self, key: dict[str, Any], row: dict[str, Any], curve: dict[str, Any] | None = None
    ) -> None:
        row = {**key, **row, "load": os.getloadavg()[0], "commit": commit()}
        row = {
            k: round(v, 4) if isinstance(v, float) and k not in KEY else v for k, v in row.items()
        }
        with self.file.open("a", newline="") as lines:
            csv.DictWriter(lines, FIELDS).writerow(row)
        if curve is not None:
            with self.curves.open("a") as lines:
                lines.write(json.dumps({**key, **curve}) + "\n")
        self.rows.append({name: "" if row.get(name) is None else str(row[name]) for name in FIELDS})
        print(json.dumps(row), flush=True)


def main(args: argparse.Namespace) -> None:
    runs, end = Runs(args.output, args.fresh), time.monotonic() + 60 * args.minutes
    for seed, method, deaths in itertools.product(args.seeds, args.methods, args.deaths):
        for away in args.away if deaths else args.away[:1]:
            cell = {
                "task": args.task, "workers": args.workers, "steps": args.steps, "method": method,
                "deaths": float(deaths), "away": float(away), "seed": seed,
            }  # fmt: skip
            for case in args.cases if deaths else ["churn"]:
                key = cell | {"case": case}
                if runs.find(key) or time.monotonic() > end:
                    continue
                with tempfile.TemporaryDirectory(prefix="dlion-churn-") as scratch:
                    place = Path(scratch) / "run"
                    if case == "churn":
                        runs.add(key, *changing(args, key, place))
                    elif case == "restart":
                        runs.add(key, restarting(args, key, place))
                    elif churn := runs.find(cell | {"case": "churn"}):
                        runs.add(key, fixed(args, key, place, int(churn["worker_steps"])))
    draw(runs.curves).savefig(args.output / "churn.png", dpi=150)


def draw(curves: Path) -> Figure:
    """Draw workers present and loss over time, of the run of each method with most changes."""
    figure = Figure(figsize=(8, 5))
    above, below = figure.subplots(2, 1, sharex=True)
    most: dict[str, dict[str, Any]] = {}
    for line in curves.read_text().splitlines():
        found = json.loads(line)
        before = most.get(found["method"])
        if before is None or len(found["present"]) > len(before["present"]):
            most[found["method"]] = found
    for method, curve in most.items():
        above.step(*zip(*curve["present"], strict=True), where="post", lw=1)
        below.plot(*zip(*curve["loss"], strict=True), marker=".", label=method)
    above.set_ylabel("workers present")
    below.set(xlabel="seconds", ylabel="test loss")
    below.legend(fontsize=8)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    run(main, parse())
