"""Put finished runs into results/: python sweep/publish.py RUNS... -o results/NAME

Small files only: copies metrics, summary and configuration of a run to NAME/runs/METHOD-nWORKERS-sSEED,
and writes what was typed and measured (runs.csv), a table (table.txt) and a figure (curves.png).
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
    for run in runs:
        name = "{optimizer}-n{workers}-s{seed}".format(**run.summary)
        target = args.output / "runs" / name
        if target.exists():
            sys.exit(f"error: {target} is there already: publish each method, n and seed once")
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
