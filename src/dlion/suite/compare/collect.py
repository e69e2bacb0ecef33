"""Print a CSV table of runs with a row for each, whatever became of it: its status, its summary or,
as long as there is none, its last measurements, and what was typed.

status: finished, failed or damaged (the last column says why), running, or stopped (no line for 15
minutes).
While a run of a sweep on SLURM is not finished, this is SLURM's word for its job: pending, running,
cancelled, timeout, node_fail and so on. Jobs in which no run began are listed by their folder in
.submitit; they are "submitted" where SLURM (sacct, squeue) knows nothing of them.
"""

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.arguments import add_printed_output, add_runs, make_parser, print_or_write
from dlion.suite.compare.reading import read_runs
from dlion.suite.compare.slurm_jobs import Job, ask_slurm, job_of, jobs_without_run
from dlion.suite.record.runs import CONFIG, FAILURE, METRICS, Run
from dlion.suite.record.studies import LeftOut, directories_with
from dlion.suite.terminal import printable

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what one begins with in a spreadsheet
COLUMNS = [
    "optimizer",
    "model",
    "dataset",
    "workers",
    "seed",
    "step",
    "test_accuracy",
    "test_loss",
    "train_loss",
    "sent_bytes_per_step",
    "seconds_per_step",
    "commit",
    "parameters_sha256",
]


def facts(run: Run) -> dict[str, Any]:
    """Return the facts of a run, from its configuration, measurements and summary."""
    config = run.config or {}
    last: dict[str, Any] = {}
    for row in run.metrics:
        last |= row
    known = {key: (config.get(key) or {}).get("name") for key in ("optimizer", "model", "dataset")}
    known |= {key: config.get(key) for key in ("workers", "seed")}
    for key in ("sent_bytes", "seconds"):
        if last.get(key) is not None:
            known[f"{key}_per_step"] = last[key] / last["step"]
    return known | last | (run.summary or {})


def status(run: Run, job_state: str | None) -> str:
    """Return the status of a run.

    Args:
        run: the run.
        job_state: what SLURM says of its job; None if it is none, or one SLURM does not know.
    """
    if run.finished or run.failure is not None or job_state is None:
        return run.status
    return "stopped" if job_state == "completed" else job_state


def find_sweeps(paths: list[Path]) -> list[Path]:
    """Return the directories of sweeps at or below the given ones."""
    folders = [path for path in paths if path.is_dir()]
    return sorted(set().union(*(directories_with(path, "multirun.yaml") for path in folders)))


def collect(paths: list[Path]) -> list[list[Any]]:
    """Return the table, its headings first.

    Raises:
        UserError: if a path holds neither a run nor a sweep.
    """
    sweeps = find_sweeps(paths)
    holding = [path for path in paths if not _holds_only_sweeps(path)]
    damaged: list[tuple[Path, str]] = []

    def note(place: Path, reason: str) -> None:
        damaged.append((place, reason))

    runs = read_runs(holding, (METRICS, FAILURE, CONFIG), note)
    jobs: dict[Path, Job | None] = dict.fromkeys(run.directory for run in runs)
    for path in jobs:
        with _listed_if_odd(path, note):
            jobs[path] = job_of(path)
    waiting: dict[Job, tuple[Path, list[str]]] = {}
    for sweep in sweeps:
        begun = [job for path, job in jobs.items() if job and sweep in path.parents]
        with _listed_if_odd(sweep, note):
            waiting |= jobs_without_run(sweep, begun)
    unfinished = [jobs[run.directory] for run in runs if not run.finished]
    states = ask_slurm([*filter(None, unfinished), *waiting])
    table: list[list[Any]] = [["status", "directory", *COLUMNS, "overrides", "failure"]]
    for run in runs:
        known, job = facts(run), jobs[run.directory]
        values = [known.get(column) for column in COLUMNS]
        state = status(run, states.get(job) if job else None)
        table.append([state, run.directory, *values, " ".join(run.overrides), run.failure])
    nothing = [None] * len(COLUMNS)
    for path, reason in damaged:
        table.append(["damaged", path, *nothing, None, reason])
    for job, (folder, typed) in waiting.items():
        table.append([states.get(job, "submitted"), folder, *nothing, " ".join(typed), None])
    return table


@contextlib.contextmanager
def _listed_if_odd(path: Path, note: LeftOut) -> Iterator[None]:
    """Note the fault of a file under its directory."""
    try:
        yield
    except UserError as error:
        note(path, str(error))


def guarded(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula and no terminal for a command."""
    if cell is None or isinstance(cell, int | float):
        return cell
    text = printable(str(cell), allowed="\n\t")
    return f"'{text}" if str(cell).startswith(FORMULA) else text


def _holds_only_sweeps(path: Path) -> bool:
    """Whether there are sweeps in a directory but no run: all their jobs wait."""
    if not path.is_dir() or not directories_with(path, "multirun.yaml"):
        return False
    return not directories_with(path, METRICS, FAILURE, CONFIG)


def main(arguments: list[str]) -> None:
    parser = make_parser("collect", __doc__, "outputs -o runs.csv")
    add_runs(parser)
    add_printed_output(parser, ".csv")
    options = parser.parse_args(arguments)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(map(guarded, row) for row in collect(options.runs))
    print_or_write(text.getvalue(), options.output, "runs.csv")
