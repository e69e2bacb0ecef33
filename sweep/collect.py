"""Collect runs into one CSV table: python sweep/collect.py RUN_DIR... > table.csv

A row for each run, finished or not: what was typed, and the summary.
"""

import csv
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


def main() -> None:
    try:
        runs = find_runs([Path(argument) for argument in sys.argv[1:]])
    except UserError as error:
        sys.exit(f"error: {error}")
    table = csv.writer(sys.stdout)
    table.writerow(["finished", *COLUMNS, "overrides"])
    for run in runs:
        values = [(run.summary or {}).get(column) for column in COLUMNS]
        table.writerow([run.finished, *values, overrides(run)])


if __name__ == "__main__":
    main()
