"""Nodes of several processes: what leaves a node in a step, and how long a step takes.

    sudo .venv/bin/python benchmarks/two_levels.py

Each node has one emulated link to the others, which its processes share; among themselves they talk
over loopback. Needs root and iproute2. Writes two_levels.json.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Parser, Points, Row, run, spread
from spmd import Measured, time_together
from torch.distributed.device_mesh import init_device_mesh

from dlion.optim import DLion
from dlion.suite.arguments import link, whole
from dlion.suite.units import show_rate


def make_cases(d: int, nodes: int, per_node: int) -> dict[str, Callable[[], object]]:
    """Return steps of d parameters that are timed, by name."""
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "node"))
    node = {"mesh": mesh["replicate"], "dense_group": mesh["node"].get_group()}
    dense = torch.ones(d)
    return {
        "all_reduce float32": lambda: dist.all_reduce(dense),
        "vote of all processes": _step(d),
        "the same on a grid of nodes": _step(d, exchange=(nodes, per_node)),
        "bf16 mean in a node, vote of nodes": _step(d, **node),
        "float32 mean in a node, vote of nodes": _step(d, **node, dense_wire="float32"),
    }


def _step(d: int, **settings: Any) -> Callable[[], object]:
    """Return a step of an optimizer whose gradient is there already."""
    param = torch.nn.Parameter(torch.zeros(d))
    generator = torch.Generator().manual_seed(dist.get_rank())
    grad = torch.randn(d, generator=generator)
    optimizer = DLion([param], lr=1e-3, **settings)

    def step() -> None:
        param.grad = grad.clone()
        optimizer.step()

    return step


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--d", type=whole(1), default=4 * 10**6, help="parameters")
    parser.add_argument("--nodes", type=whole(2), nargs="+", default=[2, 4])
    parser.add_argument("--per-node", type=whole(1), default=2, help="processes of a node")
    parser.add_argument("--rates", type=link, nargs="+", default=[10**8, 10**9])
    parser.add_argument("--rounds", type=whole(2), default=7)
    args = parser.read(arguments, d=10_000, nodes=[2], per_node=2, rates=[None], rounds=2)
    parser.check_links(args)
    return args


def main(args: argparse.Namespace) -> None:
    facts = {"rounds": args.rounds}
    points = Points(args.output / "two_levels.json", {}, facts, args.fresh)
    keys = [
        {"rate": rate, "nodes": nodes, "per_node": args.per_node, "d": args.d}
        for rate in args.rates
        for nodes in args.nodes
    ]
    for key in points.missing(keys, cost=lambda key: 1e9 / (key["rate"] or 1e9)):
        nodes, per_node = key["nodes"], key["per_node"]
        measured = time_together(
            nodes * per_node,
            key["rate"],
            make_cases,
            args.d,
            nodes,
            per_node,
            rounds=args.rounds,
            per_node=per_node,
        )
        rows = evaluate(measured, args.d)
        points.add(key, rows)
        for row in rows:
            print(
                f"{show_rate(key['rate']):>12s}  {nodes} x {per_node}  {row['case']:40s}"
                f" {1e3 * row['seconds']['median']:8.1f} ms"
                f" {row['bits']['median']:8.3f} bits a parameter leave a node",
                flush=True,
            )


def evaluate(measured: Measured, d: int) -> list[Row]:
    """Return one row a case: its time, and the bits a parameter that leave a node in a step."""
    return [
        {
            "case": case,
            "seconds": spread(values["seconds"]),
            "bits": spread([8 * count / d for count in values["nic_bytes"]]),
        }
        for case, values in measured.items()
    ]


if __name__ == "__main__":
    run(main, parse())
