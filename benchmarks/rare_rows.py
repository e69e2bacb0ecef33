"""Rows of an embedding that few workers see in a step: what a vote makes of those who see nothing.

    python benchmarks/rare_rows.py

An untied embedding of 2,000 rows learns random targets from tokens with Zipf's frequencies, 8
workers of 16 tokens, 600 steps of a falling learning rate. Most workers know nothing of most rows
in a step, and one bit has no zero. "all alike" is what all of them voting +1 on even steps and -1
on odd ones gives. Prints a table; nothing is timed, and nothing is kept but with ``--output``.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence

import torch
from common import ROOT, Parser, run
from torch import Tensor
from torch.nn.functional import embedding

from dlion.optim import DistributedOptimizer, DLion, GLion, LionCub
from dlion.suite.arguments import whole
from dlion.suite.files import write_atomically
from dlion.suite.machine import machine
from dlion.suite.record.provenance import commit
from dlion.workers import Workers

ROWS, WIDTH, WORKERS, TOKENS, LR = 2000, 8, 8, 16, 1e-3
EDGES = (0, 10, 50, 200, 800, 2000)  # rows by rank, the most frequent first


class AllAlike(DLion):
    """Distributed Lion whose workers all say the same of what they know nothing of."""

    def zero_is_positive(self, local: int, step: int) -> bool:
        return step % 2 == 0


METHODS: dict[str, Callable[..., DistributedOptimizer]] = {
    "g_lion": GLion,
    "dlion_mavo": DLion,
    "dlion_mavo, all alike": AllAlike,
    "lion_cub, 4 bits": LionCub,
}


def train(make: Callable[..., DistributedOptimizer], seed: int, steps: int) -> Tensor:
    """Return the mean absolute error of every row after training, ``[ROWS]``."""
    random = torch.Generator().manual_seed(seed)
    target = 0.3 * torch.randn(ROWS, WIDTH, generator=random)
    table = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
    optimizer = make([table], lr=LR, workers=Workers(local=WORKERS))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        for worker in range(WORKERS):
            tokens = torch.multinomial(frequencies(), TOKENS, True, generator=random)
            (embedding(tokens, table) - target[tokens]).square().mean().backward()
            optimizer.collect(worker)
        optimizer.step()
        schedule.step()
    return (table.detach() - target).abs().mean(1)


def frequencies() -> Tensor:
    """Return Zipf's probabilities of the rows."""
    weights = 1 / torch.arange(1.0, ROWS + 1)
    return weights / weights.sum()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, output=ROOT / "results" / "ties")
    parser.add_argument("--steps", type=whole(1), default=600)
    parser.add_argument("--seeds", type=whole(1), default=3, help="how many, from 0 on")
    return parser.read(arguments, steps=5, seeds=1)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    columns = [f"{low} to {high}" for low, high in itertools.pairwise(EDGES)]
    print("mean absolute error of rows by rank (0.24 untrained), mean of seeds and range\n")
    print(f"| method | {' | '.join(columns)} | by frequency |\n|{' --- |' * (len(columns) + 2)}")
    rows = []
    for name, make in METHODS.items():
        errors = [train(make, seed, args.steps) for seed in range(args.seeds)]
        parts = [
            [error[low:high].mean().item() for error in errors]
            for low, high in itertools.pairwise(EDGES)
        ]
        parts.append([float(error @ frequencies()) for error in errors])
        cells = (f"{statistics.mean(p):.3f} ({min(p):.3f} to {max(p):.3f})" for p in parts)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        rows.append({"method": name, "errors": dict(zip([*columns, "all"], parts, strict=True))})
    facts = {"machine": machine("cpu"), "commit": commit(), "seeds": args.seeds}
    write_atomically(
        args.output / "rare_rows.json", json.dumps({**facts, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
