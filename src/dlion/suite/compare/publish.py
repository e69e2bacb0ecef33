"""Put finished runs into results/.

Packs metrics, summary, configuration and overrides of the runs into NAME/runs.jsonl, behind those
that are there already. A run is called METHOD-nN-sSEED; where that is not unique, as in a sweep
over something else, it keeps the name of its directory, and gets a number behind it where the study
has that name. Writes which commits, machines and commands the runs come from (provenance.txt) and a
figure of all runs of the study (curves.png), and prints a table.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.arguments import add_runs, make_parser
from dlion.suite.compare import plot
from dlion.suite.compare.commands import command
from dlion.suite.compare.curves import choose_metric
from dlion.suite.compare.reading import read_runs
from dlion.suite.compare.style import CURVES
from dlion.suite.files import write_atomically
from dlion.suite.inside import read
from dlion.suite.record.runs import Run
from dlion.suite.record.studies import PACKED, add_to_packed, are_in, read_packed
from dlion.suite.terminal import printable

NOT_RECORDED = "not recorded"  # by runs of older commits


def provenance(runs: list[Run]) -> str:
    """Return the provenance of runs' figures as lines."""
    origins: dict[str, list[str]] = {"commit": [], "machine": [], "versions": [], "command": []}
    for run in runs:
        summary = run.summary or {}
        versions = (f"{name} {number}" for name, number in summary.get("versions", {}).items())
        origins["commit"].append(summary.get("commit") or NOT_RECORDED)
        origins["machine"].append(summary.get("machine", NOT_RECORDED))
        origins["versions"].append(", ".join(versions) or NOT_RECORDED)
        origins["command"].append(command(run))
    lines = []
    for name, values in origins.items():
        for value, count in Counter(values).items():
            share = "" if count == len(runs) else f" ({count} of {len(runs)} runs)"
            lines.append(f"{name:<9} {printable(str(value))}{share}\n")
    return "".join(lines)


def publish(runs: list[Run], study: Path) -> None:
    """Pack runs into the directory of a study, and note where they come from.

    Raises:
        UserError: if a run is not finished, published already, or has not the metric of the others.
    """
    unfinished = [str(run.directory) for run in runs if not run.finished]
    if unfinished:
        raise UserError(f"not finished: {', '.join(unfinished)}: give finished runs")
    packed = study / PACKED
    choose_metric([*(read_packed(packed) if packed.exists() else []), *runs])
    cut_off = not (study / CURVES).exists() and are_in(packed, runs)  # before the figure was there
    if not cut_off:
        add_to_packed(packed, _named(runs))
    origins = study / "provenance.txt"  # behind those of runs published before
    text = read(study, origins.name)
    before = "" if text is None else text.decode() + "\n"
    if not (cut_off and provenance(runs) in before):
        write_atomically(origins, before + provenance(runs))


def _named(runs: list[Run]) -> list[tuple[str, Run]]:
    """Return the runs with the names that they are to have in a packed file."""
    names = [_name(run.summary or {}) for run in runs]
    if len(set(names)) < len(names):
        names = [run.directory.name for run in runs]
    return list(zip(names, runs, strict=True))


def _name(summary: dict[str, Any]) -> str:
    name = f"{summary['optimizer']}-n{summary['workers']}-s{summary.get('seed')}"
    return re.sub(r"[^\w.+=-]", "_", name)  # it is one of a file


def _refuse(_: Path, reason: str) -> None:
    """Publish all runs or none."""
    raise UserError(reason)


def main(arguments: list[str]) -> None:
    parser = make_parser("publish", __doc__, "runs/dlion_theory -o results/dlion_theory")
    add_runs(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="results/NAME",
        help="where to; runs that are there already stay as they are",
    )
    options = parser.parse_args(arguments)
    publish(read_runs(options.runs, left_out=_refuse), options.output)
    plot.main([str(options.output / PACKED), "-o", str(options.output / CURVES)])
