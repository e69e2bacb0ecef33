"""Put finished runs into results/: python sweep/publish.py RUNS... -o results/NAME

Small files only: copies metrics, summary and configuration of a run to NAME/runs/METHOD-nN-sSEED
(of a sweep over something else: to the name it has there), and writes what was typed and measured
(runs.csv), a table (table.txt) and a figure (curves.png).
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from dlion.errors import UserError
from dlion.results.record import find_runs

FILES = ("metrics.jsonl", "summary.json", ".hydra/config.yaml", ".hydra/overrides.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        runs = find_runs(args.runs)
    except UserError as error:
        sys.exit(f"error: {error}")
    unfinished = [str(run.directory) for run in runs if not run.finished]
    if unfinished:
        sys.exit(f"error: not finished: {', '.join(unfinished)}")
    names = ["{optimizer}-n{workers}-s{seed}".format(**run.summary) for run in runs]
    if len(set(names)) < len(names):  # a sweep over something else: its own numbers
        names = [run.directory.name for run in runs]
    targets = [args.output / "runs" / name for name in names]
    for target in targets:
        if target.exists() or targets.count(target) > 1:
            sys.exit(f"error: {target} is there already: publish each run once")
    for run, target in zip(runs, targets, strict=True):
        for file in FILES:
            if (run.directory / file).exists():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.directory / file, target / file)
    published = str(args.output / "runs")
    plot = [sys.executable, "-m", "dlion.results.plot", published, "-o"]
    table = subprocess.run(
        [*plot, str(args.output / "curves")], check=True, capture_output=True, text=True
    )
    (args.output / "table.txt").write_text(table.stdout)
    collect = [sys.executable, str(Path(__file__).with_name("collect.py")), published]
    rows = subprocess.run(collect, check=True, capture_output=True, text=True)
    (args.output / "runs.csv").write_text(rows.stdout)
    print(table.stdout)


if __name__ == "__main__":
    main()
