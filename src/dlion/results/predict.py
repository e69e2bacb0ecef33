"""What a step would cost on your machines: ``python -m dlion.results.predict --help``.

A small model of a training step, fed with costs that the benchmarks measured (results/speed):

    payload  = (n - 1) / n * d * bits / 8 bytes, bits counted to the owner of a slice and back
    exchange = overhead * payload / rate + rounds * latency + host * payload + vote
    step     = compute + encode + apply + what of the exchange the backward pass cannot hide

Direct-send, like a ring, takes n - 1 rounds each way for every bucket. A backward pass hides all of
the exchange but that of the last bucket, if it is long enough.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dlion.errors import UserError
from dlion.units import parse_rate


@dataclass(frozen=True)
class Method:
    """What a method sends and computes, per parameter.

    Attributes:
        bits: to the owner of a slice and back, a function of n.
        local: ns for encode and apply together, on one core.
        vote: ns for one message about one parameter, on one core.
    """

    bits: Callable[[int], float]
    local: float
    vote: float = 0.0


# ns: results/speed/local_step.json, one thread, d = 1e7; DDP's are lion-pytorch's at d = 1e6, which
# is the size of a model's tensors, and the bf16 hook's own passes are guessed
METHODS = {
    "ddp_float32": Method(lambda n: 64, 1.7),
    "ddp_bf16": Method(lambda n: 32, 2.0),
    "dlion_mavo": Method(lambda n: 2, 0.55, 0.05),
    "dlion_avg": Method(lambda n: 1 + n.bit_length(), 0.85, 0.05),
    "lion_cub_2": Method(lambda n: 3.6, 2.2, 0.1),
    "lion_cub_4": Method(lambda n: 5.6, 2.6, 0.2),
}


@dataclass(frozen=True)
class Setting:
    """Where a step runs.

    Attributes:
        parameters, workers: d and n.
        rate: of a worker's link, bits per second each way; None: as fast as the host copies.
        latency: seconds of a round: a small message and its handling on both sides.
        overhead: bytes on the link for a byte of payload (headers, acknowledgements).
        host: seconds per byte of payload that a worker's core spends to send and receive.
        compute: seconds of forward and backward.
        backward: share of them in the backward pass.
        buckets: exchanges a step.
        sharing: processes that share a core.
    """

    parameters: float
    workers: int
    rate: float | None
    compute: float
    latency: float = 2e-4
    overhead: float = 1.05
    host: float = 1e-9
    backward: float = 2 / 3
    buckets: int = 4
    sharing: float = 1.0


def exchange_seconds(method: Method, s: Setting) -> float:
    """Seconds of all exchanges of a step, were nothing else going on."""
    n, d = s.workers, s.parameters
    payload = (n - 1) / n * d * method.bits(n) / 8
    wire = s.overhead * 8 * payload / s.rate if s.rate else 0.0
    rounds = 2 * (n - 1) * s.buckets
    return wire + rounds * s.latency + s.host * payload + 1e-9 * d * method.vote * s.sharing


def step_seconds(method: Method, s: Setting) -> float:
    """Seconds of a training step."""
    exchange = exchange_seconds(method, s)
    hidden = min(exchange * (1 - 1 / s.buckets), s.compute * s.backward * (1 - 1 / s.buckets))
    return s.compute + 1e-9 * s.parameters * method.local * s.sharing + exchange - hidden


def check(file: Path) -> list[tuple[str, float | None, str, float, float]]:
    """Predictions for the points of an end_to_end.json: (model, rate, method, measured, predicted).

    Sharing, latency and host costs are those of that machine: four processes on two cores, talking
    through the kernel.
    """
    names = {
        "DDP float32 Lion": "ddp_float32",
        "DDP bf16 hook": "ddp_bf16",
        "dlion_mavo": "dlion_mavo",
        "dlion_avg": "dlion_avg",
        "lion_cub 1 bit": "dlion_mavo",
        "lion_cub 2 bits": "lion_cub_2",
        "lion_cub 4 bits": "lion_cub_4",
    }
    data = json.loads(file.read_text())
    points = []
    for point in data["points"]:
        method = names.get(point["method"])
        if method is None:
            continue
        setting = Setting(
            parameters=point["d"],
            workers=data["workers"],
            rate=point["rate"],
            compute=point["compute_seconds"],
            buckets=max(1, round(4e-6 * point["d"] / data["bucket_cap_mb"])),
            sharing=2.0,
        )
        predicted = step_seconds(METHODS[method], setting)
        measured = point["seconds"]["median"]
        points.append((point["model"], point["rate"], point["method"], measured, predicted))
    return points


def show(setting: Setting, console: Console) -> None:
    """A table: every method's step and exchange."""
    table = Table(title="predicted step")
    for column in ("method", "payload", "exchange", "step", "speed-up", "waits for"):
        table.add_column(column, justify="left" if column == "method" else "right")
    slowest = step_seconds(METHODS["ddp_float32"], setting)
    for name, method in METHODS.items():
        n, d = setting.workers, setting.parameters
        step, exchange = step_seconds(method, setting), exchange_seconds(method, setting)
        latency = exchange - exchange_seconds(method, replace(setting, latency=0.0))
        reason = "compute" if step < 1.1 * setting.compute else "bandwidth"
        if reason == "bandwidth" and latency > exchange / 2:
            reason = "latency"
        payload = (n - 1) / n * d * method.bits(n) / 8
        table.add_row(
            name,
            f"{payload / 1e6:,.2f} MB",
            f"{1e3 * exchange:,.1f} ms",
            f"{1e3 * step:,.1f} ms",
            f"{slowest / step:.2f}x",
            reason,
        )
    console.print(table)


def draw(path: Path) -> None:
    """Speed-up over DDP float32 to 1,024 workers, 1e8 to 1e11 parameters, 1 to 400 Gbit/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates, sizes = (1e9, 10e9, 100e9, 400e9), (1e8, 1e9, 1e10, 1e11)
    workers = [2**i for i in range(1, 11)]
    figure, axes = pyplot.subplots(len(sizes), len(rates), figsize=(15, 12), sharex=True)
    for row, d in zip(axes, sizes, strict=True):
        for axis, rate in zip(row, rates, strict=True):
            for name in ("dlion_mavo", "dlion_avg", "lion_cub_4"):
                ups = [_speed_up(name, d, n, rate) for n in workers]
                axis.plot(workers, ups, marker="o", ms=3, label=name)
            axis.axhline(1, color="black", lw=0.8, ls=":")
            axis.set(xscale="log", yscale="log", title=f"d = {d:.0e}, {rate / 1e9:g} Gbit/s")
    axes[0][0].legend()
    for axis in axes[-1]:
        axis.set_xlabel("workers")
    figure.suptitle(
        "predicted speed-up over DDP float32; compute of 3,000 tokens a worker at 200 TFLOP/s,"
        " 20 µs a round, 8 buckets"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def _speed_up(name: str, d: float, n: int, rate: float) -> float:
    """On accelerators: local costs 100 times smaller than a CPU core's, no host copies."""
    compute = 6 * d * 3000 / 200e12
    setting = Setting(d, n, rate, compute, latency=2e-5, overhead=1.0, host=0.0, buckets=8)
    setting = replace(setting, sharing=0.01)
    return step_seconds(METHODS["ddp_float32"], setting) / step_seconds(METHODS[name], setting)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.results.predict", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--parameters", type=float, default=1e9, help="d, such as 1e9")
    parser.add_argument("--workers", type=int, default=8, help="n")
    parser.add_argument("--rate", default="1gbit", help="of a worker's link, such as 10gbit")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds, forward and backward")
    parser.add_argument("--latency", type=float, default=Setting.latency, help="seconds a round")
    parser.add_argument("--overhead", type=float, default=Setting.overhead, help="of the protocol")
    parser.add_argument("--host", type=float, default=Setting.host, help="seconds a byte")
    parser.add_argument("--buckets", type=int, default=Setting.buckets)
    parser.add_argument("--check", type=Path, metavar="END_TO_END.json", help="compare instead")
    parser.add_argument("--curves", type=Path, metavar="FILE.png", help="draw curves instead")
    args = parser.parse_args(arguments)
    console = Console()
    if args.curves:
        draw(args.curves)
        return
    if args.check:
        for model, rate, method, measured, predicted in check(args.check):
            link = f"{rate / 1e6:6.0f} Mbit/s" if rate else "   loopback"
            print(
                f"{model:10s} {link}  {method:18s} measured {1e3 * measured:8.0f} ms"
                f"  predicted {1e3 * predicted:8.0f} ms  {predicted / measured - 1:+.0%}"
            )
        return
    if args.workers < 1 or args.parameters < 1 or args.buckets < 1 or args.compute < 0:
        sys.exit("error: workers, parameters and buckets are at least 1, compute at least 0")
    try:
        rate = parse_rate(args.rate)
    except UserError as error:
        sys.exit(f"error: {error}")
    setting = Setting(
        args.parameters,
        args.workers,
        rate,
        args.compute,
        latency=args.latency,
        overhead=args.overhead,
        host=args.host,
        buckets=args.buckets,
    )
    show(setting, console)


if __name__ == "__main__":
    main()
