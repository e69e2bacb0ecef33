"""How near Newton-Schulz comes to the polar factor of real momenta, iteration by iteration.

    python benchmarks/polar_factor.py

The momenta are those of the hidden matrices of the board's GPT, after 200 steps of one worker's
batches (8 stretches of 64 bytes of Python's standard library) with GMuon. Against U V^T of their
singular value decomposition: the relative error, and the share of entries whose sign differs,
which is what SignMuon sends. Prints a table; nothing is timed.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from common import ROOT, Parser, Points, Row, run
from torch import Tensor
from torch.nn.functional import cross_entropy

from dlion.methods.groups import param_groups
from dlion.methods.muon import Coefficients, NewtonSchulz, Precision, orthogonalise
from dlion.optim import GMuon
from dlion.suite.arguments import whole
from dlion.suite.data import stdlib_text
from dlion.suite.models import gpt

STRETCHES, LR = 8, 0.015
COEFFICIENTS: tuple[Coefficients, ...] = ("quintic", "polar_express")
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")


def momenta(steps: int, max_bytes: int | None = None) -> list[Tensor]:
    """Train the board's GPT; return the momenta of its hidden matrices."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    data = stdlib_text(max_bytes=max_bytes)
    model = gpt(data, dim=128, mlp_dim=640)
    optimizer = GMuon(param_groups(model), lr=LR, weight_decay=0.02)
    for _ in range(steps):
        inputs, targets = data.batch(
            torch.randint(data.train_size, (STRETCHES,), generator=random), random
        )
        cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hidden = [param for group in optimizer.param_groups for param in group["params"]]
    states = (optimizer.state[param] for param in hidden)
    return [state["momentum_buffer"] for state in states if "momentum_buffer" in state]


def errors(matrices: list[Tensor], iterations: int) -> Iterator[tuple[Row, Row]]:
    """Yield how far each form of the iteration is from the polar factors, after each step."""
    decomposed = [torch.linalg.svd(matrix.double(), full_matrices=False) for matrix in matrices]
    polar = [u @ vh for u, _, vh in decomposed]
    size = sum(factor.square().sum() for factor in polar)
    elements = sum(factor.numel() for factor in polar)
    for precision in PRECISIONS:
        for coefficients in COEFFICIENTS:
            for steps in range(1, iterations + 1):
                found = orthogonalise(matrices, NewtonSchulz(steps, precision, coefficients))
                pairs = [(x.double(), factor) for x, factor in zip(found, polar, strict=True)]
                missed = sum((x - factor).square().sum() for x, factor in pairs)
                signs = sum(((x > 0) != (factor > 0)).sum() for x, factor in pairs)
                key = {"precision": precision, "coefficients": coefficients, "iterations": steps}
                values = {"distance": (missed / size).sqrt(), "other_signs": signs / elements}
                yield key, {name: float(value) for name, value in values.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, output=ROOT / "results" / "polar_express")
    parser.add_argument("--steps", type=whole(1), default=200, help="of training before")
    parser.add_argument("--iterations", type=whole(1), default=8, help="the largest number")
    parser.set_defaults(max_bytes=None)
    return parser.read(arguments, steps=2, iterations=2, max_bytes=100_000)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    points = Points(args.output / "polar_factor.json", {"steps": args.steps}, {}, fresh=True)
    found = list(errors(momenta(args.steps, args.max_bytes), args.iterations))
    for key, row in found:
        points.add(key, [row])
    for name in ("distance", "other_signs"):
        columns = [str(steps) for steps in range(1, args.iterations + 1)]
        print(f"| {name} | {' | '.join(columns)} |\n|{' --- |' + ' ---: |' * args.iterations}")
        for precision in PRECISIONS:
            for coefficients in COEFFICIENTS:
                mine = {"precision": precision, "coefficients": coefficients}
                rows = [row for key, row in found if mine.items() <= key.items()]
                cells = " | ".join(f"{row[name]:.3f}" for row in rows)
                print(f"| {coefficients}, {precision} | {cells} |")
        print()


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
