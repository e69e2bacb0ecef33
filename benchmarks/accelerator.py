"""Everything that is to be known of a GPU, in one command of less than ten minutes.

    python benchmarks/accelerator.py

``kernels``: every Triton kernel against the reference, in the cases of tests/kernels and beyond
2**31 elements; then its time beside a device copy of as many bytes. ``steps``: the local work of a
step, the cases of local_step.py. ``train``: steps of ViT-B/16 and of GPT-2 with 345 million
parameters in bf16_mixed, random data, in one process over NCCL and in two that share the device
over gloo. ``nccl``: every method's exchange through NCCL, with overlap and partial participation,
against the same without collectives.

Each point is measured in processes of its own. One that fails, or takes longer than is left to its
part, is kept with its error, and tried again by the next call. Without a GPU, or with
``--device cpu``, all of it runs in small, the kernels in Triton's interpreter; that measures
nothing, and leaves no file unless --output is typed. Writes accelerator.json.
"""

import argparse
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain, product
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, Parser, Points, Row, interleaved, ratios, run, spread, wall_clock
from kernel_cases import Compiled, cases, tensors
from local_step import evaluate, make_cases
from same_bits import METHODS, WORKERS, Case, run_case
from torch import Tensor
from torch.nn import functional as F

from dlion import optim
from dlion.arguments import whole
from dlion.data.torchvision_ops import declare_missing_operators
from dlion.errors import RunFailed
from dlion.kernels import Coder, reference
from dlion.launch.local import run_processes
from dlion.launch.meeting import join_process_group
from dlion.machine import cores, machine
from dlion.models import ImageShape, TextShape, gpt2, timm_model
from dlion.training.precision import in_precision
from dlion.workers import Workers

SECONDS = {"kernels": 150, "steps": 80, "train": 200, "nccl": 150}  # of all points of a part
SHARE = 0.8  # of the bandwidth of a copy, which every kernel is to reach
VOTERS = 8
LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.99)
FAR = 2**31 + 2**20 + 128  # elements, more than 32 bits can count

# what a step does with the tensors among a kernel's arguments, in their order: read and write
MOVES: dict[str, list[str]] = {
    "encode_signs": ["w", "rw", "r"],  # message, momentum, gradient
    "measure": ["r", "r"],  # momentum, gradient
    "encode_levels": ["w", "rw", "r", "r"],  # message, momentum, gradient, multiplier
    "sum_planes": ["r", "w"],  # messages, sums
    "compare_sum": ["r", "w", "w"],  # messages, two masks
    "pack_votes": ["r", "r", "w"],  # two masks, trits
    "encode_deltas": ["w", "rw", "r", "rw", "rw", "rw"],  # ..., estimate, level, history
    "decode_deltas": ["r", "r", "rw", "rw", "rw", "w", "w"],  # messages, rows, coders, two masks
    "apply_signs": ["rw", "r"],  # parameters, answers
    "apply_levels": ["rw", "r"],
    "apply_trits": ["rw", "r"],
    "lion": ["rw", "rw", "r"],  # parameters, momentum, gradient
}


# ---- kernels ------------------------------------------------------------------------------------


def check_kernels(key: Row, args: argparse.Namespace) -> list[Row]:
    """Compare all kernels with the reference, every process some of the cases."""
    compiled, processes = compiled_kernels(args), dist.get_world_size()
    chosen = cases()[:: 16 if args.small else 1]
    mine = []
    for case in chosen[dist.get_rank() :: processes]:
        try:
            if not case.holds(compiled):
                mine.append(f"{case.name}: other bits")
        except Exception as error:  # the others are to be seen, too
            mine.append(f"{case.name}: {type(error).__name__}: {error}".splitlines()[0])
    everyone: list[list[str]] = [[]] * processes
    dist.all_gather_object(everyone, mine)
    wrong = list(chain.from_iterable(everyone))
    return [{"case": f"{len(chosen)} cases", "wrong": wrong, "met": not wrong}]


def check_far(key: Row, args: argparse.Namespace) -> list[Row]:
    """Compare the ends of vectors that are too long for offsets of 32 bits."""
    device, kernels = args.device, compiled_kernels(args).module
    d = 2048 + 128 if args.small else FAR
    tail, size = d - 1088, d // 64
    grad = torch.randn(d, device=device, dtype=torch.bfloat16)
    momentum = torch.randn(d, device=device)
    sent, row = bits(1, 1, size, device=device), torch.zeros(1, 1, 17, dtype=torch.int64)
    moved = momentum[tail:].to("cpu", copy=True)
    kernels.encode_signs(sent, 0, momentum, grad, *BETAS, True)
    reference.encode_signs(row, 0, moved, grad[tail:].cpu(), *BETAS, True)
    right = {"encode_signs": torch.equal(sent[..., tail // 64 :].cpu(), row)}
    right["encode_signs"] &= torch.equal(momentum[tail:].cpu(), moved)
    params = grad  # both are as long as anything fits beside them
    for name, answers, some, *rest in (
        ("apply_signs", sent[0], sent[0, :, tail // 64 :]),
        ("apply_levels", sent, sent[..., tail // 64 :], 1),
    ):
        expected = params[tail:].to("cpu", copy=True)
        getattr(kernels, name)(params, answers, *rest, LR, DECAY)
        getattr(reference, name)(expected, some.cpu(), *rest, LR, DECAY)
        right[name] = agree(params[tail:].cpu(), expected, args)
    trits = torch.randint(243, (1, -(-d // 5)), dtype=torch.uint8, device=device)
    start = tail - tail % 5  # where a byte begins
    behind = params[start:].to("cpu", copy=True)
    kernels.apply_trits(params, trits, d, LR, DECAY)
    reference.apply_trits(behind, trits[:, start // 5 :].cpu(), len(behind), LR, DECAY)
    right["apply_trits"] = agree(params[tail:].cpu(), behind[tail - start :], args)
    wrong = [name for name, holds in right.items() if not holds]
    return [{"case": f"{d:,} elements", "wrong": wrong, "met": not wrong}]


def agree(first: Tensor, second: Tensor, args: argparse.Namespace) -> bool:
    """Whether parameters in bfloat16 are equal; Triton's interpreter does not round as a GPU."""
    tolerance = 2**-7 if args.small else 0.0
    return torch.allclose(first.float(), second.float(), rtol=tolerance, atol=0.0)


def compiled_kernels(args: argparse.Namespace) -> Compiled:
    """Import the Triton kernels, for a GPU or for the interpreter."""
    from dlion.kernels import triton_cuda

    return Compiled(triton_cuda, args.device, interpreted=args.small)


def bits(*shape: int, device: str) -> Tensor:
    """Random words."""
    return torch.randint(-(2**63), 2**63 - 1, shape, device=device)


def measure_kernels(key: Row, args: argparse.Namespace) -> list[Row]:
    """Time every kernel beside a copy that reads and writes as many bytes in all."""
    kernels, rows = compiled_kernels(args).module, []
    for case, make in arguments_of(key["d"], args.device).items():
        name, arguments = case.partition(",")[0], make()
        given = list(tensors(arguments))
        moved = sum(t.nbytes * len(how) for t, how in zip(given, MOVES[name], strict=True))
        source = torch.ones(moved // 2, dtype=torch.uint8, device=args.device)
        target = torch.zeros_like(source)
        timed = {
            case: partial(getattr(kernels, name), *arguments),
            "copy": partial(target.copy_, source),
        }
        seconds = interleaved(timed, args.rounds, clock(args, calls=10))
        share = ratios(seconds["copy"], seconds[case])
        rows.append(
            {
                "case": case,
                "bytes": moved,
                "seconds": spread(seconds[case]),
                "copy_seconds": spread(seconds["copy"]),
                "share": share,
                "met": share["median"] >= SHARE if key["d"] >= 10**8 else None,  # else it is cached
            }
        )
    return rows


def arguments_of(d: int, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return what makes the arguments of each kernel.

    d are the parameters of a worker's message or of an update, and of the slice that an owner adds
    the messages of 8 workers about.
    """
    size = -(-d // (64 * VOTERS))  # words of a slice
    words = VOTERS * size

    def normal(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(d, device=device).to(dtype)

    def random(*shape: int) -> Tensor:
        return bits(*shape, device=device)

    def sent(planes: int = 1) -> tuple[Tensor, int]:
        return random(VOTERS, planes, size), 0

    def coder(estimates: tuple[int, ...], *rows: int) -> Coder:
        level = torch.full((*rows, 64 * words), 64, dtype=torch.uint8, device=device)
        return Coder(torch.zeros(estimates, device=device), level, random(*rows, 2, words))

    def masks() -> tuple[Tensor, Tensor]:
        greater = random(words)
        return greater, random(words) & ~greater

    everyone = torch.arange(VOTERS, device=device)
    trits = (VOTERS, -(-64 * size // 5))
    factor, half = torch.ones((), device=device), torch.bfloat16
    return {
        "encode_signs": lambda: (*sent(), normal(), normal(), *BETAS, True),
        "encode_signs, bfloat16": lambda: (*sent(), normal(), normal(half), *BETAS, True),
        "measure": lambda: (normal(), normal(), BETAS[0], "l1"),
        "encode_levels, 4 bits": lambda: (*sent(4), normal(), normal(), *BETAS, factor, 7),
        "sum_planes, 1 bit": lambda: (random(VOTERS, 1, words), 1, random(4, words)),
        "compare_sum, 1 bit": lambda: (random(VOTERS, 1, words), 1, VOTERS // 2, *masks()),
        "compare_sum, 4 bits": lambda: (random(VOTERS, 4, words), 14, 7 * VOTERS, *masks()),
        "pack_votes": lambda: (
            *masks(),
            torch.zeros(-(-64 * words // 5), dtype=torch.uint8, device=device),
        ),
        "encode_deltas": lambda: (
            *sent(),
            normal(),
            normal(),
            coder((64 * words,)),
            *BETAS,
            2,
        ),
        "decode_deltas": lambda: (
            random(VOTERS, 1, words),
            everyone,
            coder((1, 64 * words), VOTERS),
            None,
            2,
            1.0,
            *masks(),
        ),
        "apply_signs": lambda: (normal(), random(VOTERS, size), LR, DECAY),
        "apply_signs, bfloat16": lambda: (normal(half), random(VOTERS, size), LR, DECAY),
        "apply_levels, mean of 8": lambda: (normal(), sent(4)[0], VOTERS, LR, DECAY),
        "apply_trits": lambda: (
            normal(),
            torch.randint(243, trits, dtype=torch.uint8, device=device),
            64 * size,
            LR,
            DECAY,
        ),
        "lion": lambda: (normal(), normal(), normal(), *BETAS, LR, DECAY),
    }


# ---- steps --------------------------------------------------------------------------------------


def measure_steps(key: Row, args: argparse.Namespace) -> list[Row]:
    """Time the local work of a step, see local_step.py."""
    with torch.device(args.device):
        timed = make_cases(key["d"])
    rows = evaluate(interleaved(timed, args.rounds, clock(args, calls=3)), key["d"])
    for row in rows:
        ours = row["case"] == "dlion_mavo" and key["d"] >= 10**8
        row["met"] = row["over_fused_adamw"]["median"] <= 1 if ours else None
    return rows


# ---- train --------------------------------------------------------------------------------------


def make_vit(batch: int, small: bool) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return ViT-B/16 of timm, and a batch of images."""
    size = 32 if small else 224
    tiny = {"embed_dim": 32, "depth": 1, "num_heads": 2} if small else {}
    model = timm_model(ImageShape(3, size, 1000), "vit_base_patch16_224", **tiny)
    return model, torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))


def make_gpt2(batch: int, small: bool) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return GPT-2 medium of transformers, and a batch of sequences."""
    context, vocabulary = (16, 64) if small else (1024, 50257)
    layers, width, heads = (1, 32, 2) if small else (24, 1024, 16)
    model = gpt2(TextShape(vocabulary, context), layers, width, heads)
    return model, *torch.randint(vocabulary, (2, batch, context)).unbind()


MODELS = {"ViT-B/16": (make_vit, 64), "GPT-2 345M": (make_gpt2, 8)}  # batches of all processes


def measure_training(key: Row, args: argparse.Namespace) -> list[Row]:
    """Time whole steps, each method with a model of its own; in several processes without DDP."""
    make, batch = MODELS[key["model"]]
    batch //= (16 if args.small else 1) * dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model, *data = make(max(batch, 1), args.small)
    inputs, labels = (part.to(args.device) for part in data)
    losses: dict[str, list[Tensor]] = {}
    parameters: dict[str, list[Tensor]] = {}

    def stepper(name: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
        own = in_precision(deepcopy(model), "bf16_mixed", args.device)
        parameters[name], losses[name] = list(own.parameters()), []
        steps = optimizer(own.parameters(), lr=LR, weight_decay=DECAY)
        if isinstance(steps, optim.DistributedOptimizer):
            steps.channel.alone = False  # one process sends its messages through NCCL, too

        def step() -> None:
            loss = F.cross_entropy(own(inputs).flatten(0, -2).float(), labels.flatten())
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses[name].append(loss.detach())

        return step

    adamw = "AdamW, fused, alone"
    overlapping = partial(optim.DLion, overlap=True, bucket_cap_mb=25)
    timed = {
        adamw: stepper(adamw, partial(torch.optim.AdamW, fused=True)),
        "dlion_mavo": stepper("dlion_mavo", optim.DLion),
        "dlion_mavo, overlap": stepper("dlion_mavo, overlap", overlapping),
    }
    seconds = interleaved(timed, args.rounds, clock(args))
    memory = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
    rows = []
    for name, values in seconds.items():
        first, last = losses[name][0].item(), losses[name][-1].item()
        alike = name == adamw or equal_everywhere(parameters[name])
        rows.append(
            {
                "case": name,
                "seconds": spread(values),
                "over_adamw": ratios(values, seconds[adamw]),
                "losses": [first, last],
                "parameters": sum(tensor.numel() for tensor in parameters[name]),
                "gib_of_all": memory,
                "met": alike and last < first < inf,
            }
        )
    return rows


def equal_everywhere(parameters: list[Tensor]) -> bool:
    """Whether all processes hold the same bits."""
    sums = torch.stack([p.detach().view(torch.int32).sum() for p in parameters]).tolist()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return all(other == sums for other in everyone)


# ---- nccl ---------------------------------------------------------------------------------------

BIG = {str(i): (512, 1024) for i in range(6)}  # long enough for one stream to overtake another


def check_methods(key: Row, args: argparse.Namespace) -> list[Row]:
    """Compare every method's exchanges with those that no collective takes part in."""
    own_group, _ = dist.new_subgroups(1)
    alone = Workers(local=WORKERS, group=own_group)
    spread_out = Workers.current(WORKERS // dist.get_world_size())
    rows = []
    for method in ("dlion_mavo", "dgc") if args.small else METHODS:
        chosen = [Case("some take part", method, partial=True, steps=2 if args.small else 6)]
        if not args.small:
            chosen.append(Case("all take part", method))
        if not args.small and method.startswith(("dlion", "lion_cub")):
            chosen.append(Case("long messages", method, {"bucket_cap_mb": 4}, shapes=BIG, steps=4))
        wrong = []
        for case in chosen:
            expected = run_case(case, alone, overlap=False, device=args.device)
            for overlap in (False, True):
                found = run_case(case, spread_out, overlap, args.device, travelling=True)
                if found != expected:
                    wrong.append(f"{case.name}{', overlap' * overlap}")
        rows.append({"case": method, "wrong": wrong, "met": not wrong})
    return rows


# ---- points -------------------------------------------------------------------------------------

Work = Callable[[Row, argparse.Namespace], list[Row]]
WORK: dict[str, Work] = {
    "same bits": check_kernels,
    "beyond 2**31 elements": check_far,
    "bandwidth": measure_kernels,
    "local step": measure_steps,
    "training": measure_training,
    "exchanges": check_methods,
}


def keys(part: str, args: argparse.Namespace) -> list[Row]:
    """Return the points of a part, the most telling ones first."""
    nccl = "nccl" if args.device == "cuda" else "gloo"

    def key(what: str, processes: int = 1, backend: str = "gloo", **more: Any) -> Row:
        named = {"part": part, "what": what, "processes": processes, "backend": backend}
        return named | {"device": args.device, **more}

    if part == "kernels":
        found = [key("same bits", 1 if args.small else min(cores(), 8))]
        found += [key("beyond 2**31 elements")]
        return found + [key("bandwidth", d=d) for d in args.sizes]
    if part == "steps":
        return [key("local step", d=d) for d in args.sizes]
    spreads = [(1, nccl), (2, "gloo")]
    if part == "train":
        pairs = zip(spreads, MODELS, strict=True) if args.small else product(spreads, MODELS)
        return [key("training", *spread_, model=model) for spread_, model in pairs]
    found = [key("exchanges", *spread_) for spread_ in spreads]
    # NCCL refuses two processes on one GPU, unless it has learnt to
    return found + [key("exchanges", 2, nccl, attempt=True)] * (args.device == "cuda")


def measured(key: Row, args: argparse.Namespace, seconds: float) -> list[Row]:
    """Measure a point in new processes; what fails is a row with its error.

    An ``attempt`` at what need not be possible has no aim.
    """
    try:
        if seconds < 1:
            raise TimeoutError("not begun: the points before it took all of this part's budget")
        with at_most(seconds):
            return run_processes(key["processes"], work, key, args)
    except (RunFailed, TimeoutError) as error:
        return [{"case": "failed", "error": str(error), "met": None if "attempt" in key else False}]


def work(key: Row, args: argparse.Namespace) -> list[Row]:
    """Measure a point in one of its processes."""
    torch.set_num_threads(1 if args.small else max(1, cores() // key["processes"]))
    if args.device == "cuda":
        torch.cuda.set_device(0)
    join_process_group(key["backend"])
    try:
        return WORK[key["what"]](key, args)
    finally:
        dist.destroy_process_group()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s, what was left of this part's budget")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def clock(args: argparse.Namespace, calls: int = 1) -> Callable[[Callable[[], Any]], float]:
    """Return what measures the seconds of a call, on the device and of so many in a row there."""

    def on_device(case: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(calls):
            case()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / calls

    return on_device if args.device == "cuda" else wall_clock


def facts_of_device(device: str) -> Row:
    """Return what the figures hold for."""
    import triton

    facts = {"machine": machine(device), "triton": triton.__version__}
    if device == "cuda":
        facts["python"], facts["cuda"] = platform.python_version(), torch.version.cuda
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        facts["driver"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def warm_up(small: bool) -> None:
    """Import and compile what takes seconds, once for all processes."""
    if small:
        optim.DLion([torch.nn.Parameter(torch.zeros(64))]).prepare()
    declare_missing_operators()
    import timm  # noqa: F401
    from transformers import GPT2LMHeadModel  # noqa: F401


# ---- the command --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    # torch asks the driver without starting CUDA, which must not happen before a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = Parser(__doc__, beside="lion_pytorch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=here)
    parser.add_argument("--only", type=parts, default=list(SECONDS), help=f"{','.join(SECONDS)}")
    parser.add_argument("--sizes", type=whole(1), nargs="+", default=[10**8, 10**6, 350_000_000])
    parser.add_argument("--rounds", type=whole(2), default=15)
    args = parser.read(arguments, device="cpu")
    if args.device == "cuda" != here:
        parser.error("torch finds no GPU on this machine: type --device cpu")
    args.small = args.device == "cpu"
    if args.small:
        args.sizes, args.rounds = [200], 2
        args.output = None if args.output == RESULTS else args.output
    return args


def parts(text: str) -> list[str]:
    """Parse names of parts, separated by commas."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in SECONDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)} is no part: choose of {', '.join(SECONDS)}"
        )
    return chosen


def main(args: argparse.Namespace) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(args.small))  # Triton reads it when it is imported
    facts = run_processes(1, facts_of_device, args.device)
    points = Points(args.output / "accelerator.json", facts, {"rounds": args.rounds}, args.fresh)
    points.rows = [row for row in points.rows if "error" not in row]
    if "train" in args.only:
        warm_up(args.small)
    for part in args.only:
        deadline = time.monotonic() + SECONDS[part]
        for key in points.missing(keys(part, args)):
            points.add(key, measured(key, args, deadline - time.monotonic()))
    print(", ".join(f"{name} {value}" for name, value in points.facts.items()))
    for row in points.rows:
        print(f"{verdict(row):6s}  {where(row):44s}  {row['case']:26s}  {shown(row)}")
    known = [row["met"] for row in points.rows if row["met"] is not None]
    print(f"{sum(known)} of {len(known)} aims met" + " (a dry run, no measurement)" * args.small)


def verdict(row: Row) -> str:
    """Whether an aim is met, if there is one."""
    if row["met"] is False and ("error" in row or "wrong" in row):
        return "FAILED"
    return {True: "met", False: "missed", None: ""}[row["met"]]


def where(row: Row) -> str:
    """Name the point of a row."""
    if row["part"] in ("kernels", "steps"):
        return row["what"] + (f", d = {row['d']:.1e}" if "d" in row else "")
    processes = f"{row['processes']} process{'es' * (row['processes'] > 1)}, {row['backend']}"
    return f"{row.get('model', row['what'])}, {processes}"


def shown(row: Row) -> str:
    """What was found, in words."""
    if "error" in row:
        return row["error"]
    if "wrong" in row:
        return "equal to the bit" if row["met"] else "; ".join(row["wrong"][:3])
    if "share" in row:
        rate = row["bytes"] / row["seconds"]["median"] / 1e9
        return f"{between(row['share'])} of a copy's bandwidth (aim {SHARE}), {rate:,.0f} GB/s"
    if "over_fused_adamw" in row:
        time_ = row["ns_per_parameter"]["median"]
        return f"{between(row['over_fused_adamw'])} x fused AdamW, {time_:.4f} ns a parameter"
    first, last = row["losses"]
    return (
        f"{1e3 * row['seconds']['median']:.1f} ms, {between(row['over_adamw'])} x AdamW,"
        f" loss {first:.3f} to {last:.3f}"
    )


def between(values: dict[str, float]) -> str:
    """A median and its quartiles."""
    return f"{values['median']:.2f} ({values['low']:.2f} to {values['high']:.2f})"


if __name__ == "__main__":
    run(main, parse())
