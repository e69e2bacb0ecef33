"""Seconds to a test accuracy over 100 Mbit/s: DistributedDataParallel with Lion against ours.

    sudo .venv/bin/python benchmarks/time_to_accuracy.py

4 workers with a namespace and a link each train a perceptron of 0.8 million parameters on mnist5k;
all methods see the same batches, with the same schedule, each at the best of some learning rates
(``--search``). The clock stops during evaluations. Writes time_to_accuracy.json and its figure.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from common import Parser, Points, Row, run, spread
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dlion.optim import DLion, LionCub
from dlion.streams import stream
from dlion.suite.arguments import link, number, whole
from dlion.suite.data import Data, Sharding, mnist5k
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.launch.network import Network
from dlion.suite.units import show_rate

N, BATCH, BETAS, DECAY, WARMUP = 4, 32, (0.9, 0.99), 5e-3, 20
EVALUATE_EVERY = 10  # steps
METHODS = ("DDP float32 Lion", "dlion_mavo", "lion_cub 4 bits")
SEARCHED, SEARCH_SEED = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3), 99
# the best of those searched, by the accuracy after 200 steps
LEARNING_RATES = {"DDP float32 Lion": 2e-3, "dlion_mavo": 1e-3, "lion_cub 4 bits": 2e-3}


digits = cache(mnist5k)  # once, before processes are forked


def train(data: Data, method: str, seed: int, lr: float, steps: int) -> list[tuple[float, float]]:
    """Train as one of N processes; returns (seconds, accuracy) at every evaluation."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    join_process_group("gloo")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    options = {"lr": lr, "betas": BETAS, "weight_decay": DECAY}
    if method == "DDP float32 Lion":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        from lion_pytorch import Lion

        optimizer = Lion(model.parameters(), **options)
    else:
        cls = DLion if method == "dlion_mavo" else LionCub
        trained = model
        optimizer = cls(model.parameters(), overlap=True, bucket_cap_mb=5, **options)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - WARMUP),
        ],
        [WARMUP],
    )
    rank = dist.get_rank()
    sharding = Sharding(data.train_size, N, BATCH, seed, "partition")
    curve, seconds = [], 0.0
    for step in range(steps):
        if step % EVALUATE_EVERY == 0:
            dist.barrier()
            start = time.perf_counter()
        x, y = data.batch(sharding.indices(rank, step), stream(seed, "coins", rank, step))
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            dist.barrier()
            seconds += time.perf_counter() - start
            curve.append((seconds, accuracy(model, data)))
    dist.barrier()
    dist.destroy_process_group()
    return curve


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of test images that the model names."""
    x, y = data.test_batch(0, data.test_size)
    return (model(x).argmax(1) == y).float().mean().item()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, beside="lion_pytorch")
    parser.add_argument("--rate", type=link, default=10**8, help="of the links, or loopback")
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument("--steps", type=whole(WARMUP + EVALUATE_EVERY), default=200)
    parser.add_argument("--target", type=number(0, 1), default=0.9, help="test accuracy")
    parser.add_argument(
        "--search", action="store_true", help="compare learning rates instead, on loopback"
    )
    args = parser.read(arguments, rate=10**9, seeds=1, steps=WARMUP + EVALUATE_EVERY)
    args.rates = [None if args.search else args.rate]
    parser.check_links(args)
    (args.rate,) = args.rates
    return args


def main(args: argparse.Namespace) -> None:
    if args.search:
        search(args)
        return
    facts = {name: getattr(args, name) for name in ("rate", "target", "steps")}
    facts |= {"workers": N, "lr": LEARNING_RATES}
    points = Points(args.output / "time_to_accuracy.json", facts, {}, args.fresh)
    keys = []
    for seed in range(args.seeds):
        first = seed % len(METHODS)  # not always in one order
        keys += [{"method": m, "seed": seed} for m in METHODS[first:] + METHODS[:first]]
    for key in points.missing(keys):
        curve = run_training(key["method"], key["seed"], args.steps, args.rate)
        reached = next((seconds for seconds, value in curve if value >= args.target), None)
        points.add(key, [{"reached": reached, "curve": curve}])
        print(
            f"seed {key['seed']}  {key['method']:18s} {args.target:.0%} after"
            f" {'never' if reached is None else f'{reached:.1f} s'},"
            f" {curve[-1][1]:.1%} after {curve[-1][0]:.1f} s",
            flush=True,
        )
    for method in METHODS:
        times = [row["reached"] for row in points.rows if row["method"] == method]
        if None not in times and len(times) > 1:
            print(f"{method:18s} {spread(times)}")
    figure = draw(points.rows, args.target, args.rate)
    figure.savefig(args.output / "time_to_accuracy.png", dpi=110)


def search(args: argparse.Namespace) -> None:
    """Compare learning rates by the accuracy at the end."""
    points = Points(
        args.output / "time_to_accuracy_search.json",
        {"workers": N, "seed": SEARCH_SEED, "steps": args.steps},
        {},
        args.fresh,
    )
    learning_rates = SEARCHED[-1:] if args.smoke else SEARCHED
    for key in points.missing([{"method": m, "lr": lr} for m in METHODS for lr in learning_rates]):
        curve = run_training(key["method"], SEARCH_SEED, args.steps, None, key["lr"])
        points.add(key, [{"accuracy": curve[-1][1]}])
        print(f"{key['method']:18s} lr {key['lr']:g}  {curve[-1][1]:.1%}", flush=True)


def run_training(
    method: str, seed: int, steps: int, rate: int | None, lr: float | None = None
) -> list[tuple[float, float]]:
    """Start N processes that :func:`train`, over links of ``rate`` bits per second or loopback."""
    how = (digits(), method, seed, LEARNING_RATES[method] if lr is None else lr, steps)
    if rate is None:
        return run_processes(N, train, *how)
    with Network(N, rate) as network:
        return run_processes(N, train, *how, network=network)


def draw(rows: list[Row], target: float, rate: int | None) -> Figure:
    """Draw accuracy against seconds, a line for each seed."""
    figure = Figure(figsize=(7, 4.5))
    axis = figure.subplots()
    for method, colour in zip(METHODS, ("black", "tab:orange", "tab:brown"), strict=True):
        for row in (row for row in rows if row["method"] == method):
            seconds, values = zip(*row["curve"], strict=True)
            label = method if row["seed"] == 0 else None
            axis.plot(seconds, [100 * value for value in values], color=colour, label=label)
    axis.axhline(100 * target, color="gray", linestyle=":")
    where = "on loopback" if rate is None else f"at {show_rate(rate)}"
    axis.set(xscale="log", xlabel=f"seconds {where}", ylabel="test accuracy (%)")
    axis.legend()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    run(main, parse())
