"""The host's time of a GPU's launches, for many small tensors, beside that of another commit.

    python benchmarks/host_time.py REV

needs no GPU: launches are prepared and left out (gpu/host.py). What a driver takes for a launch
comes on top. Trees take turns. Writes host_time.json.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from common import ROOT, Parser, Row, run, spread
from same_bits import WrongInput, checkout

from dlion.errors import RunFailed, UserError
from dlion.suite.files import write_atomically
from dlion.suite.machine import machine
from dlion.suite.record.provenance import commit

HERE = "this tree"


def measure(tree: Path) -> dict[str, dict[str, float]]:
    """Return what a process with the sources of a tree has measured."""
    here = str(Path(__file__).parent)
    paths = [str(tree / "src"), here, os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-m", "gpu.host"], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise RunFailed(f"{tree}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__)
    parser.add_argument("rev", nargs="?", help="a commit to compare this tree with")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.read(arguments, rounds=2, rev=None)


def main(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        trees = {HERE: ROOT}
        if args.rev is not None:
            try:
                trees = {args.rev: stack.enter_context(checkout(args.rev)), **trees}
            except WrongInput as error:
                raise UserError(str(error)) from error
        measured = {name: [] for name in trees}
        for _ in range(args.rounds):
            for name, tree in trees.items():
                measured[name].append(measure(tree))
    points: list[Row] = []
    print("| case | tree | launches | host, us | quartiles |\n| --- | --- | ---: | ---: | --- |")
    for case in measured[HERE][0]:
        for name, rounds in measured.items():
            if case not in rounds[0]:
                continue  # it has kernels that cannot be launched
            us = spread([round_[case]["us"] for round_ in rounds])
            row = {"case": case, "tree": name, "launches": rounds[0][case]["launches"], "us": us}
            cells = [case, name, row["launches"], f"{us['median']:.0f}"]
            print(f"| {' | '.join(map(str, cells))} | {us['low']:.0f} to {us['high']:.0f} |")
            points.append(row)
    data = {"machine": machine("cpu"), "commit": commit(), "rows": points}
    write_atomically(args.output / "host_time.json", json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
