"""Put finished runs into results/.

Small files only: copies metrics, summary and configuration of a run to NAME/runs/METHOD-nN-sSEED
(of a sweep over something else: to the name it has there), and writes what was typed and measured
(runs.csv), a table (table.txt), a figure (curves.png), and which commits, machines and commands
they come from (provenance.txt).
"""

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from dlion.compare.commands import command
from dlion.errors import UserError
from dlion.record.runs import Run, find_runs

NOT_RECORDED = "not recorded"  # by runs of older commits
FILES = ("metrics.jsonl", "summary.json", ".hydra/config.yaml", ".hydra/overrides.yaml")


def provenance(runs: list[Run]) -> str:
    """Where the figures of runs come from."""
    found: dict[str, list[str]] = {"commit": [], "machine": [], "versions": [], "command": []}
    for run in runs:
        summary = run.summary or {}
        versions = (f"{name} {number}" for name, number in summary.get("versions", {}).items())
        found["commit"].append(summary.get("commit") or NOT_RECORDED)
        found["machine"].append(summary.get("machine", NOT_RECORDED))
        found["versions"].append(", ".join(versions) or NOT_RECORDED)
        found["command"].append(command(run.directory))
    lines = []
    for name, values in found.items():
        for value, count in Counter(values).items():
            share = "" if count == len(runs) else f" ({count} of {len(runs)} runs)"
            lines.append(f"{name:<9} {value}{share}\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.compare.publish",
        description=__doc__,
        epilog="example: python -m dlion.compare.publish outputs/2025-01-31 -o results/mnist5k",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS",
                        help="directories of runs, or above many of them")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="results/NAME",
                        help="where to; runs that are there already stay as they are")  # fmt: skip
    args = parser.parse_args()
    try:
        runs = find_runs(args.runs)
    except UserError as error:
        parser.error(str(error))
    unfinished = [str(run.directory) for run in runs if not run.finished]
    if unfinished:
        parser.error(f"not finished: {', '.join(unfinished)}")
    names = ["{optimizer}-n{workers}-s{seed}".format(**run.summary) for run in runs]
    if len(set(names)) < len(names):  # a sweep over something else: its own numbers
        names = [run.directory.name for run in runs]
    targets = [args.output / "runs" / name for name in names]
    for target in targets:
        if target.exists() or targets.count(target) > 1:
            parser.error(f"{target} is there already: publish each run once")
    for run, target in zip(runs, targets, strict=True):
        for file in FILES:
            if (run.directory / file).exists():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.directory / file, target / file)
    with (args.output / "provenance.txt").open("a") as file:  # behind that of runs published before
        file.write(("\n" if file.tell() else "") + provenance(runs))
    published = str(args.output / "runs")
    plot = [sys.executable, "-m", "dlion.compare.plot", published, "-o"]
    table = subprocess.run(
        [*plot, str(args.output / "curves")], check=True, capture_output=True, text=True
    )
    (args.output / "table.txt").write_text(table.stdout)
    collect = [sys.executable, str(Path(__file__).resolve().with_name("collect.py")), "runs"]
    rows = subprocess.run(collect, cwd=args.output, check=True, capture_output=True, text=True)
    (args.output / "runs.csv").write_text(rows.stdout)
    print(table.stdout)


if __name__ == "__main__":
    main()
