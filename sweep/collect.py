"""Collect runs into one CSV table: python sweep/collect.py RUN_DIR... > table.csv

A row for each run, finished, running, stopped or failed (why): what was typed, and the summary.
"""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from dlion.errors import UserError
from dlion.results.record import Run, find_runs

COLUMNS = ["optimizer", "test_accuracy", "test_loss", "train_loss", "sent_bytes_per_step",
           "seconds_per_step", "seed", "parameters_sha256"]  # fmt: skip


def overrides(run: Run) -> str:
    """The overrides of the run as they were typed."""
    file = run.directory / ".hydra" / "overrides.yaml"
    return " ".join(OmegaConf.load(file)) if file.exists() else ""


def status(run: Run) -> str:
    """Of the run; if SLURM knows more about one that is not finished, what it says."""
    hydra, sacct = run.directory / ".hydra" / "hydra.yaml", shutil.which("sacct")
    if run.finished or run.failure is not None or sacct is None or not hydra.exists():
        return run.status
    job = OmegaConf.select(OmegaConf.load(hydra), "hydra.job.id")
    if not re.fullmatch(r"\d+(_\d+)?", str(job)):
        return run.status
    command = [sacct, "-XPn", "-j", str(job), "-o", "State"]
    try:
        states = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except subprocess.TimeoutExpired:
        states = []
    return states[0].lower() if states else run.status


def main() -> None:
    try:
        runs = find_runs([Path(argument) for argument in sys.argv[1:]])
    except UserError as error:
        sys.exit(f"error: {error}")
    table = csv.writer(sys.stdout)
    table.writerow(["status", *COLUMNS, "overrides", "failure"])
    for run in runs:
        values = [(run.summary or {}).get(column) for column in COLUMNS]
        table.writerow([status(run), *values, overrides(run), run.failure])


if __name__ == "__main__":
    main()
