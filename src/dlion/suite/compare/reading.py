"""Runs as the commands read them: one with an invalid file is left out by name.

A folder of runs may come from anybody: what its files say is checked before it is used.
"""

import reprlib
import sys
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.record.runs import CONFIG, FAILURE, METRICS, SUMMARY, Run
from dlion.suite.record.studies import LeftOut, find_runs
from dlion.suite.settings import TRAITS, is_group
from dlion.suite.terminal import in_one_line

_MOST = 2**63  # a larger whole number cannot always be made a float
_NAMES = {str: "a word", int: "a whole number", float: "a number", dict: "a group of settings"}
_GROUPS = [name for name, traits in TRAITS.items() if traits.compared and is_group(name)]
_COUNTS = {"workers": int, "seed": int}
_SUMMARY = {"optimizer": str, "model": str, "dataset": str, "workers": int}
_SUMMARY |= {"paper_bits_up": float, "paper_bits_down": float}
_MEASURED = {"seconds": float, "sent_bytes": float, "sent_bits_per_parameter": float}
_NUMBERS = ("train_loss", "test_loss", "test_accuracy", "received_bytes")


def read_runs(
    paths: list[Path],
    marks: tuple[str, ...] = (METRICS, FAILURE),
    left_out: LeftOut | None = None,
) -> list[Run]:
    """Return all runs at or below the given paths that can be read, sorted by directory.

    Args:
        paths: as :func:`find_runs` takes them.
        marks: the same.
        left_out: called with the directory or file that is left out, and a sentence that says why;
            None: a line on standard error.

    Raises:
        UserError: if a path does not exist or holds no run, or none that can be read.
    """
    left_out = left_out or warn_left_out
    good = []
    for run in find_runs(paths, marks, left_out):
        try:
            check(run)
        except UserError as error:
            left_out(run.directory, str(error))
        else:
            good.append(run)
            if run.damaged_rows:
                place = run.directory / METRICS
                warn_left_out(place, f"{run.damaged_rows} damaged lines of {place}")
    if not good and left_out is warn_left_out:
        raise UserError("none of these runs can be read: give others")
    return good


def warn_left_out(_: Path, reason: str) -> None:
    """Say what is left out, and why."""
    print(in_one_line(f"warning: left out: {reason}"), file=sys.stderr)


def check(run: Run) -> None:
    """Check that a run's files have the contents that commands rely on.

    Raises:
        UserError: if they do not.
    """
    config, summary = run.config or {}, run.summary
    _expect(run, CONFIG, config, dict.fromkeys(_GROUPS, dict) | _COUNTS)
    for group in _GROUPS:
        _expect(run, CONFIG, config.get(group) or {}, {"name": str})
    if summary is not None:
        _expect(run, SUMMARY, summary, _SUMMARY, needed=True)
        _expect(run, SUMMARY, summary, _COUNTS | {"state_bytes_per_parameter": float})
    for file, part in ((SUMMARY, summary or {}), *((METRICS, row) for row in run.metrics)):
        for key, value in part.items():
            if type(value) is int and abs(value) > _MOST:
                raise UserError(f"{run.directory / file} is invalid: {key} is above 2^63")
    for row in run.metrics:
        _expect(run, METRICS, row, {"step": float}, needed=True)
        if not row["step"] > 0:
            raise UserError(
                f"{run.directory / METRICS} is invalid: step must be above 0, got {row['step']}"
            )
        _expect(run, METRICS, row, _MEASURED, needed="test_loss" in row)
        _expect(run, METRICS, row, dict.fromkeys(_NUMBERS, float))


def _expect(
    run: Run, file: str, part: dict[str, Any], kinds: dict[str, type], needed: bool = False
) -> None:
    """Check the kinds of values, which may be missing or null unless they are needed."""
    for key, kind in kinds.items():
        value = part.get(key)
        allowed = (int, float) if kind is float else kind
        if value is None and not needed:
            continue
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise UserError(
                f"{run.directory / file} is invalid: {key} must be {_NAMES[kind]},"
                f" got {reprlib.repr(value)}"
            )
