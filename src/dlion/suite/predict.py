"""Predict a training step on your machines: a model of traffic and computation.

    payload  = (n - 1) / n * d * bits / 8 bytes, bits to the owner of a slice and back
    exchange = max(overhead * payload / rate, work of the host) + waits * latency + wakeups
    step     = a bucket after the other: each leaves when its gradients are there and the exchange
               before it is over; then the update

Direct-send sends n - 1 messages each way for every bucket, a grid of m_1 x m_2 x ... workers
sum (m_j - 1), with more bits to the owner. Short ones go all at once, long ones wait for each other
while more than 128 KB are under way, and below 16 Mbit/s all leave one by one; a ring waits n - 1
times each way.

The bits are the methods'. The nanoseconds of local work were measured on one machine, and are named
after it; ``--speed`` scales them to another.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.exchange.grid import TOPOLOGIES, Topology, bits_up, grid_shape
from dlion.exchange.transport import IN_FLIGHT, TELLING
from dlion.extensions.pacing import SLOW
from dlion.suite.arguments import PICTURES, link, make_parser, number, output_file, picture, whole
from dlion.suite.files import whole_file
from dlion.suite.units import human_bytes, human_seconds, show_rate

DIRECT, RING = "direct-send", "ring"
HEADERS = 1.07  # TCP's and Ethernet's, acknowledgements included, of long messages


@dataclass(frozen=True)
class LocalWork:
    """Computation of a method, in nanoseconds of a core for a parameter.

    Attributes:
        encode, apply: before the exchange and after it.
        vote: for one worker's message.
    """

    encode: float
    apply: float
    vote: float = 0.0


# one thread of an AMD EPYC, d = 1e7: results/speed/local_step.json; DDP's are lion-pytorch's at
# d = 1e6, the size of a model's tensors
EPYC_CORE = {
    "ddp_float32": LocalWork(0.0, 1.7),
    "ddp_bf16": LocalWork(0.5, 2.0),
    "g_lion": LocalWork(0.35, 0.7, 0.1),
    "dlion_mavo": LocalWork(0.35, 0.2, 0.05),
    "dlion_avg": LocalWork(0.35, 0.5, 0.05),
    "lion_cub_2": LocalWork(1.1, 0.8, 0.1),
    "lion_cub_4": LocalWork(1.3, 0.8, 0.2),
}
# what fits best, together with SHORT_MESSAGES, to results/speed/end_to_end.json, which was measured
# with four processes on two cores of that machine: arguments of Setting
EPYC_SHARED_BY_TWO = {
    "sharing": 2.0,
    "latency": 2e-4,
    "message": 4e-4,
    "wakeup": 2e-3,
    "host": 8e-10,
}
SHORT_MESSAGES = 1.25  # instead of HEADERS, where they go at once


@dataclass(frozen=True)
class Formula:
    """Traffic of a method.

    Attributes:
        up: bits for a parameter to the owner of its slice.
        down: those back, a function of n.
        work: what it computes.
        largest: the largest value in a message, where they are counts; None: a grid cannot add.
        schedule: DIRECT, which can be on a grid, or RING.
        overhead: bytes' worth of time on the link for a byte of payload, at once.
    """

    up: float
    down: Callable[[int], float]
    work: LocalWork
    largest: int | None = None
    schedule: str = DIRECT
    overhead: float = SHORT_MESSAGES


METHODS = {
    "ddp_float32": Formula(32, lambda n: 32, EPYC_CORE["ddp_float32"], None, RING, HEADERS),
    "ddp_bf16": Formula(16, lambda n: 16, EPYC_CORE["ddp_bf16"], None, RING, HEADERS),
    "g_lion": Formula(32, lambda n: 32, EPYC_CORE["g_lion"], overhead=HEADERS),
    "dlion_mavo": Formula(1, lambda n: 1, EPYC_CORE["dlion_mavo"], 1),
    "dlion_avg": Formula(1, lambda n: n.bit_length(), EPYC_CORE["dlion_avg"], 1),
    "lion_cub_2": Formula(2, lambda n: 1.6, EPYC_CORE["lion_cub_2"], 2),
    "lion_cub_4": Formula(4, lambda n: 1.6, EPYC_CORE["lion_cub_4"], 14),
}
BASELINE = "ddp_float32"


@dataclass(frozen=True)
class Setting:
    """Setting in which a step runs.

    Attributes:
        parameters, workers: d and n.
        rate: of a worker's link, bits per second each way; None: as fast as the host copies.
        compute: seconds of forward and backward.
        latency: seconds until a message that is waited for has come.
        message: seconds of a core for a message, sent and received.
        wakeup: seconds until a waiting process gets a core, where processes share cores.
        host: seconds of a core for a byte of payload, sent and received.
        backward: share of compute in the backward pass.
        buckets: exchanges a step, each of as many parameters as the next.
        shares: of the parameters in each bucket, in the order they leave, where they differ.
        sharing: processes that share a core.
        speed: of the local work, times that of the core in EPYC_CORE.
        exchange: direct; grid: on that of ``grid_shape(n)``, where a method can be; auto: directly,
            or in the number of dimensions that takes the shortest time.
        one_by_one: whether all messages do, not only long ones; None: on links that are slow.
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
    exchange: Topology = "direct"
    one_by_one: bool | None = None


def shape_of(method: Formula, setting: Setting) -> tuple[int, ...]:
    """Return the grid on which the workers exchange messages, ``(n,)`` where there is none."""
    n = setting.workers
    if method.largest is None or setting.exchange == "direct":
        return (n,)
    if setting.exchange == "grid":
        return grid_shape(n)
    shapes = (grid_shape(n, dimensions) for dimensions in (1, 2, 3))
    share = max(_shares(setting))
    return min(shapes, key=lambda shape: _exchange(method, setting, share, shape)[0])


def payload_bytes(method: Formula, setting: Setting, shape: tuple[int, ...] | None = None) -> float:
    """Return the bytes that a worker sends in a step, headers not included.

    ``shape``: of the grid; None: that of the setting.
    """
    n, shape = setting.workers, shape or shape_of(method, setting)
    others = (n - 1) / n
    up = others * method.up if len(shape) == 1 else bits_up(shape, method.largest or 1)
    return setting.parameters * (up + others * method.down(n)) / 8


def exchange_seconds(method: Formula, setting: Setting) -> float:
    """Return the seconds of all exchanges of a step, were nothing else going on."""
    shape = shape_of(method, setting)
    return sum(_exchange(method, setting, share, shape)[0] for share in _shares(setting))


def step_seconds(method: Formula, setting: Setting) -> float:
    """Return the seconds of a training step."""
    s, shape = setting, shape_of(method, setting)
    local = 1e-9 * s.parameters * s.sharing / s.speed  # seconds of a nanosecond a parameter
    computed, arrived = s.compute * (1 - s.backward), 0.0
    for share in _shares(s):
        exchange, work = _exchange(method, s, share, shape)
        computed += s.compute * s.backward * share + local * method.work.encode * share
        arrived = max(arrived, computed) + exchange
        if s.sharing > 1:  # what the exchange computes is taken from the backward pass
            computed += work
    return max(computed, arrived) + local * method.work.apply


def bottleneck(method: Formula, setting: Setting) -> str:
    """Return the bottleneck of a step: compute, bandwidth or messages."""
    step = step_seconds(method, setting)
    if step < 1.1 * setting.compute or setting.workers == 1:
        return "compute"
    instant = step_seconds(method, replace(setting, latency=0.0, message=0.0))
    return "messages" if step - instant > (step - setting.compute) / 2 else "bandwidth"


def _shares(setting: Setting) -> tuple[float, ...]:
    return setting.shares or setting.buckets * (1 / setting.buckets,)


def _one_by_one(method: Formula, setting: Setting, shape: tuple[int, ...]) -> bool:
    """Whether links were found slow, so that messages wait for each other."""
    if method.schedule == RING:
        return False
    if setting.one_by_one is not None:
        return setting.one_by_one
    largest = max(_shares(setting)) * payload_bytes(method, setting, shape) / 2 / len(shape)
    return setting.rate is not None and setting.rate < 8 * SLOW and largest >= TELLING


def _exchange(
    method: Formula, setting: Setting, share: float, shape: tuple[int, ...]
) -> tuple[float, float]:
    """Return the seconds of an exchange of a share of the parameters, and those of a core in it."""
    s, payload = setting, share * payload_bytes(method, setting, shape)
    if s.workers == 1:
        return 0.0, 0.0
    messages = waits = sum(shape) - len(shape)
    overhead, each_way = method.overhead, payload / 2 / len(shape)  # along a dimension
    if _one_by_one(method, s, shape):
        overhead = HEADERS
    elif method.schedule == DIRECT:
        waits = sum(min(size - 1, max(1.0, each_way / IN_FLIGHT)) for size in shape)
    vote = 1e-9 * share * s.parameters * method.work.vote / s.speed
    work = s.sharing * (2 * messages * s.message + s.host * payload + vote)
    wire = overhead * 8 * payload / s.rate if s.rate else 0.0
    return max(wire, work) + 2 * (waits * s.latency + len(shape) * s.wakeup), work


MEASURED_AS = {  # methods of end_to_end.json and buckets.json by their names there
    "DDP float32 Lion": "ddp_float32",
    "DDP bf16 hook": "ddp_bf16",
    "g_lion": "g_lion",
    "dlion_mavo": "dlion_mavo",
    "dlion_mavo, 5 MB, at once": "dlion_mavo",
    "dlion_mavo, 5 MB, one by one": "dlion_mavo",
    "dlion_avg": "dlion_avg",
    "lion_cub 1 bit": "dlion_mavo",
    "lion_cub 2 bits": "lion_cub_2",
    "lion_cub 4 bits": "lion_cub_4",
}


def compare(file: Path) -> list[tuple[str, float | None, str, float, float]]:
    """Return (model, rate, method, measured, predicted) for the points of a file of whole steps.

    EPYC_SHARED_BY_TWO was fitted to the file in results/speed, so that agreement with it says how
    well the model describes these points, not how well it predicts others.

    Raises:
        UserError: if the file is not valid.
    """
    try:
        return _compare(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} does not hold whole steps ({type(error).__name__}: {str(error)[:80]}): give an"
            " end_to_end.json, as benchmarks/end_to_end.py writes it"
        ) from error


def _compare(data: dict[str, Any]) -> list[tuple[str, float | None, str, float, float]]:
    compared = []
    for point in data["points"]:
        name = MEASURED_AS.get(point["method"])
        if name is None:
            continue
        setting = Setting(
            parameters=point["d"],
            workers=data["workers"],
            rate=point["rate"],
            compute=point["compute_seconds"],
            backward=1 - point["forward_seconds"] / point["compute_seconds"],
            buckets=math.ceil(4e-6 * point["d"] / 25),  # DDP's, of 25 MB
            shares=None if METHODS[name].schedule == RING else tuple(point["buckets"]),
            one_by_one=point["method"].endswith("one by one"),
            **EPYC_SHARED_BY_TWO,
        )
        predicted = step_seconds(METHODS[name], setting)
        measured = point["seconds"]["median"]
        compared.append((point["model"], point["rate"], point["method"], measured, predicted))
    return compared


def show(setting: Setting) -> None:
    """Print a table of every method's step and exchange."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="predicted step")
    for column in ("method", "workers", "payload", "exchange", "step", "speed-up", "waits for"):
        first = column == "method"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    baseline = step_seconds(METHODS[BASELINE], setting)
    for name, method in METHODS.items():
        step = step_seconds(method, setting)
        table.add_row(
            name,
            "x".join(map(str, shape_of(method, setting))),
            human_bytes(payload_bytes(method, setting)),
            human_seconds(exchange_seconds(method, setting)),
            human_seconds(step),
            f"{baseline / step:.2f}x" if step else "",
            bottleneck(method, setting),
        )
    Console().print(table)


def accelerated(d: float, n: int, rate: float, exchange: Topology = "direct") -> Setting:
    """Return a cluster of accelerators, assumed, not measured.

    3,000 tokens a worker at 200 TFLOP/s; 10 µs a message, 20 µs until one has come; local work 100
    times faster than on a core, as memory is; no copies by the host; 8 buckets.
    """
    compute = 6 * d * 3000 / 200e12
    few = {"latency": 2e-5, "message": 1e-5, "host": 0.0}
    return Setting(d, n, rate, compute, **few, speed=100, exchange=exchange)


RATES = (10**9, 10**10, 10**11, 4 * 10**11)
SIZES = (1e8, 1e9, 1e10, 1e11)
WORKERS = tuple(2**i for i in range(1, 13))


def draw(file: Path) -> None:
    """Draw speed-up over DDP float32 to 4,096 workers, 1e8 to 1e11 parameters, 1 to 400 Gbit/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 12), layout="constrained")
    axes = figure.subplots(len(SIZES), len(RATES), sharex=True, sharey=True)
    for panels, d in zip(axes, SIZES, strict=True):
        for axis, rate in zip(panels, RATES, strict=True):
            for name in ("dlion_mavo", "dlion_avg", "lion_cub_4"):
                color = None
                for exchange, line in (("direct", "-"), ("auto", ":")):
                    settings = [accelerated(d, n, rate, exchange) for n in WORKERS]
                    gains = [
                        step_seconds(METHODS[BASELINE], s) / step_seconds(METHODS[name], s)
                        for s in settings
                    ]
                    label = name if exchange == "direct" else f"{name}, grid"
                    (drawn,) = axis.plot(
                        WORKERS, gains, marker="o", ms=3, ls=line, label=label, color=color
                    )
                    color = drawn.get_color()
            axis.axhline(1, color="black", lw=0.8, ls=":")
            axis.set(xscale="log", yscale="log", title=f"d = {d:.0e}, {rate / 1e9:g} Gbit/s")
    gains = (1, 2, 5, 10, 20, 50, 100)
    axes[0][0].set_yticks(gains, labels=[f"{gain}x" for gain in gains])
    axes[0][0].minorticks_off()
    axes[-1][-1].legend(fontsize=8, loc="upper left", ncols=2)
    for axis in axes[-1]:
        axis.set_xlabel("workers")
    figure.suptitle(
        "predicted speed-up over DDP float32; assumed: 3,000 tokens a worker at 200 TFLOP/s,"
        " 10 µs a message, 20 µs until one has come, 8 buckets; dotted: on the best grid"
    )
    with whole_file(file) as part:
        figure.savefig(part, format=file.suffix.removeprefix("."), dpi=80)


def show_where_messages_count() -> None:
    """Print from how many workers on dlion_mavo waits for messages more than for bandwidth."""
    for exchange in ("direct", "auto"):
        for d in SIZES:
            words = []
            for rate in RATES:
                bound = [
                    bottleneck(METHODS["dlion_mavo"], accelerated(d, n, rate, exchange))
                    == "messages"
                    for n in WORKERS
                ]
                first = WORKERS[bound.index(True)] if any(bound) else "never"
                words.append(f"{rate / 1e9:g} Gbit/s: {first}")
            print(
                f"exchange={exchange}, d = {d:.0e}: dlion_mavo waits for messages from workers on,"
                f" at {', '.join(words)}"
            )


def existing(text: str) -> Path:
    """Parse the name of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return Path(text)


_LONGEST = 1e6  # seconds
# for each number of a Setting: how it is parsed, what is assumed where none is typed, its meaning
NUMBERS: dict[str, tuple[Callable[[str], float | None], str, str]] = {
    "parameters": (whole(1, 10**15), "1e9", "d, of the model"),
    "workers": (whole(1, 10**6), "8", "n, each on a link of its own"),
    "rate": (link, "1gbit", "of a worker's link each way, such as 10gbit, or loopback"),
    "compute": (number(0, _LONGEST), "1", "seconds of a step's forward and backward pass"),
    "latency": (number(0, _LONGEST), f"{Setting.latency:g}", "seconds until a message has come"),
    "message": (number(0, _LONGEST), f"{Setting.message:g}", "seconds of a core for a message"),
    "host": (number(0, 1), f"{Setting.host:g}", "seconds of a core for a byte"),
    "buckets": (whole(1, 10**4), str(Setting.buckets), "exchanges a step"),
    "speed": (number(1e-3, 1e6), "1", "of local work, 1 being an AMD EPYC's core"),
}


def main(arguments: list[str]) -> None:
    parser = make_parser(
        "predict", __doc__, "--parameters 1e9 --workers 64 --rate 10gbit --compute 0.5"
    )
    for name, (kind, default, meaning) in NUMBERS.items():
        shown = f"{meaning}; default: {default}"
        parser.add_argument(
            f"--{name}", type=kind, metavar="X", default=argparse.SUPPRESS, help=shown
        )
    parser.add_argument(
        "--exchange", choices=TOPOLOGIES, default="direct", help="as in train.py; default: direct"
    )
    parser.add_argument(
        "--check", type=existing, metavar="END_TO_END.json", help="compare with it instead"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=picture,
        metavar="FILE",
        help=f"draw curves for clusters of accelerators instead: a picture, {', '.join(PICTURES)}",
    )
    options = parser.parse_args(arguments)
    if options.output:
        show_where_messages_count()
        with output_file(options.output, Path("predict.png")) as file:
            draw(file)
    elif options.check:
        for model, rate, method, measured, predicted in compare(options.check):
            print(
                f"{model:11s} {show_rate(rate):>12s}  {method:28s}"
                f" measured {1e3 * measured:8.0f} ms  predicted {1e3 * predicted:8.0f} ms"
                f"  {predicted / measured - 1:+.0%}"
            )
    else:
        typed = {name: getattr(options, name) for name in NUMBERS if hasattr(options, name)}
        assumed = {name: NUMBERS[name] for name in NUMBERS if name not in typed}
        values = {name: kind(default) for name, (kind, default, _) in assumed.items()} | typed
        show(Setting(**values, exchange=options.exchange))
        if assumed:
            words = (f"--{name} {default}" for name, (_, default, _) in assumed.items())
            print(f"assumed, as nothing else was typed: {' '.join(words)}")
