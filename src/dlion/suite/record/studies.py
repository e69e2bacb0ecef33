"""The runs of studies: found below directories, and packed into one file.

A packed file, ``runs.jsonl``, has one line per run, a JSON object with ``name``, ``overrides``
(what was typed), ``config`` (with all that it looked up in itself filled in), ``summary`` and
``metrics`` (the rows, then events). Reading it executes nothing.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.files import write_atomically
from dlion.suite.inside import LARGE, Refused, read
from dlion.suite.record.runs import FAILURE, METRICS, Run, load_run

PACKED = "runs.jsonl"
LeftOut = Callable[[Path, str], None]  # told which run is left out, and why in a sentence


def find_runs(
    paths: list[Path],
    marks: tuple[str, ...] = (METRICS, FAILURE),
    left_out: LeftOut | None = None,
) -> list[Run]:
    """Return all runs at or below the given paths, sorted by directory.

    Args:
        paths: packed files, and directories with runs, or packed files, at any depth.
        marks: the files that make a directory that of a run.
        left_out: called for a run or a packed file that is damaged, which is then left out.

    Raises:
        UserError: if a path does not exist or holds no run, or, without ``left_out``, if a run is
            damaged.
    """
    runs: dict[Path, Run] = {}  # by its true place: two paths may lead there
    for path in paths:
        places = list(_places(path, marks, left_out))
        read = (run for place in places for run in _read(place, left_out))
        found = {run.directory.resolve(): run for run in read}
        if not found and not (places and left_out):
            raise UserError(
                f"{path} holds no run: give a directory with a {METRICS} or a {PACKED} below it"
            )
        runs = found | runs
    return sorted(runs.values(), key=lambda run: run.directory)


def _places(path: Path, marks: tuple[str, ...], left_out: LeftOut | None) -> Iterator[Path]:
    """Yield the directories of runs and the packed files at or below a path."""
    if path.is_file():
        yield path.resolve() if path.is_symlink() else path  # it is the user who names the link
        return
    yield from directories_with(path, *marks, left_out=left_out)
    yield from path.rglob(PACKED)


def _read(place: Path, left_out: LeftOut | None) -> list[Run]:
    """Return the runs of a place, but for those that are damaged."""
    try:
        return [load_run(place)] if place.is_dir() else read_packed(place, left_out)
    except (OSError, ValueError, RecursionError) as error:
        if left_out is None:
            raise
        reason = str(error) if isinstance(error, UserError | Refused) else f"{place}: {error}"
        left_out(place, reason)
        return []


def directories_with(path: Path, *files: str, left_out: LeftOut | None = None) -> set[Path]:
    """Return the directories at or below ``path`` that hold one of the files, given by name.

    ``left_out`` is called for a directory that cannot be read.

    Raises:
        UserError: if the path is not a directory.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give the output directories of runs")

    def say(error: OSError) -> None:
        if left_out is not None:
            left_out(Path(error.filename), f"{error.filename} could not be read ({error.strerror})")

    found = set()
    for folder, _, names in os.walk(path, onerror=say):
        for name in files:
            if name in names or ("/" in name and Path(folder, name).exists()):
                found.add(Path(folder))
    return found


def pack(run: Run, name: str) -> str:
    """Return the line of a packed file that holds a run under this name."""
    parts = {
        "name": name,
        "overrides": run.overrides,
        "config": run.config,
        "summary": run.summary,
        "metrics": [*run.metrics, *run.events],
    }
    return json.dumps(parts) + "\n"


def add_to_packed(file: Path, runs: Iterable[tuple[str, Run]]) -> None:
    """Add named runs behind those that a packed file holds already.

    A name that another run has gets a number: NAME-2, NAME-3, ...

    Raises:
        UserError: if it holds one of the runs, under whatever name.
    """
    text = (read(file.parent, file.name, LARGE) or b"").decode()
    there = {_contents(run): run.directory.name for run in read_packed(file)} if text else {}
    given: dict[str, Path] = {}
    for name, run in runs:
        if _contents(run) in given:
            raise UserError(
                f"{run.directory} is a copy of {given[_contents(run)]}: publish each run once"
            )
        if _contents(run) in there:
            known = there[_contents(run)]
            raise UserError(
                f"{run.directory} is in {file} already, as {known}: publish each run once"
            )
        given[_contents(run)] = run.directory
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        free = next(
            each for each in itertools.chain([name], numbered) if each not in there.values()
        )
        there[_contents(run)] = free
        text += pack(run, free)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def are_in(file: Path, runs: Iterable[Run]) -> bool:
    """Whether a packed file holds all of some runs, under whatever names."""
    there = {_contents(run) for run in read_packed(file)} if file.exists() else set()
    return {_contents(run) for run in runs} <= there


def _contents(run: Run) -> str:
    """Return a text that no other run has, as measured times differ."""
    return json.dumps([run.config, run.metrics])


def read_packed(file: Path, left_out: LeftOut | None = None) -> list[Run]:
    """Read the runs of a packed file.

    Args:
        left_out: as for :func:`find_runs`, for the lines that are damaged.

    Raises:
        UserError: if it is no text; without ``left_out``, if a line is not a run, or two runs have
            one name.
    """
    try:
        lines = (read(file.parent, file.name, LARGE) or b"").decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not a file of packed runs ({PACKED}), as it is not text: give the"
            " directory of runs"
        ) from error
    runs: dict[str, Run] = {}
    damaged = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            run = _unpack(file, json.loads(line))
            if run.directory.name in runs:
                raise ValueError(f"a second run called {run.directory.name}")
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            if left_out is None:
                raise UserError(_no_packed_run(file, number, reason)) from error
            damaged.append((number, reason))
        else:
            runs[run.directory.name] = run
    if damaged and left_out is not None:
        left_out(file, _no_packed_run(file, *damaged[0], len(damaged)))
    return list(runs.values())


def _no_packed_run(file: Path, number: int, reason: str, lines: int = 1) -> str:
    """Say which line of a packed file is damaged, the first of so many."""
    which = "is no packed run" if lines == 1 else f"and {lines - 1} more are no packed runs"
    these = "that line" if lines == 1 else "these lines"
    return f"{file}, line {number} {which} ({reason}): restore the file, or delete {these}"


def _unpack(file: Path, parts: Any) -> Run:
    """Return the run of a packed line.

    Raises:
        ValueError: if a part is missing or of another kind.
    """
    if not isinstance(parts, dict):
        raise ValueError("not a JSON object")
    name = _part(parts, "name", str)
    if not name or Path(name).name != name:
        raise ValueError(f"name {name!r} is no file name")
    metrics = _part(parts, "metrics", list)
    if not all(isinstance(row, dict) for row in metrics):
        raise ValueError("metrics are not a list of objects")
    return Run(
        directory=file / name,
        metrics=[row for row in metrics if "event" not in row],
        events=[row for row in metrics if "event" in row],
        summary=_part(parts, "summary", dict, type(None)),
        config=_part(parts, "config", dict, type(None)),
        overrides=[str(override) for override in _part(parts, "overrides", list)],
        study=file.resolve().parent.name,
    )


def _part(parts: dict[str, Any], key: str, *kinds: type) -> Any:
    if key not in parts or not isinstance(parts[key], kinds):
        raise ValueError(f"{key} is missing or not a {kinds[0].__name__}")
    return parts[key]
