"""Whole training steps on a slow network: DistributedDataParallel and its hooks against ours.

    sudo .venv/bin/python benchmarks/end_to_end.py

4 workers on this machine, each with a network namespace and a link of 10, 100 or 1000 Mbit/s (and
plain loopback); a step is forward, backward, exchange and update, timed from barrier to barrier.
All methods take part in every round, in a new random order, beside a step without exchange and
update (``compute``), which bounds what any method can reach.

The settings are fixed here: batches such that at 100 Mbit/s compute is below a sixth of DDP
float32's step, the regime the Lion Cub paper is about, and ``vit_cifar_2``, where compute is about
as long as messages of one bit take on the wire, so that overlap has the most to hide. Writes
results/speed/end_to_end.{json,png}. ``--study buckets`` compares sizes of buckets, and no overlap,
instead.
"""

import argparse
import json
import warnings
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from common import RESULTS, machine, save, spread
from lion_pytorch import Lion
from spmd import run
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dlion import optim
from dlion.data import ImageData, TextData
from dlion.models import gpt2, vit
from dlion.workers import Workers

N, LR = 4, 1e-4
BUCKET_CAP_MB = 5
Setting = tuple[torch.nn.Module, torch.Tensor, torch.Tensor]


def make_vit(images: int) -> Setting:
    """The CIFAR-10 model of arXiv 2404.00438, and a batch for a worker."""
    blank = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    data = ImageData(blank, torch.zeros(1).long(), blank, torch.zeros(1).long(), 10)
    model = vit(data, dim=512, depth=6, heads=8, mlp_dim=512, patch_size=4, dropout=0.0)
    return model, torch.randn(images, 3, 32, 32), torch.randint(10, (images,))


def make_gpt2() -> Setting:
    """GPT-2 from transformers, 21 million parameters, and 4 sequences of 64 tokens a worker."""
    tokens = torch.zeros(100, dtype=torch.int32)
    data = TextData(tokens, tokens, vocabulary=8192, context=64)
    model = gpt2(data, n_embd=384, n_layer=10, n_head=6, dropout=0.0)
    return model, torch.randint(8192, (4, 64)), torch.randint(8192, (4, 64))


SETTINGS = {
    "vit_cifar": lambda: make_vit(6),
    "gpt2": make_gpt2,
    "vit_cifar_2": lambda: make_vit(2),
}


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What torch's bf16_compress_hook does; the stock one refuses gloo."""
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(half, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def make_cases(setting: str, study: str, slow: bool) -> dict[str, Callable[[], None]]:
    """Every method, or bucket size, with a model and an optimizer of its own."""
    warnings.filterwarnings("ignore")

    def build() -> Setting:
        torch.manual_seed(0)
        return SETTINGS[setting]()

    def step_of(model, x, y, optimizer) -> Callable[[], None]:
        def step() -> None:
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        return step

    def forward() -> Callable[[], None]:
        model, x, y = build()
        return lambda: F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def ddp(make_optimizer, hook=None, **options) -> Callable[[], None]:
        model, x, y = build()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        if hook is not None:
            model.register_comm_hook(*hook)
        return step_of(model, x, y, make_optimizer(model.parameters()))

    def ours(cls, **options) -> Callable[[], None]:
        model, x, y = build()
        options = {"overlap": True, "bucket_cap_mb": BUCKET_CAP_MB, **options}
        return step_of(model, x, y, cls(model.parameters(), lr=LR, **options))

    def adamw(params):
        return torch.optim.AdamW(params, lr=LR, fused=True)

    def lion(params):
        return Lion(params, lr=LR)

    bounds = {"forward": forward(), "compute": step_of(*build(), None)}
    if study == "buckets":
        sizes = {f"{cap} MB": {"bucket_cap_mb": cap} for cap in (2, 5, 10, 25)}
        sizes |= {"one bucket": {"bucket_cap_mb": None}, "no overlap": {"overlap": False}}
        return bounds | {
            "DDP float32 Lion": ddp(lion),
            **{f"dlion_mavo, {name}": ours(optim.DLion, **how) for name, how in sizes.items()},
        }
    power = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=True
    )
    if not slow:  # it sends what Lion sends
        bounds["DDP float32 AdamW"] = ddp(adamw)
    return bounds | {
        "DDP float32 Lion": ddp(lion),
        "DDP bf16 hook": ddp(lion, (None, bf16_hook)),
        # one bucket: over gloo, the chained collectives of several can be issued in another order
        # on another process, which aborts the run
        "DDP PowerSGD 2": ddp(lion, (power, powerSGD_hook.powerSGD_hook), bucket_cap_mb=1000),
        "g_lion": ours(optim.GLion),
        "dlion_mavo": ours(optim.DLion),
        "dlion_avg": ours(optim.DLion, aggregation="avg"),
        "lion_cub 1 bit": ours(optim.LionCub, bits=1, ties="previous"),
        "lion_cub 2 bits": ours(optim.LionCub, bits=2),
        "lion_cub 4 bits": ours(optim.LionCub, bits=4),
        "dgc": ours(optim.DGC, density=0.001),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9, 0, 1e7])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--study", default="methods", choices=["methods", "buckets"])
    parser.add_argument("--slow-rounds", type=int, default=2, help="below 50 Mbit/s")
    parser.add_argument("--add", action="store_true", help="to the points of an earlier run")
    args = parser.parse_args()
    study = "end_to_end" if args.study == "methods" else args.study
    points = earlier(study) if args.add else []
    for name in args.models:
        buckets = buckets_of(name)
        for rate in map(int, args.rates):
            slow = 0 < rate < 5e7
            found = run(
                *(N, rate or None, make_cases, name, args.study, slow),
                rounds=args.slow_rounds if slow else args.rounds,
                warmups=3,  # PowerSGD starts in its third step
            )
            points = [p for p in points if (p["model"], p["rate"]) != (name, rate or None)]
            points += evaluate(found, name, buckets, rate)
            save(
                study, {**machine(), "workers": N, "bucket_cap_mb": BUCKET_CAP_MB, "points": points}
            )
    draw(points, study)


def buckets_of(name: str) -> list[int]:
    """Parameters in each bucket of ours."""
    model = SETTINGS[name]()[0]
    workers = Workers(local=N)
    optimizer = optim.DLion(model.parameters(), workers=workers, bucket_cap_mb=BUCKET_CAP_MB)
    return [sum(t.numel() for t in bucket.tensors) for bucket in optimizer.buckets]


def earlier(study: str) -> list[dict]:
    """The points measured before."""
    return json.loads((RESULTS / f"{study}.json").read_text())["points"]


def evaluate(found: dict, name: str, buckets: list[int], rate: int) -> list[dict]:
    """One point a method, with its bounds.

    ``bound``: no step is shorter than what it computes, nor than what it sends takes on the wire;
    ``causal``: nor does a gradient leave before the forward pass is over.
    """
    forward = spread(found.pop("forward")["seconds"])["median"]
    compute = spread(found["compute"]["seconds"])["median"]
    lion = found["DDP float32 Lion"]["seconds"]
    points = []
    for method, values in found.items():
        nic = spread(values["nic_bytes"])["median"]
        wire = 8 * nic / rate if rate else 0.0
        seconds = spread(values["seconds"])
        point = {
            "model": name,
            "d": sum(buckets),
            "buckets": [size / sum(buckets) for size in buckets],
            "rate": rate or None,
            "commit": machine()["commit"],
            "method": method,
            "seconds": seconds,
            "forward_seconds": forward,
            "compute_seconds": compute,
            "nic_bytes": nic if rate else None,
            "wire_seconds": wire,
            "over_bound": seconds["median"] / max(compute, wire),
            "over_causal": seconds["median"] / max(compute, forward + wire),
            "speedup": spread([a / b for a, b in zip(lion, values["seconds"], strict=True)]),
        }
        points.append(point)
        print(
            f"{name:11s} {rate / 1e6:5.0f} Mbit/s  {method:22s} {1e3 * seconds['median']:8.0f} ms"
            f" ({1e3 * seconds['low']:.0f} to {1e3 * seconds['high']:.0f})"
            f"  {point['speedup']['median']:6.2f} x DDP Lion  {nic / 1e6:7.2f} MB"
            f"  wire {1e3 * wire:6.0f} ms  {point['over_bound']:5.2f} x max(compute, wire)"
            f"  {point['over_causal']:5.2f} x max(compute, forward + wire)",
            flush=True,
        )
    return points


def draw(points: list[dict], study: str) -> None:
    """Step times, a panel for each model and rate, the compute bound as a line."""
    models = list(dict.fromkeys(p["model"] for p in points))
    rates = sorted({p["rate"] for p in points}, key=lambda rate: rate or 1e12)
    figure, axes = plt.subplots(
        len(models), len(rates), figsize=(4.4 * len(rates), 3.6 * len(models)), squeeze=False
    )
    for row, model in zip(axes, models, strict=True):
        for axis, rate in zip(row, rates, strict=True):
            chosen = [p for p in points if p["model"] == model and p["rate"] == rate]
            if not chosen:
                axis.axis("off")
                continue
            seconds = [p["seconds"]["median"] for p in chosen]
            colours = ["tab:gray" if "DDP" in p["method"] else "tab:blue" for p in chosen]
            axis.barh([p["method"] for p in chosen], seconds, color=colours)
            axis.axvline(chosen[0]["compute_seconds"], color="black", linestyle=":", linewidth=1)
            axis.set_title(f"{model}, {rate / 1e6:g} Mbit/s" if rate else f"{model}, loopback")
            for place, value in enumerate(seconds):
                axis.text(value, place, f" {1e3 * value:.0f} ms", va="center", fontsize=8)
            axis.set_xlabel("step, logarithmic (dotted: compute alone)")
            axis.set_xscale("log")
            axis.margins(x=0.35)
            axis.set_xticks([])
            axis.minorticks_off()
            axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / f"{study}.png", dpi=110)


if __name__ == "__main__":
    main()
