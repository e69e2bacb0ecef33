"""The exchange alone: packed direct-send against gloo's all-reduce, n = 2, 4 and 8.

    sudo .venv/bin/python benchmarks/exchange.py

Needs root and iproute2 for the emulated links. The ideal is the time that a worker's own link takes
for what it must send: (n - 1) / n of d, times the bits up and down. Writes exchange.json and
exchange.png. ``--study grid`` compares votes that are sent directly with votes on grids of workers,
n = 8, 16 and 32, and writes grid.json and grid.png.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from common import Parser, Points, Row, ratios, run, spread
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from spmd import Measured, time_together

from dlion.exchange import Channel, LevelMean, Shape, Topology, Vote, make_sum
from dlion.exchange.grid import bits_up, grid_shape
from dlion.suite.arguments import link, whole
from dlion.suite.units import show_rate
from dlion.workers import Workers

CUB_BITS = (2, 4, 8)  # p; with 1 bit it is the vote


DIMENSIONS = {"direct": 1, "2 dimensions": 2, "3 dimensions": 3}
BUCKET = 1_250_000  # parameters in 5 MB
# by study: parameters, and numbers of workers
SIZES = {"dense": (10**7, [2, 4, 8]), "grid": (BUCKET, [8, 16, 32])}


def make_cases(d: int, study: str) -> dict[str, Callable[[], object]]:
    """Return the exchanges of d parameters that are timed, by name."""
    workers = Workers.current()
    channel = Channel(workers)
    if study == "grid":
        shapes: dict[str, Topology | Shape] = {
            name: grid_shape(workers.count, most) for name, most in DIMENSIONS.items()
        }
        shapes["auto"] = "auto"
        votes = {name: make_sum(Vote, shape, channel, d) for name, shape in shapes.items()}
        return {name: partial(vote.run, 0) for name, vote in votes.items()}
    dense, half = torch.ones(d), torch.ones(d, dtype=torch.bfloat16)
    votes, means = Vote(channel, d), LevelMean(channel, d)
    sums = {p: Vote(channel, d, levels=2**p - 1, ties="zero") for p in CUB_BITS}
    return {
        "all_reduce float32": lambda: dist.all_reduce(dense),
        "all_reduce bfloat16": lambda: dist.all_reduce(half),
        "vote, 1 bit": lambda: votes.run(0),
        "mean of signs": lambda: means.run(0),
        **{f"Lion Cub, {p} bits": partial(sum_.run, 0) for p, sum_ in sums.items()},
    }


def bits_sent(case: str, n: int) -> float | None:
    """Return the bits per parameter that a worker sends; None for auto, which is one of others."""
    if case == "auto":
        return None
    others = (n - 1) / n
    if case in DIMENSIONS:
        return bits_up(grid_shape(n, DIMENSIONS[case]), 1) + others
    return (
        others
        * {
            "all_reduce float32": 64,
            "all_reduce bfloat16": 32,
            "vote, 1 bit": 2,
            "mean of signs": 1 + n.bit_length(),
            **{f"Lion Cub, {p} bits": p + 1.6 for p in CUB_BITS},
        }[case]
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--study", choices=SIZES, default="dense", help="default: dense")
    parser.add_argument("--d", type=whole(1), help="parameters")
    parser.add_argument("--workers", type=whole(2), nargs="+")
    parser.add_argument(
        "--rates",
        type=link,
        nargs="+",
        default=[10**8, 10**9, None],
        help="of the links: 100mbit, 1gbit, ... or loopback",
    )
    parser.add_argument("--rounds", type=whole(2), default=5)
    small = {"d": 10_000, "workers": [2], "rates": [10**9, None], "rounds": 2}
    args = parser.read(arguments, **small)
    if args.smoke and args.study == "grid":
        args.workers = [4]
    d, workers = SIZES[args.study]
    args.d, args.workers = args.d or d, args.workers or workers
    parser.check_links(args)
    return args


def main(args: argparse.Namespace) -> None:
    name = "grid" if args.study == "grid" else "exchange"
    points = Points(args.output / f"{name}.json", {}, {"rounds": args.rounds}, args.fresh)
    keys = [{"rate": rate, "workers": n, "d": args.d} for rate in args.rates for n in args.workers]
    for key in points.missing(keys, cost=lambda key: 1e9 / (key["rate"] or 1e9)):
        rate, n = key["rate"], key["workers"]
        measured = time_together(
            n, rate, make_cases, args.d, args.study, rounds=args.rounds,
            slow_from_start=args.study == "grid",  # where auto measures links
        )  # fmt: skip
        rows = evaluate(measured, **key)
        points.add(key, rows)
        for row in rows:
            seconds, ideal = row["seconds"]["median"], row["ideal_seconds"]
            print(
                f"{show_rate(rate):>12s}  n={n}  {row['case']:20s} {1e3 * seconds:8.1f} ms"
                + (f"  {seconds / ideal:5.2f} x ideal" if ideal else "")
                + (f"  nic/payload {row['nic_over_payload']['median']:.3f}" if ideal else ""),
                flush=True,
            )
    rows = [row for row in points.rows if row["d"] == args.d]
    figure = draw_grid(rows) if args.study == "grid" else draw(rows)
    figure.savefig(args.output / f"{name}.png", dpi=110)


def evaluate(measured: Measured, rate: int | None, workers: int, d: int) -> list[Row]:
    """Return one row a case: its time, its ideal, and the interface's bytes over the payload."""
    rows = []
    for case, values in measured.items():
        row = {"case": case, "seconds": spread(values["seconds"])}
        bits = bits_sent(case, workers)
        if bits is not None:
            payload = d * bits / 8
            over = spread([count / payload for count in values["nic_bytes"]])
            row |= {"payload_bytes": payload, "nic_over_payload": over}
        row["ideal_seconds"] = d * bits / rate if rate and bits is not None else None
        if "direct" in measured and case != "direct":
            row["over_direct"] = ratios(values["seconds"], measured["direct"]["seconds"])
        rows.append(row)
    return rows


def draw_grid(rows: list[Row]) -> Figure:
    """Draw time against workers, a panel for each rate."""
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: rate or 1e12)
    workers = sorted({row["workers"] for row in rows})
    figure = Figure(figsize=(4.2 * len(rates), 4.2), layout="constrained")
    axes = figure.subplots(1, len(rates), squeeze=False)[0]
    for axis, rate in zip(axes, rates, strict=True):
        for case in dict.fromkeys(row["case"] for row in rows):
            draw_case(axis, [row for row in rows if row["rate"] == rate and row["case"] == case])
        axis.set(xscale="log", yscale="log", xlabel="workers", title=show_rate(rate))
        axis.set_xticks(workers, labels=workers)
        axis.minorticks_off()
    axes[0].set_ylabel("ms")
    axes[0].legend()
    figure.suptitle(f"one vote of {rows[0]['d']:,} parameters, directly and on grids of workers")
    return figure


def draw_case(axis: Axes, rows: list[Row]) -> None:
    """Draw the time of a case against workers."""
    rows = sorted(rows, key=lambda row: row["workers"])
    values = [1e3 * row["seconds"]["median"] for row in rows]
    axis.plot([row["workers"] for row in rows], values, marker="o", ms=4, label=rows[0]["case"])


def draw(rows: list[Row]) -> Figure:
    """Draw time against workers, a panel for each rate, and against p at the median of workers."""
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: rate or 1e12)
    workers = sorted({row["workers"] for row in rows})
    columns = len(rates) + 1
    figure = Figure(figsize=(4.2 * columns, 4.8), layout="constrained")
    *panels, last = figure.subplots(1, columns, squeeze=False)[0]
    for axis, rate in zip(panels, rates, strict=True):
        for case in dict.fromkeys(row["case"] for row in rows):
            draw_case(axis, [row for row in rows if row["rate"] == rate and row["case"] == case])
        axis.set(yscale="log", xlabel="workers", ylabel="ms", title=show_rate(rate))
        axis.set_xticks(workers)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=9)
    n = workers[len(workers) // 2]
    bits_up = {"vote, 1 bit": 1, **{f"Lion Cub, {p} bits": p for p in CUB_BITS}}
    bits_up |= {"all_reduce bfloat16": 16, "all_reduce float32": 32}
    for rate in rates:
        chosen = {r["case"]: r for r in rows if r["rate"] == rate and r["workers"] == n}
        cases = [case for case in bits_up if case in chosen]
        values = [1e3 * chosen[case]["seconds"]["median"] for case in cases]
        last.plot(
            [bits_up[case] for case in cases], values, marker="o", ms=4, label=show_rate(rate)
        )
    last.set(xscale="log", yscale="log", xlabel="p, bits up", title=f"{n} workers")
    last.set_xticks(list(bits_up.values()), labels=list(bits_up.values()))
    last.minorticks_off()
    last.legend(fontsize=8)
    figure.suptitle(f"one exchange, d = {rows[0]['d']:.0e}")
    return figure


if __name__ == "__main__":
    run(main, parse())
