"""What the momentum of a worker that joins should start at: zero, or that of a peer.

    python benchmarks/joiner.py [--tasks digits text] [--seeds 0 1 2] [--every 100]

Workers are virtual, so that runs are exact and differ in nothing else: at every step each of them
leaves with a probability of one in `--every`, and another takes its place at once. `kept` is the
run that nobody leaves. Appends a line to joiner.csv after every run, and leaves out what is there.
"""

import argparse
import csv
import itertools
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Parser, run
from hydra import compose, initialize_config_dir
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlion.suite.arguments import whole
from dlion.suite.config import resolve
from dlion.suite.launch.check import check
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.runner import work
from dlion.suite.record.provenance import commit
from dlion.suite.record.runs import load_run
from dlion.suite.training import Job

METHODS = ["dlion_mavo", "dlion_avg", "lion_cub", "sign_muon_mavo"]
TASKS = {
    "digits": ["dataset=mnist5k"],
    "text": ["experiment=board_text", "schedule.warmup_steps=20", "eval_limit=2000"],
    "smoke": ["dataset=digits", "model=linear", "batch_size=8"],
}
STARTS = ["kept", "zero", "peer"]
KEY = ["task", "steps", "every", "method", "seed", "start"]
FIELDS = [*KEY, "test_loss", "train_loss", "joined", "commit"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, ROOT / "results" / "churn")
    parser.add_argument("--tasks", nargs="+", choices=["digits", "text"], default=["digits"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=whole(0), default=[0, 1, 2])
    parser.add_argument("--steps", type=whole(1), default=400)
    parser.add_argument("--every", nargs="+", type=whole(1), default=[100], help="steps")
    return parser.read(
        arguments, tasks=["smoke"], methods=["dlion_mavo"], seeds=[0], steps=8, every=[4]
    )


def train(key: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train with 8 virtual workers; return what was measured."""
    settings = [
        *TASKS[key["task"]],
        f"optimizer={key['method']}",
        f"seed={key['seed']}",
        f"steps={key['steps']}",
        f"eval_every={key['steps']}",
        "workers=8",
        "processes=1",
        "logger=none",
    ]
    run_processes(1, _work, make_job(settings, directory), key)
    found = load_run(directory)
    assert found.summary is not None
    return {
        "test_loss": found.summary["test_loss"],
        "train_loss": found.metrics[-1]["train_loss"],
        "joined": len(joins(key)),
    }


def make_job(settings: list[str], directory: Path) -> Job:
    """Check settings and load the data, as train.py does before it starts processes."""
    overrides = [*settings, f"output_dir={directory}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=overrides, return_hydra_config=True)
    directory.mkdir()
    return check(resolve(config, config.hydra), directory, None)


def joins(key: dict[str, Any]) -> list[tuple[int, int]]:
    """Return who leaves after which step, the same for all methods; of `kept` nobody."""
    if key["start"] == "kept":
        return []
    rng = random.Random(key["seed"])
    everyone = itertools.product(range(1, key["steps"] + 1), range(8))
    return [pair for pair in everyone if rng.random() < 1 / key["every"]]


def _work(job: Job, key: dict[str, Any]) -> float | None:
    leaving = set(joins(key))

    def take_places(optimizer: Any, *_: Any) -> None:
        step = optimizer.param_groups[0]["steps"]
        for worker in range(8):
            if (step, worker) in leaving:
                for bucket in optimizer.buckets:
                    for rows in bucket.own.values():
                        peer = rows[(worker + 1) % 8]
                        rows[worker] = peer if key["start"] == "peer" else 0

    register_optimizer_step_post_hook(take_places)
    return work(job)


def main(args: argparse.Namespace) -> None:
    file = args.output / "joiner.csv"
    if args.fresh or not file.exists():
        file.write_text(",".join(FIELDS) + "\n")
    with file.open(newline="") as lines:
        there = {tuple(row[name] for name in KEY) for row in csv.DictReader(lines)}
    cells = itertools.product(args.tasks, args.every, args.seeds, args.methods, STARTS)
    for task, every, seed, method, start in cells:
        key = {
            "task": task, "steps": args.steps, "every": every, "method": method, "seed": seed,
            "start": start,
        }  # fmt: skip
        if tuple(map(str, key.values())) in there:
            continue
        with tempfile.TemporaryDirectory(prefix="dlion-joiner-") as scratch:
            row = {**key, **train(key, Path(scratch) / "run"), "commit": commit()}
        with file.open("a", newline="") as lines:
            csv.DictWriter(lines, FIELDS).writerow(row)
        print(row, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main, parse())
