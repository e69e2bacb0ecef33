"""The exchange alone: packed direct-send against gloo's all-reduce, n = 2, 4 and 8.

    sudo .venv/bin/python benchmarks/exchange.py

Needs root and iproute2 for the emulated links. The ideal is the time a worker's own link takes for
what it must send, 2 (n - 1) / n d times the bits per value. Writes results/speed/exchange.*.
"""

import argparse
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from common import RESULTS, machine, save, spread
from spmd import run

from dlion.exchange import Channel, LevelSum
from dlion.workers import Workers

CUB_BITS = (2, 4, 8)  # p; with 1 bit it is the vote


def make_cases(d: int) -> dict:
    channel = Channel(Workers.current())
    dense, half = torch.ones(d), torch.ones(d, dtype=torch.bfloat16)
    votes = LevelSum(channel, d)
    means = LevelSum(channel, d, answer="level")
    sums = {p: LevelSum(channel, d, levels=2**p - 1, ties="zero") for p in CUB_BITS}
    return {
        "all_reduce float32": lambda: dist.all_reduce(dense),
        "all_reduce bfloat16": lambda: dist.all_reduce(half),
        "vote, 1 bit": lambda: votes.deliver(0),
        "mean of signs": lambda: means.deliver(0),
        **{f"Lion Cub, {p} bits": partial(sum_.deliver, 0) for p, sum_ in sums.items()},
    }


def bits(case: str, n: int) -> float:
    """Bits per parameter that go once to the owner of a slice and once back, up plus down."""
    return {
        "all_reduce float32": 64,
        "all_reduce bfloat16": 32,
        "vote, 1 bit": 2,
        "mean of signs": 1 + n.bit_length(),
        **{f"Lion Cub, {p} bits": p + 1.6 for p in CUB_BITS},
    }[case]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=float, default=1e7)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9, 0], help="0: loopback")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    d, points = int(args.d), []
    for rate in map(int, args.rates):
        for n in args.workers:
            found = run(n, rate or None, make_cases, d, rounds=args.rounds)
            for case, values in found.items():
                payload = (n - 1) / n * d * bits(case, n) / 8
                point = {
                    "rate": rate or None,
                    "workers": n,
                    "d": d,
                    "case": case,
                    "seconds": spread(values["seconds"]),
                    "payload_bytes": payload,
                    "ideal_seconds": 8 * payload / rate if rate else None,
                    "nic_over_payload": spread([b / payload for b in values["nic_bytes"]]),
                }
                points.append(point)
                ideal = (
                    f"  {point['seconds']['median'] / point['ideal_seconds']:5.2f} x ideal"
                    if rate
                    else ""
                )
                print(
                    f"{rate / 1e6:6.0f} Mbit/s  n={n}  {case:20s}"
                    f" {1e3 * point['seconds']['median']:8.1f} ms{ideal}"
                    f"  nic/payload {point['nic_over_payload']['median']:.3f}",
                    flush=True,
                )
    save("exchange", {**machine(), "points": points})
    draw(points)


def draw(points: list[dict]) -> None:
    """Milliseconds against workers, a panel a rate; against p, at the middle number of workers."""
    rates = sorted({p["rate"] for p in points}, key=lambda rate: rate or 1e12)
    title = {rate: f"{rate / 1e6:g} Mbit/s" if rate else "loopback" for rate in rates}
    count = len(rates) + 1
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 4), squeeze=False)
    for axis, rate in zip(axes[0], rates, strict=False):
        for case in dict.fromkeys(p["case"] for p in points):
            chosen = [p for p in points if p["rate"] == rate and p["case"] == case]
            values = [1e3 * p["seconds"]["median"] for p in chosen]
            axis.plot([p["workers"] for p in chosen], values, marker="o", ms=4, label=case)
        axis.set(yscale="log", xlabel="workers", ylabel="ms", title=title[rate])
        axis.set_xticks(sorted({p["workers"] for p in points}))
    axes[0][0].legend(fontsize=7)
    counts = sorted({p["workers"] for p in points})
    n, last = counts[len(counts) // 2], axes[0][-1]
    precision = {"vote, 1 bit": 1, **{f"Lion Cub, {p} bits": p for p in CUB_BITS}}
    precision |= {"all_reduce bfloat16": 16, "all_reduce float32": 32}
    for rate in rates:
        chosen = {p["case"]: p for p in points if p["rate"] == rate and p["workers"] == n}
        values = [1e3 * chosen[case]["seconds"]["median"] for case in precision]
        last.plot(list(precision.values()), values, marker="o", ms=4, label=title[rate])
    last.set(xscale="log", yscale="log", xlabel="p, bits up", title=f"{n} workers")
    last.set_xticks(list(precision.values()), labels=list(precision.values()))
    last.minorticks_off()
    last.legend(fontsize=7)
    figure.suptitle(f"one exchange, d = {points[0]['d']:.0e}")
    figure.tight_layout()
    figure.savefig(RESULTS / "exchange.png", dpi=110)


if __name__ == "__main__":
    main()
