"""A step of AdamW or distributed Lion with many parameter groups, beside DistributedDataParallel.

    python benchmarks/groups.py

Processes talk over loopback, and cases take turns in random order: on a machine with other work,
compare ratios. Every group has a learning rate and a decay of its own. Writes groups.json.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Parser, Points, Row, run, spread
from spmd import Measured, time_together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlion.optim import DLion, GAdamW
from dlion.suite.arguments import whole

TENSORS = 300
KINDS = {"DLion": DLion, "GAdamW": GAdamW}


def make_cases(d: int, counts: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Return steps of d parameters, in groups of so many kinds, by name."""
    cases: dict[str, Callable[[], object]] = {}
    for count in counts:
        for name, kind in KINDS.items():
            cases[f"{name}, {count}"] = _step(d, count, kind, kind)
            overlap = {"overlap": True, "bucket_cap_mb": 5}
            cases[f"{name} with overlap, {count}"] = _step(d, count, kind, kind, **overlap)
        cases[f"DDP with AdamW, {count}"] = _step(d, count, torch.optim.AdamW, None)
    return cases


def _step(d: int, count: int, kind: Any, bare: Any, **settings: Any) -> Callable[[], object]:
    width = max(1, round((d / (TENSORS / 2)) ** 0.5))
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(TENSORS // 2)))
    params = list(layers.parameters())
    size = -(-len(params) // count)
    groups = [
        {"params": params[at : at + size], "lr": 1e-5 * (1 + at), "weight_decay": 1e-6 * at}
        for at in range(0, len(params), size)
    ]
    optimizer = kind(groups, lr=1e-4, **settings)
    model = DistributedDataParallel(layers) if bare is None else layers
    batch = torch.randn(2, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--d", type=whole(1), default=4 * 10**6, help="parameters")
    parser.add_argument("--groups", type=whole(1), nargs="+", default=[1, 10, 50, TENSORS])
    parser.add_argument("--processes", type=whole(1), default=2)
    parser.add_argument("--rounds", type=whole(2), default=15)
    return parser.read(arguments, d=1_000, groups=[1, 300], processes=2, rounds=2)


def main(args: argparse.Namespace) -> None:
    points = Points(args.output / "groups.json", {}, {"rounds": args.rounds}, args.fresh)
    key = {"d": args.d, "processes": args.processes, "groups": args.groups}
    for _ in points.missing([key]):
        sizes = args.d, args.groups
        measured = time_together(
            args.processes, None, make_cases, *sizes, rounds=args.rounds, warmups=2
        )
        points.add(key, evaluate(measured))
    print("ms a step, median" + "".join(f"{count:>9d}" for count in args.groups), "groups")
    cases = {row["case"].rsplit(", ", 1)[0]: None for row in points.rows}
    median = {row["case"]: row["seconds"]["median"] for row in points.rows}
    for case in cases:
        times = (f"{1e3 * median[f'{case}, {count}']:9.1f}" for count in args.groups)
        print(f"{case:20s}".ljust(17), "".join(times))


def evaluate(measured: Measured) -> list[Row]:
    """Return one row a case: its time."""
    return [
        {"case": case, "seconds": spread(values["seconds"])} for case, values in measured.items()
    ]


if __name__ == "__main__":
    run(main, parse())
