"""Collect runs into one CSV table, a row for each, whatever became of it: what was typed, and its
summary or, as long as there is none, its last measurements.

status: finished, failed (the last column says why), running, or stopped (no line for 15 minutes).
While a run of a sweep on SLURM is not finished, this is SLURM's word for its job: pending, running,
cancelled, timeout, node_fail and so on. Jobs in which no run began are listed by their folder in
.submitit; they are "submitted" where SLURM (sacct, squeue) knows nothing of them.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from dlion.compare.commands import run_overrides
from dlion.compare.slurm_jobs import Job, ask_slurm, job_of, jobs_without_run
from dlion.errors import UserError
from dlion.record.runs import CONFIG, FAILURE, METRICS, Run, directories_with, load_run

COLUMNS = ["optimizer", "model", "dataset", "workers", "seed", "step", "test_accuracy", "test_loss",
           "train_loss", "sent_bytes_per_step", "seconds_per_step", "commit",
           "parameters_sha256"]  # fmt: skip


def facts(run: Run) -> dict[str, Any]:
    """What is known of a run, from its configuration, its last measurements and its summary."""
    config, last = run.config or {}, {}
    for row in run.metrics:
        last |= row
    found = {key: (config.get(key) or {}).get("name") for key in ("optimizer", "model", "dataset")}
    found |= {key: config.get(key) for key in ("workers", "seed")}
    if last:
        found |= {f"{key}_per_step": last[key] / last["step"] for key in ("sent_bytes", "seconds")}
    return found | last | (run.summary or {})


def status(run: Run, state: str | None) -> str:
    """Of a run; ``state``: what SLURM says of its job, if it is one, and SLURM knows it."""
    if run.finished or run.failure is not None or state is None:
        return run.status
    return "stopped" if state == "completed" else state


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.compare.collect",
        description=__doc__,
        epilog="example: python -m dlion.compare.collect outputs > runs.csv",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR",
                        help="of a run, of a sweep, or above many of them")  # fmt: skip
    directories: set[Path] = set()
    sweeps: set[Path] = set()
    try:
        for path in parser.parse_args().directories:
            found = directories_with(path, METRICS, FAILURE, CONFIG)
            folders = directories_with(path, "multirun.yaml")
            if not found | folders:
                raise UserError(f"{path} holds no run: give a directory with runs below it")
            directories |= found
            sweeps |= folders
        runs = [(load_run(directory), job_of(directory)) for directory in sorted(directories)]
    except UserError as error:
        parser.error(str(error))
    waiting: dict[Job, tuple[Path, list[str]]] = {}
    for sweep in sorted(sweeps):
        begun = (job for run, job in runs if job and sweep in run.directory.parents)
        waiting |= jobs_without_run(sweep, begun)
    states = ask_slurm([*(job for run, job in runs if job and not run.finished), *waiting])
    table = csv.writer(sys.stdout)
    table.writerow(["status", "directory", *COLUMNS, "overrides", "failure"])
    for run, job in runs:
        row = [status(run, states.get(job)), run.directory, *map(facts(run).get, COLUMNS)]
        table.writerow([*row, " ".join(run_overrides(run.directory)), run.failure])
    for job, (folder, typed) in waiting.items():
        row = [states.get(job, "submitted"), folder, *[None] * len(COLUMNS)]
        table.writerow([*row, " ".join(typed), None])


if __name__ == "__main__":
    main()
