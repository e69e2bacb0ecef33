"""Whole training steps on a slow network: DistributedDataParallel and its hooks against ours.

    sudo .venv/bin/python benchmarks/end_to_end.py

4 workers on this machine, each with a network namespace and a link of 10, 100 or 1000 Mbit/s (and
plain loopback); a step is forward, backward, exchange and update, timed from barrier to barrier.
All methods are timed in every round, in a new random order, beside a step without exchange and
update (``compute``), which bounds what any method can reach.

The settings are fixed here: batches such that at 100 Mbit/s compute is below a sixth of DDP
float32's step, the regime the Lion Cub paper is about, and ``vit_cifar_2``, where compute is about
as long as messages of one bit take on the wire, so that overlap has the most to hide. Writes
end_to_end.json and end_to_end.png. ``--study buckets`` compares sizes of buckets, no overlap, and
messages that leave at once or one by one, instead, and writes buckets.json and buckets.png;
``--study workers`` compares DDP and ours over 2, 4 and 8 workers, which share the cores of this
machine, and writes workers.json and workers.png.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from common import Parser, Points, Row, ratios, run, spread
from matplotlib.figure import Figure
from spmd import Measured, time_together
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dlion import optim
from dlion.suite.arguments import link, whole
from dlion.suite.compare.style import log_ticks
from dlion.suite.data import ImageData, TextData
from dlion.suite.models import gpt2, vit
from dlion.suite.units import show_rate
from dlion.workers import Workers

N, LR = 4, 1e-4
BUCKET_CAP_MB = 5
REFERENCE = "DDP float32 Lion"  # which speed-ups are over
SLOW = 50_000_000  # bits per second, below which rounds take minutes
Setting = tuple[torch.nn.Module, torch.Tensor, torch.Tensor]
Step = Callable[[], object]


def make_vit(images: int, dim: int = 512, depth: int = 6) -> Setting:
    """Return the CIFAR-10 model of arXiv 2404.00438, and a batch for a worker."""
    blank = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    data = ImageData(blank, torch.zeros(1).long(), blank, torch.zeros(1).long(), 10)
    model = vit(data, dim=dim, depth=depth, heads=8, mlp_dim=dim, patch_size=4, dropout=0.0)
    return model, torch.randn(images, 3, 32, 32), torch.randint(10, (images,))


def make_gpt2() -> Setting:
    """Return GPT-2 of 21 million parameters, and 4 sequences of 64 tokens for a worker."""
    tokens = torch.zeros(100, dtype=torch.int32)
    data = TextData(tokens, tokens, vocabulary=8192, context=64)
    model = gpt2(data, n_embd=384, n_layer=10, n_head=6, dropout=0.0)
    return model, torch.randint(8192, (4, 64)), torch.randint(8192, (4, 64))


SETTINGS = {
    "vit_cifar": lambda: make_vit(6),
    "gpt2": make_gpt2,
    "vit_cifar_2": lambda: make_vit(2),
    "tiny": lambda: make_vit(1, dim=32, depth=1),
}


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what torch's bf16_compress_hook does; the stock one refuses gloo."""
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(half, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def make_cases(setting: str, study: str, slow: bool) -> dict[str, Step]:
    """Return a step of every method, or bucket size, with a model and an optimizer of its own."""
    warnings.filterwarnings("ignore")

    def build() -> Setting:
        torch.manual_seed(0)
        return SETTINGS[setting]()

    def step_of(model, x, y, optimizer) -> Step:
        def step() -> None:
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        return step

    def forward() -> Step:
        model, x, y = build()
        return lambda: F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def ddp(make_optimizer, hook=None, **options) -> Step:
        model, x, y = build()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        if hook is not None:
            model.register_comm_hook(*hook)
        return step_of(model, x, y, make_optimizer(model.parameters()))

    def ours(cls, slow: bool | None = None, **options) -> Step:
        """``slow``: what it is to think of the links; None: what it has found out."""
        model, x, y = build()
        options = {"overlap": True, "bucket_cap_mb": BUCKET_CAP_MB, **options}
        optimizer = cls(model.parameters(), lr=LR, **options)
        step = step_of(model, x, y, optimizer)

        def step_as_told() -> None:
            for transport in optimizer.channel.transports.values():
                transport.slow = slow
            step()

        return step if slow is None else step_as_told

    def adamw(params):
        return torch.optim.AdamW(params, lr=LR, fused=True)

    def lion(params):
        from lion_pytorch import Lion

        return Lion(params, lr=LR)

    bounds = {"forward": forward(), "compute": step_of(*build(), None)}
    if study == "buckets":
        sizes = {f"{cap} MB": {"bucket_cap_mb": cap} for cap in (2, 5, 10, 25)}
        sizes |= {"one bucket": {"bucket_cap_mb": None}, "no overlap": {"overlap": False}}
        sizes |= {"5 MB, at once": {"slow": False}, "5 MB, one by one": {"slow": True}}
        return bounds | {
            REFERENCE: ddp(lion),
            **{f"dlion_mavo, {name}": ours(optim.DLion, **how) for name, how in sizes.items()},
        }
    if study == "workers":
        return bounds | {
            "DDP float32 AdamW": ddp(adamw),
            REFERENCE: ddp(lion),
            "dlion_mavo": ours(optim.DLion),
            "lion_cub 4 bits": ours(optim.LionCub, bits=4),
        }
    power = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=True
    )
    if not slow:  # DDP sends the same for AdamW as for Lion
        bounds["DDP float32 AdamW"] = ddp(adamw)
    return bounds | {
        REFERENCE: ddp(lion),
        "DDP bf16 hook": ddp(lion, (None, bf16_hook)),
        # one bucket: over gloo, the chained collectives of several can be issued in another order
        # on another process, which aborts the run
        "DDP PowerSGD 2": ddp(lion, (power, powerSGD_hook.powerSGD_hook), bucket_cap_mb=1000),
        "g_lion": ours(optim.GLion),
        "g_lion, one bucket": ours(optim.GLion, bucket_cap_mb=None),
        "dlion_mavo": ours(optim.DLion),
        "dlion_avg": ours(optim.DLion, aggregation="avg"),
        "lion_cub 1 bit": ours(optim.LionCub, bits=1, ties="previous"),
        "lion_cub 2 bits": ours(optim.LionCub, bits=2),
        "lion_cub 4 bits": ours(optim.LionCub, bits=4),
        "dgc": ours(optim.DGC, density=0.001),
        "dgc, one bucket": ours(optim.DGC, density=0.001, bucket_cap_mb=None),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, beside="lion_pytorch")
    whole_models = [name for name in SETTINGS if name != "tiny"]
    parser.add_argument("--models", nargs="+", default=whole_models, choices=SETTINGS)
    parser.add_argument(
        "--rates",
        type=link,
        nargs="+",
        default=[10**8, 10**9, None, 10**7],
        help="of the links: 100mbit, 1gbit, ... or loopback",
    )
    parser.add_argument("--rounds", type=whole(2), default=5)
    parser.add_argument("--slow-rounds", type=whole(2), default=2, help="below 50 Mbit/s")
    parser.add_argument("--study", default="methods", choices=["methods", "buckets", "workers"])
    parser.add_argument(
        "--workers",
        type=whole(2),
        nargs="+",
        default=[2, 4, 8],
        help="with --study workers",
    )
    args = parser.read(
        arguments, models=["tiny"], rates=[10**9], rounds=2, slow_rounds=2, workers=[2]
    )
    parser.check_links(args)
    return args


def main(args: argparse.Namespace) -> None:
    name = "end_to_end" if args.study == "methods" else args.study
    scales = args.study == "workers"
    points = Points(
        args.output / f"{name}.json",
        {**({} if scales else {"workers": N}), "bucket_cap_mb": BUCKET_CAP_MB},
        {"rounds": args.rounds, "slow_rounds": args.slow_rounds},
        args.fresh,
    )
    keys = [{"model": model, "rate": rate} for model in args.models for rate in args.rates]
    if scales:
        keys = [{**key, "workers": n} for key in keys for n in args.workers]
    for key in points.missing(keys, cost=lambda key: 1 + 2e8 / (key["rate"] or 1e12)):
        model, rate = key["model"], key["rate"]
        slow = rate is not None and rate < SLOW
        measured = time_together(
            *(key.get("workers", N), rate, make_cases, model, args.study, slow),
            rounds=args.slow_rounds if slow else args.rounds,
            warmups=3,  # PowerSGD starts in its third step
        )
        rows = evaluate(measured, bucket_sizes(model), rate)
        points.add(key, rows)
        for row in rows:
            show(row, **key)
    figure = draw_over_workers(points.rows) if scales else draw(points.rows)
    figure.savefig(args.output / f"{name}.png", dpi=110)


def bucket_sizes(model: str) -> list[int]:
    """Return the number of parameters in each bucket of our optimizers."""
    params = SETTINGS[model]()[0].parameters()
    optimizer = optim.DLion(params, workers=Workers(local=N), bucket_cap_mb=BUCKET_CAP_MB)
    return [sum(slot.tensor.numel() for slot in b.slots) for b in optimizer.buckets]


def evaluate(measured: Measured, buckets: list[int], rate: int | None) -> list[Row]:
    """Return one row a method, with its bounds.

    ``over_bound``: over the longer of computing and sending, which no step can beat;
    ``over_causal``: the same, knowing that no gradient leaves before the forward pass is over.
    """
    forward = spread(measured["forward"]["seconds"])["median"]
    compute = spread(measured["compute"]["seconds"])["median"]
    rows = []
    for method, values in measured.items():
        if method == "forward":
            continue
        nic_bytes = spread(values["nic_bytes"])["median"]
        wire = 8 * nic_bytes / rate if rate else 0.0
        seconds = spread(values["seconds"])
        rows.append(
            {
                "d": sum(buckets),
                "buckets": [size / sum(buckets) for size in buckets],
                "method": method,
                "seconds": seconds,
                "forward_seconds": forward,
                "compute_seconds": compute,
                "nic_bytes": nic_bytes if rate else None,
                "wire_seconds": wire,
                "over_bound": seconds["median"] / max(compute, wire),
                "over_causal": seconds["median"] / max(compute, forward + wire),
                "speedup": ratios(measured[REFERENCE]["seconds"], values["seconds"]),
            }
        )
    return rows


def show(row: Row, model: str, rate: int | None, workers: int = N) -> None:
    """Print a row."""
    seconds = row["seconds"]
    print(
        f"{model:11s} {workers} workers {show_rate(rate):>12s}  {row['method']:22s}"
        f" {1e3 * seconds['median']:8.0f} ms"
        f" ({1e3 * seconds['low']:.0f} to {1e3 * seconds['high']:.0f})"
        f"  {row['speedup']['median']:6.2f} x DDP Lion  {(row['nic_bytes'] or 0) / 1e6:7.2f} MB"
        f"  wire {1e3 * row['wire_seconds']:6.0f} ms"
        f"  {row['over_bound']:5.2f} x max(compute, wire)"
        f"  {row['over_causal']:5.2f} x max(compute, forward + wire)",
        flush=True,
    )


def draw(rows: list[Row]) -> Figure:
    """Draw step times, a panel for each model and rate, the compute bound as a line.

    They are points, as the axis is logarithmic: a bar's length would mean nothing.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: rate or 1e12)
    figure = Figure(figsize=(max(5.5, 4.4 * len(rates)), 3.6 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), len(rates), squeeze=False)
    for panels, model in zip(axes, models, strict=True):
        for axis, rate in zip(panels, rates, strict=True):
            chosen = [row for row in rows if (row["model"], row["rate"]) == (model, rate)]
            if not chosen:
                axis.axis("off")
                continue
            times = [1e3 * row["seconds"]["median"] for row in chosen]
            compute = 1e3 * chosen[0]["compute_seconds"]
            colours = ["tab:gray" if "DDP" in row["method"] else "tab:blue" for row in chosen]
            axis.scatter(times, [row["method"] for row in chosen], color=colours, s=30)
            axis.axvline(compute, color="black", linestyle=":", linewidth=1)
            axis.set_title(f"{model}, {show_rate(rate)}")
            for height, value in enumerate(times):
                axis.text(value, height, f"   {value:,.0f}", va="center", fontsize=8)
            axis.set_xscale("log")
            low = 0.7 * min(*times, compute)
            high = max(times) * (max(times) / low) ** 0.4  # room for the last number
            ticks = [tick for tick in log_ticks([low, high]) if low < tick < high]
            axis.set_xticks(ticks, labels=[f"{tick:,.10g}" for tick in ticks], fontsize=7)
            axis.minorticks_off()
            axis.set_xlim(low, high)
            axis.grid(alpha=0.3)
            axis.invert_yaxis()
    figure.supxlabel("ms a step, logarithmic (dotted: compute alone)", fontsize=10)
    return figure


def draw_over_workers(rows: list[Row]) -> Figure:
    """Draw speed-ups against the number of workers, a panel for each model and rate."""
    panels = list(dict.fromkeys((row["model"], row["rate"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(1.5 + 4.4 * len(panels), 3.8), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for method in methods:
            of = [r for r in rows if (r["model"], r["rate"]) == panel and r["method"] == method]
            of.sort(key=lambda row: row["workers"])
            workers = [row["workers"] for row in of]
            middle, low, high = (
                [row["speedup"][name] for row in of] for name in ("median", "low", "high")
            )
            look = {"color": "black", "linestyle": ":"} if method == "compute" else {"marker": "o"}
            (line,) = axis.plot(workers, middle, ms=4, label=method, **look)
            axis.fill_between(workers, low, high, color=line.get_color(), alpha=0.2, lw=0)
        axis.set(title=f"{panel[0]}, {show_rate(panel[1])}", xlabel="workers", yscale="log")
        axis.set_xticks(workers)
        axis.grid(alpha=0.3)
    figure.supylabel(f"times as fast as {REFERENCE}", fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


if __name__ == "__main__":
    run(main, parse())
