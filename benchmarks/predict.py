"""What a step would cost on your machines: ``python benchmarks/predict.py --help``.

A small model of a training step, fed with costs that the benchmarks measured (results/speed):

    payload  = (n - 1) / n * d * bits / 8 bytes, bits counted to the owner of a slice and back
    exchange = max(overhead * payload / rate, work of the host) + waits * latency + wakeups
    step     = a bucket after the other: each leaves when its gradients are there and the exchange
               before it is over; then the update

Direct-send sends n - 1 messages each way for every bucket. Short ones go all at once, long ones
wait for each other while more than 128 KB are under way; a ring has to wait n - 1 times each way.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dlion.errors import UserError
from dlion.exchange.channel import IN_FLIGHT
from dlion.units import parse_rate


@dataclass(frozen=True)
class Method:
    """What a method sends and computes, per parameter.

    Attributes:
        bits: to the owner of a slice and back, a function of n.
        encode, apply: ns before the exchange and after it, on one core.
        vote: ns for one message about one parameter, on one core.
        schedule: direct (send) | ring | halving (recursive halving and doubling).
        overhead: bytes' worth of time on the link for a byte of payload: headers, acknowledgements,
            and what the schedule leaves unused.
    """

    bits: Callable[[int], float]
    encode: float
    apply: float
    vote: float = 0.0
    schedule: str = "direct"
    overhead: float = 1.25


def _halving_bits(n: int) -> float:
    """Votes that are added on the way: in round k, d / 2^k sums of 2^(k - 1) signs; then signs."""
    rounds = range(1, max(1, math.ceil(math.log2(n))) + 1)
    up = sum((2 ** (k - 1)).bit_length() / 2**k for k in rounds)
    return (up + 1 - 1 / n) * n / max(n - 1, 1)


# ns: results/speed/local_step.json, one thread, d = 1e7; DDP's are lion-pytorch's at d = 1e6, which
# is the size of a model's tensors. Overhead: 1.07 is what headers and acknowledgements cost long
# messages (results/speed/exchange.json); short ones, which go all at once, are fitted, see check
METHODS = {
    "ddp_float32": Method(lambda n: 64, 0.0, 1.7, schedule="ring", overhead=1.07),
    "ddp_bf16": Method(lambda n: 32, 0.5, 2.0, schedule="ring", overhead=1.07),
    "g_lion": Method(lambda n: 64, 0.35, 0.7, 0.1, overhead=1.07),
    "dlion_mavo": Method(lambda n: 2, 0.35, 0.2, 0.05),
    "dlion_avg": Method(lambda n: 1 + n.bit_length(), 0.35, 0.5, 0.05),
    "lion_cub_2": Method(lambda n: 3.6, 1.1, 0.8, 0.1),
    "lion_cub_4": Method(lambda n: 5.6, 1.3, 0.8, 0.2),
}
# what would replace direct-send where its messages are too many; not implemented
HALVING = replace(METHODS["dlion_mavo"], bits=_halving_bits, schedule="halving")


@dataclass(frozen=True)
class Setting:
    """Where a step runs.

    Attributes:
        parameters, workers: d and n.
        rate: of a worker's link, bits per second each way; None: as fast as the host copies.
        compute: seconds of forward and backward.
        latency: seconds until a message that is waited for has come.
        message: seconds of a core for a message, sent and received.
        wakeup: seconds until a process that is spoken to gets a core, where they share cores.
        host: seconds of a core for a byte of payload, sent and received.
        backward: share of compute in the backward pass.
        buckets: exchanges a step, each of as many parameters as the next.
        shares: of the parameters in each bucket, in the order they leave, if they are not equal.
        sharing: processes that share a core.
        speed: of the local work, times that of the CPU core it was measured on.
    """

    parameters: float
    workers: int
    rate: float | None
    compute: float
    latency: float = 2e-4
    message: float = 1e-4
    wakeup: float = 0.0
    host: float = 1e-9
    backward: float = 2 / 3
    buckets: int = 8
    shares: tuple[float, ...] | None = None
    sharing: float = 1.0
    speed: float = 1.0


def payload_bytes(method: Method, s: Setting) -> float:
    """What a worker sends in a step."""
    return (s.workers - 1) / s.workers * s.parameters * method.bits(s.workers) / 8


def _exchange(method: Method, s: Setting, share: float) -> tuple[float, float]:
    """Seconds of the exchange of a share of the parameters, and seconds of a core within."""
    n, payload = s.workers, share * payload_bytes(method, s)
    if n == 1:
        return 0.0, 0.0
    messages = {"direct": n - 1, "ring": n - 1, "halving": math.ceil(math.log2(n))}[method.schedule]
    waits = float(messages)
    if method.schedule == "direct":
        waits = min(waits, max(1.0, payload / 2 / IN_FLIGHT))
    vote = 1e-9 * share * s.parameters * method.vote / s.speed
    work = s.sharing * (2 * messages * s.message + s.host * payload + vote)
    wire = method.overhead * 8 * payload / s.rate if s.rate else 0.0
    return max(wire, work) + 2 * (waits * s.latency + s.wakeup), work


def exchange_seconds(method: Method, s: Setting) -> float:
    """Seconds of all exchanges of a step, were nothing else going on."""
    return sum(_exchange(method, s, share)[0] for share in _shares(s))


def _shares(s: Setting) -> tuple[float, ...]:
    return s.shares or s.buckets * (1 / s.buckets,)


def step_seconds(method: Method, s: Setting) -> float:
    """Seconds of a training step."""
    ns = 1e-9 * s.parameters * s.sharing / s.speed
    clock, free = s.compute * (1 - s.backward), 0.0
    for share in _shares(s):
        exchange, work = _exchange(method, s, share)
        clock += s.compute * s.backward * share + ns * method.encode * share
        free = max(free, clock) + exchange
        if s.sharing > 1:  # what the exchange computes is taken from the backward pass
            clock += work
    return max(clock, free) + ns * method.apply


# four processes on two cores
SHARED_CORES = {"sharing": 2.0, "latency": 2e-4, "message": 4e-4, "wakeup": 2e-3, "host": 8e-10}


def check(file: Path) -> list[tuple[str, float | None, str, float, float]]:
    """Predictions for the points of an end_to_end.json: (model, rate, method, measured, predicted).

    Three costs of that machine, a message, a wake-up and a byte, and the overhead of short messages
    were fitted to these points.
    """
    names = {
        "DDP float32 Lion": "ddp_float32",
        "DDP bf16 hook": "ddp_bf16",
        "g_lion": "g_lion",
        "dlion_mavo": "dlion_mavo",
        "dlion_avg": "dlion_avg",
        "lion_cub 1 bit": "dlion_mavo",
        "lion_cub 2 bits": "lion_cub_2",
        "lion_cub 4 bits": "lion_cub_4",
    }
    data = json.loads(file.read_text())
    points = []
    for point in data["points"]:
        name = names.get(point["method"])
        if name is None:
            continue
        dense = name.startswith("ddp")
        setting = Setting(
            parameters=point["d"],
            workers=data["workers"],
            rate=point["rate"],
            compute=point["compute_seconds"],
            backward=1 - point["forward_seconds"] / point["compute_seconds"],
            buckets=math.ceil(4e-6 * point["d"] / 25),
            shares=None if dense else tuple(point["buckets"]),
            **SHARED_CORES,
        )
        predicted = step_seconds(METHODS[name], setting)
        measured = point["seconds"]["median"]
        points.append((point["model"], point["rate"], point["method"], measured, predicted))
    return points


def waits_for(method: Method, s: Setting) -> str:
    """What a step would be shorter without: compute, bandwidth or messages."""
    step = step_seconds(method, s)
    if step < 1.1 * s.compute:
        return "compute"
    free = step_seconds(method, replace(s, latency=0.0, message=0.0))
    return "messages" if step - free > (step - s.compute) / 2 else "bandwidth"


def show(setting: Setting, console: Console) -> None:
    """A table: every method's step and exchange."""
    table = Table(title="predicted step")
    for column in ("method", "payload", "exchange", "step", "speed-up", "waits for"):
        table.add_column(column, justify="left" if column == "method" else "right")
    slowest = step_seconds(METHODS["ddp_float32"], setting)
    for name, method in METHODS.items():
        step = step_seconds(method, setting)
        table.add_row(
            name,
            f"{payload_bytes(method, setting) / 1e6:,.2f} MB",
            f"{1e3 * exchange_seconds(method, setting):,.1f} ms",
            f"{1e3 * step:,.1f} ms",
            f"{slowest / step:.2f}x",
            waits_for(method, setting),
        )
    console.print(table)


def accelerated(d: float, n: int, rate: float) -> Setting:
    """A cluster of accelerators: assumed, not measured.

    3,000 tokens a worker at 200 TFLOP/s; 10 µs a message, 20 µs until one has come; local work 100
    times faster than on a CPU core, as memory is; no copies by the host; 8 buckets.
    """
    compute = 6 * d * 3000 / 200e12
    return Setting(d, n, rate, compute, latency=2e-5, message=1e-5, host=0.0, speed=100)


RATES, SIZES, WORKERS = (
    (1e9, 10e9, 100e9, 400e9),
    (1e8, 1e9, 1e10, 1e11),
    [2**i for i in range(1, 11)],
)


def overtaken(d: float, rate: float) -> int | None:
    """From how many workers on (a power of 2) a vote by halving is 10 % faster than direct-send."""
    for n in WORKERS:
        s = accelerated(d, n, rate)
        if step_seconds(METHODS["dlion_mavo"], s) > 1.1 * step_seconds(HALVING, s):
            return n
    return None


def draw(path: Path) -> None:
    """Speed-up over DDP float32 to 1,024 workers, 1e8 to 1e11 parameters, 1 to 400 Gbit/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = {name: METHODS[name] for name in ("dlion_mavo", "dlion_avg", "lion_cub_4")}
    lines["dlion_mavo, halving (not implemented)"] = HALVING
    figure, axes = pyplot.subplots(len(SIZES), len(RATES), figsize=(15, 12), sharex=True)
    for row, d in zip(axes, SIZES, strict=True):
        for axis, rate in zip(row, RATES, strict=True):
            settings = [accelerated(d, n, rate) for n in WORKERS]
            dense = [step_seconds(METHODS["ddp_float32"], s) for s in settings]
            for name, method in lines.items():
                steps = [step_seconds(method, s) for s in settings]
                ups = [a / b for a, b in zip(dense, steps, strict=True)]
                axis.plot(WORKERS, ups, marker="o", ms=3, label=name)
            axis.axhline(1, color="black", lw=0.8, ls=":")
            axis.set(xscale="log", yscale="log", title=f"d = {d:.0e}, {rate / 1e9:g} Gbit/s")
    axes[0][0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("workers")
    figure.suptitle(
        "predicted speed-up over DDP float32; assumed: 3,000 tokens a worker at 200 TFLOP/s,"
        " 10 µs a message, 20 µs until one has come, 8 buckets"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/predict.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--parameters", type=float, default=1e9, help="d, such as 1e9")
    parser.add_argument("--workers", type=int, default=8, help="n")
    parser.add_argument("--rate", default="1gbit", help="of a worker's link, such as 10gbit")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds, forward and backward")
    parser.add_argument(
        "--latency", type=float, default=Setting.latency, help="seconds, of a message"
    )
    parser.add_argument("--message", type=float, default=Setting.message, help="core seconds, each")
    parser.add_argument("--host", type=float, default=Setting.host, help="core seconds a byte")
    parser.add_argument("--buckets", type=int, default=Setting.buckets)
    parser.add_argument("--check", type=Path, metavar="END_TO_END.json", help="compare instead")
    parser.add_argument("--curves", type=Path, metavar="FILE.png", help="draw curves instead")
    args = parser.parse_args(arguments)
    console = Console()
    if args.curves:
        draw(args.curves)
        for d in SIZES:
            ends = [f"{rate / 1e9:g} Gbit/s: {overtaken(d, rate) or 'never'}" for rate in RATES]
            print(f"d = {d:.0e}: halving wins from workers on, at {', '.join(ends)}")
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
        message=args.message,
        host=args.host,
        buckets=args.buckets,
    )
    show(setting, console)


if __name__ == "__main__":
    main()
