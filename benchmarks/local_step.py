"""The local work of a step of distributed Lion, against what people use today.

    python benchmarks/local_step.py

Encode (momentum and packing), the vote of 8 workers over the slice this worker owns, decode and
apply; beside it torch's fused and foreach AdamW, lion-pytorch, and the memory floor of the passes
(``lerp_`` reads and writes the momentum and reads the gradient, ``mul_`` reads and writes the
parameters). Nothing travels here. Writes results/speed/local_step.{json,png}.
"""

import argparse

import matplotlib.pyplot as plt
import torch
from common import RESULTS, interleaved, machine, save, spread
from lion_pytorch import Lion

from dlion import kernels
from dlion.kernels import reference

VOTERS = 8
LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.99)


def cases(d: int) -> dict:
    """What is timed, for d parameters."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(d, generator=generator)
    words = -(-d // (64 * VOTERS))
    momentum, params = torch.zeros(d), torch.randn(d, generator=generator)
    others = torch.randint(-(2**62), 2**62, (VOTERS, 4, words), generator=generator)
    masks = torch.zeros(2, words, dtype=torch.int64)
    trits = torch.zeros(VOTERS, -(-64 * words // 5), dtype=torch.uint8)

    def optimizer(make):
        param = torch.nn.Parameter(params.clone())
        param.grad = grad
        return make([param]).step

    def mavo(module):
        out = torch.zeros(VOTERS, 1, words, dtype=torch.int64)

        def step():
            module.encode_signs(out, 0, momentum, grad, *BETAS, True)
            module.compare_sum(others[:, :1], 1, VOTERS // 2, *masks)
            module.apply_signs(params, out.squeeze(1), LR, DECAY)

        return step

    def avg():
        out = torch.zeros(VOTERS, 1, words, dtype=torch.int64)
        total = torch.zeros(VOTERS.bit_length(), words, dtype=torch.int64)

        def step():
            kernels.encode_signs(out, 0, momentum, grad, *BETAS, True)
            kernels.sum_planes(others[:, :1], 1, total)
            kernels.apply_levels(params, others, VOTERS, LR, DECAY)

        return step

    def cub(bits):
        out = torch.zeros(VOTERS, bits, words, dtype=torch.int64)
        largest = 2 ** (bits - 1) - 1

        def step():
            unit = kernels.measure(momentum, grad, BETAS[0], "l1")
            factor = largest / 2 / unit
            kernels.encode_levels(out, 0, momentum, grad, *BETAS, factor, largest)
            kernels.compare_sum(others[:, :bits], 2 * largest, VOTERS * largest, *masks)
            kernels.pack_votes(*masks, trits[0])
            kernels.apply_trits(params, trits, 64 * words, LR, DECAY)

        return step

    return {
        "lerp_ (floor)": lambda: momentum.lerp_(grad, 0.01),
        "mul_ (floor)": lambda: params.mul_(1 - LR * DECAY),
        "copy_": lambda: momentum.copy_(grad),
        "AdamW, fused": optimizer(lambda p: torch.optim.AdamW(p, lr=LR, fused=True)),
        "AdamW, foreach": optimizer(lambda p: torch.optim.AdamW(p, lr=LR, foreach=True)),
        "lion-pytorch": optimizer(lambda p: Lion(p, lr=LR, weight_decay=DECAY)),
        "dlion_mavo": mavo(kernels),
        "dlion_mavo, plain torch": mavo(reference),
        "dlion_avg": avg(),
        "lion_cub, 2 bits": cub(2),
        "lion_cub, 4 bits": cub(4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    points = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for d in map(int, args.sizes):
            rounds = args.rounds if d > 5e6 else 5 * args.rounds
            seconds = interleaved(cases(d), rounds)
            floor = [
                a + b
                for a, b in zip(seconds["lerp_ (floor)"], seconds["mul_ (floor)"], strict=True)
            ]
            adamw = seconds["AdamW, fused"]
            for name, values in seconds.items():
                points.append(
                    {
                        "threads": threads,
                        "d": d,
                        "case": name,
                        "ns_per_parameter": spread([1e9 * v / d for v in values]),
                        "over_fused_adamw": spread(
                            [v / a for v, a in zip(values, adamw, strict=True)]
                        ),
                        "over_floor": spread([v / f for v, f in zip(values, floor, strict=True)]),
                    }
                )
                p = points[-1]
                print(
                    f"{threads} threads  d={d:.0e}  {name:24s}"
                    f" {p['ns_per_parameter']['median']:7.3f} ns"
                    f"  {p['over_fused_adamw']['median']:6.2f} x AdamW"
                    f"  {p['over_floor']['median']:6.2f} x floor",
                    flush=True,
                )
    save("local_step", {**machine(), "voters": VOTERS, "points": points})
    draw(points)


def draw(points: list[dict]) -> None:
    """Bars for one thread, one panel a size."""
    sizes = sorted({p["d"] for p in points})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4), sharey=True)
    for axis, d in zip(axes if len(sizes) > 1 else [axes], sizes, strict=True):
        chosen = [p for p in points if p["d"] == d and p["threads"] == 1]
        values = [p["ns_per_parameter"]["median"] for p in chosen]
        ours = [
            "tab:blue" if "_" in p["case"] and "(" not in p["case"] else "tab:gray" for p in chosen
        ]
        axis.barh([p["case"] for p in chosen], values, color=ours)
        axis.set_xscale("log")
        axis.set_title(f"d = {d:.0e}, one thread")
        axis.set_xlabel("ns per parameter")
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.2f}", va="center", fontsize=8)
        axis.margins(x=0.25)
    axes[0].invert_yaxis() if len(sizes) > 1 else axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / "local_step.png", dpi=110)


if __name__ == "__main__":
    main()
