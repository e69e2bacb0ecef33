"""What noise leaves of the KKT score, for n workers who minimise a quadratic in Lion's box.

    python benchmarks/kkt_quadratic.py

The second phase of Distributed Lion's theory (arXiv 2404.00438, theorems 3.6 to 3.8) without a
network: the methods, as they are, start inside the box, at a constant rate, with and without noise
in the workers' gradients. Prints a table, writes kkt_quadratic.json and its figure.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence

import torch
from common import ROOT, Parser, Points, Row, run
from matplotlib.figure import Figure
from torch import Tensor

from dlion.optim import DistributedOptimizer, DLion, GLion
from dlion.suite.arguments import number, whole
from dlion.workers import Workers

BETAS, NOISE, COURSE = (0.9, 0.99), 6.0, 16  # COURSE: the workers of the left panel
METHODS: dict[str, Callable[..., DistributedOptimizer]] = {
    "g_lion": GLion,
    "dlion_mavo": DLion,
    "dlion_avg": functools.partial(DLion, aggregation="avg"),
}
LOOKS = {"g_lion": ("#000000", "o"), "dlion_mavo": ("#D55E00", "s"), "dlion_avg": ("#E69F00", "D")}


class Quadratic:
    """``f(x) = (x - c) A (x - c) / 2`` in the box ``|x| <= 1``, so with a weight decay of 1.

    A has eigenvalues from 0.1 to 1 and random axes. c is normal: a third of its entries is outside.

    Attributes:
        start: uniform in the box, ``[d]``.
    """

    def __init__(self, d: int = 256) -> None:
        random = torch.Generator().manual_seed(0)
        axes, _ = torch.linalg.qr(torch.randn(d, d, generator=random))
        self._a = axes @ torch.linspace(0.1, 1, d).diag() @ axes.T
        self._c = torch.randn(d, generator=random)
        self.start = 2 * torch.rand(d, generator=random) - 1

    def gradient(self, x: Tensor) -> Tensor:
        """Return the gradient at each row of ``[..., d]``."""
        return (x - self._c) @ self._a

    def score(self, x: Tensor) -> Tensor:
        """Return the KKT score of each row of ``[..., d]``: 0 at the solution, else more."""
        gradient = self.gradient(x)
        return (gradient * (gradient.sign() + x)).sum(-1)


def scores(method: str, n: int, noise: float, lr: float, steps: int, draws: int) -> Tensor:
    """Minimise the quadratic; return the KKT score before each step, ``[steps, draws]``.

    Draws of the noise are rows of one parameter: the methods work entry by entry, so that rows do
    not see each other.

    Args:
        noise: deviation of each entry of a worker's gradient.
    """
    problem, random = Quadratic(), torch.Generator().manual_seed(1)
    x = torch.nn.Parameter(problem.start.repeat(draws, 1))
    options = {"betas": BETAS, "weight_decay": 1.0, "workers": Workers(local=n)}
    optimizer, found = METHODS[method]([x], lr=lr, **options), torch.zeros(steps, draws)
    for step in range(steps):
        found[step], exact = problem.score(x.detach()), problem.gradient(x.detach())
        for worker in range(n):
            x.grad = exact + noise * torch.randn(x.shape, generator=random)
            optimizer.collect(worker)
        optimizer.step()
    return found


def balance(method: str, n: int) -> float | None:
    """Return the score where the mean step and the decay cancel, ``E sign(u) = -x``; None: unknown.

    A slow rate ends there. The mean of Lion's direction u is the exact gradient, its deviation
    follows from the noise, and on the mean gradient it is smaller by sqrt(n). A mean of signs
    expects what one worker's sign does: n changes nothing.
    """
    if method == "dlion_mavo":
        return None
    problem, (beta1, beta2) = Quadratic(), BETAS
    deviation = NOISE * math.sqrt(beta1**2 * (1 - beta2) / (1 + beta2) + (1 - beta1) ** 2)
    deviation /= math.sqrt(n) if method == "g_lion" else 1
    x = torch.zeros_like(problem.start)
    for _ in range(2000):
        x -= 0.05 * (torch.erf(problem.gradient(x) / (deviation * math.sqrt(2))) + x)
    return problem.score(x).item()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, output=ROOT / "results" / "dlion_theory")
    parser.add_argument("--lr", type=number(0), default=2.5e-3)
    parser.add_argument("--steps", type=whole(50), default=3000)
    parser.add_argument("--draws", type=whole(1), default=5, help="of the noise")
    parser.set_defaults(workers=(1, 2, 4, 8, COURSE, 32))
    return parser.read(arguments, workers=(1, COURSE), steps=50, draws=2)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    facts = {name: getattr(args, name) for name in ("lr", "steps", "draws")}
    points = Points(args.output / "kkt_quadratic.json", facts, {}, args.fresh)
    exact = [(0.0, 2)]  # without noise all workers say the same, however many
    keys = [
        {"noise": noise, "workers": n, "method": method}
        for noise, n in exact + [(NOISE, n) for n in args.workers]
        for method in METHODS
    ]
    for key in points.missing(keys, cost=lambda key: key["workers"]):
        points.add(key, [measure(args, **key)])
    print("| noise | n | method | KKT score, mean of draws | least | most | as computed |")
    print("|" + 7 * " --- |")
    for row in points.rows:
        cells = [row["noise"], row["workers"], row["method"]]
        cells += [row[name] or "" for name in ("mean", "least", "most", "computed")]
        print(f"| {' | '.join(f'{c:.3g}' if isinstance(c, float) else str(c) for c in cells)} |")
    draw(points.rows, args.steps).savefig(args.output / "kkt_quadratic.png", dpi=110)


def measure(args: argparse.Namespace, noise: float, workers: int, method: str) -> Row:
    """Return what is left in the second half of the steps, and for some the whole course."""
    found = scores(method, workers, noise, args.lr, args.steps, args.draws if noise else 1)
    late = found[args.steps // 2 :].mean(0)
    shown = not noise or workers == COURSE
    return {
        "mean": late.mean().item(),
        "least": late.min().item(),
        "most": late.max().item(),
        "computed": balance(method, workers) if noise else None,
        "course": found.mean(1)[:: args.steps // 50].tolist() if shown else [],
    }


def draw(rows: list[Row], steps: int) -> Figure:
    """Draw the score in its course, and its late mean against n."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for method, (colour, marker) in LOOKS.items():
        mine = [row for row in rows if row["method"] == method]
        for row in mine:
            at = [i * (steps // 50) for i in range(len(row["course"]))]
            left.plot(at, row["course"], "-" if row["noise"] else ":", color=colour)
        noisy = [row for row in mine if row["noise"]]
        n, mean, computed = ([row[k] for row in noisy] for k in ("workers", "mean", "computed"))
        bars = [[abs(row[k] - row["mean"]) for row in noisy] for k in ("least", "most")]
        right.errorbar(n, mean, bars, color=colour, marker=marker, ms=5, capsize=3, label=method)
        if None not in computed:
            right.plot(
                n, computed, "--", lw=1, color=colour, label=f"{method}, slow rate, computed"
            )
    right.axhline(rows[0]["mean"], ls=":", color="grey", label="without noise")
    left.set(xlabel="step", ylabel="KKT score", yscale="log")
    left.set_title(f"{COURSE} workers; dotted: without noise", fontsize=10)
    right.set(xlabel="workers", xscale="log")
    right.set_xticks(n, labels=n)
    right.minorticks_off()
    right.set_title("mean over the second half; bars: all draws", fontsize=10)
    right.legend(fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
