"""The local work of a step of distributed Lion, against what people use today.

    python benchmarks/local_step.py

Encode (momentum and packing), the vote of 8 workers over the slice this worker owns, decode and
apply; beside it torch's fused and foreach AdamW, lion-pytorch, and the memory floor of the passes
(``lerp_`` reads and writes the momentum and reads the gradient, ``mul_`` reads and writes the
parameters). Nothing travels here. Writes local_step.json and local_step.png.

Then Newton-Schulz on the hidden matrices of three models, and on 16 small square ones, in batches
and one by one, beside a forward and backward pass of a worker: newton_schulz.json. ``--models``
alone: only that.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from common import Parser, Points, Row, interleaved, ratios, run, spread

from dlion import kernels
from dlion.kernels import reference
from dlion.methods.groups import MATRIX, param_groups
from dlion.methods.muon import NewtonSchulz, orthogonalise
from dlion.suite.arguments import whole

if TYPE_CHECKING:
    from end_to_end import Setting  # accelerator.py takes cases from here without the suite
    from matplotlib.figure import Figure

VOTERS = 8
LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.99)
OURS = ("dlion", "lion_cub")


def make_cases(d: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, for d parameters on torch's default device.

    lion-pytorch is among it only where it is installed.
    """
    on_gpu = torch.get_default_device().type == "cuda"
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    grad = torch.randn(d, generator=generator)
    grads = kernels.Gradients.of(grad)
    words = -(-d // (64 * VOTERS))
    momentum, params = torch.zeros(d), torch.randn(d, generator=generator)
    others = torch.randint(-(2**62), 2**62, (VOTERS, 4, words), generator=generator)
    masks = torch.zeros(2, words, dtype=torch.int64)
    trits = torch.zeros(VOTERS, -(-64 * words // 5), dtype=torch.uint8)

    def adamw(dtype=torch.float32, **how):
        param = torch.nn.Parameter(params.to(dtype, copy=True))
        param.grad = grad.to(dtype)
        return torch.optim.AdamW([param], lr=LR, **how).step

    def lion():
        from lion_pytorch import Lion

        param = torch.nn.Parameter(params.clone())
        param.grad = grad
        return Lion([param], lr=LR, weight_decay=DECAY).step

    def mavo(module, dtype=torch.float32):
        out = torch.zeros(VOTERS, 1, words, dtype=torch.int64)
        moved, new = params.to(dtype), kernels.Gradients.of(grad.to(dtype))

        def step():
            module.encode_signs(out, momentum, new, *BETAS, True)
            module.compare_sum(others[:, :1], 1, VOTERS // 2, *masks)
            module.apply_signs(moved, out.squeeze(1), LR, DECAY)

        return step

    def avg():
        out = torch.zeros(VOTERS, 1, words, dtype=torch.int64)
        total = torch.zeros(VOTERS.bit_length(), words, dtype=torch.int64)

        def step():
            kernels.encode_signs(out, momentum, grads, *BETAS, True)
            kernels.sum_planes(others[:, :1], 1, total)
            kernels.apply_levels(params, others, VOTERS, LR, DECAY)

        return step

    def adm():
        def coder(estimates, *shape):
            level = torch.full(shape, 64, dtype=torch.uint8)
            history = torch.zeros(*shape[:-1], 2, shape[-1] // 64, dtype=torch.int64)
            return kernels.Coder(torch.zeros(estimates), level, history)

        out, rows = torch.zeros(VOTERS, 1, words, dtype=torch.int64), torch.arange(VOTERS)
        sent = coder((VOTERS * 64 * words,), VOTERS * 64 * words)
        owned = coder((1, 64 * words), VOTERS, 64 * words)

        def step():
            kernels.encode_deltas(out, momentum, grads, sent, *BETAS, 2)
            kernels.decode_deltas(others[:, :1], rows, owned, None, 2, 1.0, *masks)
            kernels.apply_signs(params, out.squeeze(1), LR, DECAY)

        return step

    def cub(bits):
        out = torch.zeros(VOTERS, bits, words, dtype=torch.int64)
        largest = 2 ** (bits - 1) - 1

        def step():
            unit = kernels.measure(momentum, grads, BETAS[0], "l1")
            factor = largest / 2 / unit
            kernels.encode_levels(out, momentum, grads, *BETAS, factor, largest)
            kernels.compare_sum(others[:, :bits], 2 * largest, VOTERS * largest, *masks)
            kernels.pack_votes(*masks, trits[0])
            kernels.apply_trits(params, trits, 64 * words, LR, DECAY)

        return step

    beside = {"lion-pytorch": lion()} if importlib.util.find_spec("lion_pytorch") else {}
    return {
        "lerp_ (floor)": lambda: momentum.lerp_(grad, 0.01),
        "mul_ (floor)": lambda: params.mul_(1 - LR * DECAY),
        "copy_": lambda: momentum.copy_(grad),
        "AdamW, fused": adamw(fused=True, capturable=on_gpu),
        "AdamW, fused, bfloat16": adamw(torch.bfloat16, fused=True, capturable=on_gpu),
        "AdamW, foreach": adamw(foreach=True),
        **beside,
        "dlion_mavo": mavo(kernels),
        "dlion_mavo, bfloat16": mavo(kernels, torch.bfloat16),
        "dlion_mavo, plain torch": mavo(reference),
        "dlion_avg": avg(),
        "dlion_adm": adm(),
        "lion_cub, 2 bits": cub(2),
        "lion_cub, 4 bits": cub(4),
    }


def board_gpt() -> "Setting":
    """Return the board's GPT and 8 stretches of 64 bytes for a worker."""
    from dlion.suite.data import TextData
    from dlion.suite.models import gpt

    tokens = torch.zeros(100, dtype=torch.uint8)
    model = gpt(TextData(tokens, tokens, vocabulary=256, context=64), dim=128, mlp_dim=640)
    return model, torch.randint(256, (8, 64)), torch.randint(256, (8, 64))


def linear_layers(width: int) -> "Setting":
    """Return 16 layers without biases, and 8 samples."""
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(16)]
    return torch.nn.Sequential(*layers), torch.randn(8, 1, width), torch.randint(width, (8, 1))


WIDTHS = {f"{width} x {width}": width for width in (16, 32, 64, 128)}
MODELS = ["gpt_tiny", "vit_cifar", "gpt2", *WIDTHS]  # vit_cifar and gpt2 are of end_to_end.py


def make_model(name: str) -> "Setting":
    """Return a model and a batch of a worker."""
    from end_to_end import SETTINGS

    if name in WIDTHS:
        return linear_layers(WIDTHS[name])
    return board_gpt() if name == "gpt_tiny" else SETTINGS[name]()


def newton_schulz_cases(setting: "Setting") -> dict[str, Callable[[], object]]:
    """Return a pass of a worker, and Newton-Schulz on all hidden matrices of its model."""
    model, inputs, targets = setting
    hidden = [found for found in param_groups(model).found if found.role == MATRIX]
    matrices = [found.tensor.detach().flatten(1) for found in hidden]

    def forward_backward():
        model.zero_grad()
        outputs = model(inputs).flatten(0, -2)
        torch.nn.functional.cross_entropy(outputs, targets.flatten()).backward()

    def batched(precision):
        return lambda: orthogonalise(matrices, NewtonSchulz(5, precision))

    def one_by_one(precision):
        return lambda: [orthogonalise([matrix], NewtonSchulz(5, precision)) for matrix in matrices]

    cases: dict[str, Callable[[], object]] = {"forward, backward": forward_backward}
    for precision in ("bf16", "float32"):
        cases[f"{precision}, batched"] = batched(precision)
        cases[f"{precision}, one by one"] = one_by_one(precision)
    return cases


def measure_newton_schulz(args: argparse.Namespace) -> None:
    """Time Newton-Schulz as a share of a step: itself and the pass of a worker."""
    points = Points(args.output / "newton_schulz.json", {}, {"rounds": args.rounds}, args.fresh)
    models = args.models or MODELS
    keys = [{"threads": t, "model": model} for t in args.threads for model in models]
    for key in points.missing(keys):
        torch.set_num_threads(key["threads"])
        seconds = interleaved(newton_schulz_cases(make_model(key["model"])), args.rounds)
        alone = seconds["forward, backward"]
        rows = []
        for name, values in seconds.items():
            shares = [a / (a + b) for a, b in zip(values, alone, strict=True)]
            share = {} if values is alone else {"share_of_step": spread(shares)}
            rows.append({"case": name, "ms": spread([1e3 * v for v in values]), **share})
            shown = f"{share['share_of_step']['median']:7.0%} of a step" if share else ""
            print(
                f"{key['threads']} threads  {key['model']:10s} {name:20s}"
                f" {rows[-1]['ms']['median']:9.2f} ms {shown}",
                flush=True,
            )
        points.add(key, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, beside="lion_pytorch")
    parser.add_argument("--sizes", type=whole(1), nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--models", choices=MODELS, nargs="+", help="Newton-Schulz of these only")
    parser.add_argument("--threads", type=whole(1), nargs="+", default=[1, 2])
    parser.add_argument(
        "--rounds", type=whole(2), default=9, help="five times as many below 5e6 parameters"
    )
    return parser.read(arguments, sizes=[10_000], threads=[1], rounds=2, models=["gpt_tiny"])


def main(args: argparse.Namespace) -> None:
    if args.models is None or args.smoke:
        measure_passes(args)
    measure_newton_schulz(args)


def measure_passes(args: argparse.Namespace) -> None:
    """Time the passes of a step over vectors."""
    points = Points(
        args.output / "local_step.json", {"voters": VOTERS}, {"rounds": args.rounds}, args.fresh
    )
    keys = [{"threads": threads, "d": d} for threads in args.threads for d in args.sizes]
    for key in points.missing(keys, cost=lambda key: max(key["d"], 10**6)):
        torch.set_num_threads(key["threads"])
        rounds = args.rounds if key["d"] > 5e6 else 5 * args.rounds
        rows = evaluate(interleaved(make_cases(key["d"]), rounds), key["d"])
        points.add(key, rows)
        for row in rows:
            print(
                f"{key['threads']} threads  d={key['d']:.0e}  {row['case']:24s}"
                f" {row['ns_per_parameter']['median']:7.3f} ns"
                f"  {row['over_fused_adamw']['median']:6.2f} x AdamW"
                f"  {row['over_floor']['median']:6.2f} x floor",
                flush=True,
            )
    draw(points.rows).savefig(args.output / "local_step.png", dpi=110)


def evaluate(seconds: dict[str, list[float]], d: int) -> list[Row]:
    """Return one row a case: its time, and over that of AdamW and of the floor in each round."""
    adamw = seconds["AdamW, fused"]
    floor = [a + b for a, b in zip(seconds["lerp_ (floor)"], seconds["mul_ (floor)"], strict=True)]
    return [
        {
            "case": name,
            "ns_per_parameter": spread([1e9 * value / d for value in values]),
            "over_fused_adamw": ratios(values, adamw),
            "over_floor": ratios(values, floor),
        }
        for name, values in seconds.items()
    ]


def draw(rows: list[Row]) -> "Figure":
    """Draw bars for the smallest number of threads, a panel for each size."""
    from matplotlib.figure import Figure

    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    sizes = sorted({row["d"] for row in rows})
    figure = Figure(figsize=(4.2 * len(sizes), 4))
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, d in zip(axes, sizes, strict=True):
        chosen = [row for row in rows if row["d"] == d]
        values = [row["ns_per_parameter"]["median"] for row in chosen]
        ours = ["tab:blue" if row["case"].startswith(OURS) else "tab:gray" for row in chosen]
        axis.barh([row["case"] for row in chosen], values, color=ours)
        axis.set_xscale("log")
        axis.set_title(f"d = {d:.0e}, {threads} thread{'s' * (threads > 1)}")
        axis.set_xlabel("ns per parameter")
        for height, value in enumerate(values):
            axis.text(value, height, f" {value:.2f}", va="center", fontsize=8)
        axis.margins(x=0.25)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    run(main, parse())
