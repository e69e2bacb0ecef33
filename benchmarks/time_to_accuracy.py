"""Seconds to a test accuracy over 100 Mbit/s: DistributedDataParallel with Lion against ours.

    sudo .venv/bin/python benchmarks/time_to_accuracy.py

4 workers with a namespace and a link each train a perceptron of 0.8 million parameters on mnist5k;
all methods see the same batches, with the same schedule, each at its best of ``--search``'s rates.
The clock stops during evaluations. Writes results/speed/time_to_accuracy.{json,png}.
"""

import argparse
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from common import RESULTS, machine, save, spread
from lion_pytorch import Lion
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dlion.data import Sharding, mnist5k
from dlion.launch.environment import join_process_group
from dlion.launch.local import run_processes
from dlion.launch.network import Network
from dlion.optim import DLion, LionCub
from dlion.streams import stream

N, BATCH, BETAS, DECAY, WARMUP = 4, 32, (0.9, 0.99), 5e-3, 20
METHODS = ("DDP float32 Lion", "dlion_mavo", "lion_cub 4 bits")
# the best of 1e-4, 2e-4, 5e-4, 1e-3, 2e-3 by the accuracy after 200 steps of seed 99 (--search)
RATES = {"DDP float32 Lion": 2e-3, "dlion_mavo": 1e-3, "lion_cub 4 bits": 2e-3}


def train(method: str, seed: int, lr: float, steps: int) -> list[tuple[float, float]]:
    """(seconds, accuracy) at every evaluation, on every process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    join_process_group("gloo")
    data = mnist5k()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    options = {"lr": lr, "betas": BETAS, "weight_decay": DECAY}
    if method == "DDP float32 Lion":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
        if step % 10 == 0:
            dist.barrier()
            start = time.perf_counter()
        x, y = data.batch(sharding.indices(rank, step), stream(seed, "coins", rank, step))
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9:
            dist.barrier()
            seconds += time.perf_counter() - start
            curve.append((seconds, accuracy(model, data)))
    dist.barrier()
    dist.destroy_process_group()
    return curve


@torch.no_grad()
def accuracy(model: torch.nn.Module, data) -> float:
    """On the test images."""
    x, y = data.test_batch(0, data.test_size)
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--search", action="store_true", help="compare rates instead, on loopback")
    args = parser.parse_args()
    if args.search:
        for method in METHODS:
            for lr in (1e-4, 2e-4, 5e-4, 1e-3, 2e-3):
                curve = run_processes(N, train, method, 99, lr, args.steps)
                print(f"{method:18s} lr {lr:g}  {curve[-1][1]:.1%}", flush=True)
        return
    runs = []
    with Network(N, int(args.rate)) as network:
        for seed in range(args.seeds):
            for method in METHODS[seed % 3 :] + METHODS[: seed % 3]:  # not always in one order
                curve = run_processes(
                    N, train, method, seed, RATES[method], args.steps, network=network
                )
                reached = next((s for s, a in curve if a >= args.target), None)
                runs.append({"method": method, "seed": seed, "reached": reached, "curve": curve})
                print(
                    f"seed {seed}  {method:18s} {args.target:.0%} after"
                    f" {'never' if reached is None else f'{reached:.1f} s'},"
                    f" {curve[-1][1]:.1%} after {curve[-1][0]:.1f} s",
                    flush=True,
                )
    for method in METHODS:
        times = [r["reached"] for r in runs if r["method"] == method]
        if None not in times and len(times) > 1:
            print(f"{method:18s} {spread(times)}")
    settings = {"rate": args.rate, "steps": args.steps, "lr": RATES, "target": args.target}
    save("time_to_accuracy", {**machine(), **settings, "workers": N, "runs": runs})
    draw(runs, args.target)


def draw(runs: list[dict], target: float) -> None:
    """Accuracy against seconds, a line a run."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for method, colour in zip(METHODS, ("black", "tab:orange", "tab:brown"), strict=True):
        for run in (r for r in runs if r["method"] == method):
            seconds, values = zip(*run["curve"], strict=True)
            label = method if run["seed"] == 0 else None
            axis.plot(seconds, [100 * v for v in values], color=colour, label=label)
    axis.axhline(100 * target, color="gray", linestyle=":")
    axis.set(xscale="log", xlabel="seconds at 100 Mbit/s", ylabel="test accuracy (%)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "time_to_accuracy.png", dpi=110)


if __name__ == "__main__":
    main()
