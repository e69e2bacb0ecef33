"""Measure this project on a GPU, in two commands of less than five minutes each.

    python benchmarks/accelerator.py --only kernels,steps
    python benchmarks/accelerator.py --only train,nccl

``kernels``: every Triton kernel against the reference, in the cases of tests/kernels and beyond
2**31 elements, and its time beside a device copy of as many bytes. ``steps``: the local work of a
step, optimizers of many small tensors, and how often the host waits for the device. ``train``:
steps of ViT-B/16 and of GPT-2 with 345 million parameters, random data, in one process over NCCL
and in two that share the device over gloo. ``nccl``: every method's exchange through NCCL, with
overlap and partial participation, against the same without collectives.

torch and numpy are enough; ``train`` needs timm, torchvision and transformers, and is skipped
without them. Each point is measured in processes of its own. One that fails, or exceeds its part's
budget, is recorded with its error, and tried again by the next call. Without a GPU, or with
``--device cpu``, everything runs in small, the kernels in Triton's interpreter: a test of this
command that leaves no file unless --output is typed. Writes accelerator.json.
"""

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, Parser, Points, Row, run
from gpu import exchanges, kernels, steps, training

from dlion import optim
from dlion.errors import RunFailed
from dlion.suite.arguments import whole
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.machine import cores, machine

# of all points of a part; two parts, and 20 s for imports, are less than five minutes
SECONDS = {"kernels": 155, "steps": 115, "train": 160, "nccl": 110}

# ---- points -------------------------------------------------------------------------------------

Work = Callable[[Row, argparse.Namespace], list[Row]]
WORK: dict[str, Work] = {
    "same bits": kernels.check_kernels,
    "beyond 2**31 elements": kernels.check_far,
    "bandwidth": kernels.measure_kernels,
    "local step": steps.measure_steps,
    "many tensors": steps.measure_tensors,
    "encoding": steps.measure_encoding,
    "waits": steps.count_waits,
    "training": training.measure_training,
    "exchanges": exchanges.check_methods,
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
        first, *rest = [key("local step", d=d) for d in args.sizes]
        kinds = product(("many tensors", "encoding"), steps.TENSORS)
        many = [key(what, 1, nccl, tensors=name) for what, name in kinds]
        return [first, key("waits", 1, nccl), *many, *rest]
    spreads = [(1, nccl), (2, "gloo")]
    if part == "train":
        models = training.MODELS
        pairs = zip(spreads, models, strict=True) if args.small else product(spreads, models)
        return [key("training", *spread_, model=model) for spread_, model in pairs]
    found = [key("exchanges", *spread_) for spread_ in spreads]
    # NCCL has refused two processes on one GPU so far
    return found + [key("exchanges", 2, nccl, attempt=True)] * (args.device == "cuda")


def lacking(part: str, device: str) -> list[str]:
    """Return the packages that a part needs and that are not installed."""
    compiler = ["triton"] if device == "cuda" else ["numba"]
    needed = {"kernels": ["triton"], "train": [*compiler, "timm", "torchvision", "transformers"]}
    return [name for name in needed.get(part, compiler) if importlib.util.find_spec(name) is None]


def measured(key: Row, args: argparse.Namespace, seconds: float) -> list[Row]:
    """Measure a point in new processes; a failure is a row with its error.

    An ``attempt``, which is expected to fail, has no aim.
    """
    if packages := " ".join(lacking(key["part"], args.device)):
        return [{"case": "skipped", "skipped": f"type pip install {packages}", "met": None}]
    try:
        if seconds < 1:
            raise TimeoutError("not begun: the budget is used up; the next call continues here")
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
        raise TimeoutError(f"not done within the {seconds:.0f} s left of its part's budget")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def facts_of_device(device: str) -> Row:
    """Return what the figures hold for."""
    facts = {"machine": machine(device), "triton": None}
    if importlib.util.find_spec("triton"):
        import triton

        facts["triton"] = triton.__version__
    if device == "cuda":
        facts["python"], facts["cuda"] = platform.python_version(), torch.version.cuda
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        facts["driver"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def warm_up(args: argparse.Namespace) -> None:
    """Import and compile what takes seconds, once for all processes."""
    if args.small and not lacking("steps", args.device):
        optim.DLion([torch.nn.Parameter(torch.zeros(64))]).prepare()
    if "train" in args.only and not lacking("train", args.device):
        training.prepare()


# ---- the command --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    # torch asks the driver without starting CUDA, which must not happen before a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = Parser(__doc__)
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
            f"{', '.join(unknown)} is not a part: choose from {', '.join(SECONDS)}"
        )
    return chosen


def main(args: argparse.Namespace) -> None:
    deadline = time.monotonic()
    os.environ["TRITON_INTERPRET"] = str(int(args.small))  # Triton reads it when it is imported
    facts = run_processes(1, facts_of_device, args.device)
    points = Points(args.output / "accelerator.json", facts, {"rounds": args.rounds}, args.fresh)
    points.rows = [row for row in points.rows if not {"error", "skipped"} & row.keys()]
    warm_up(args)
    for part in args.only:
        deadline += SECONDS[part]  # what a part leaves over is the next one's
        for key in points.missing(keys(part, args)):
            points.add(key, measured(key, args, deadline - time.monotonic()))
    print(", ".join(f"{name} {value}" for name, value in points.facts.items()))
    for row in points.rows:
        print(f"{verdict(row):8s}{where(row):44s}  {row['case']:34s}  {shown(row)}")
    known = [row["met"] for row in points.rows if row["met"] is not None]
    print(f"{sum(known)} of {len(known)} aims met" + " (a dry run, no measurement)" * args.small)


def verdict(row: Row) -> str:
    """Whether an aim is met, if there is one."""
    if "skipped" in row:
        return "skipped"
    if row["met"] is False and ("error" in row or "wrong" in row):
        return "FAILED"
    return {True: "met", False: "missed", None: ""}[row["met"]]


def where(row: Row) -> str:
    """Name the point of a row."""
    if row["part"] in ("kernels", "steps"):
        size = f"d = {row['d']:.1e}" if "d" in row else row.get("tensors")
        return f"{row['what']}, {size}" if size else row["what"]
    processes = f"{row['processes']} process{'es' * (row['processes'] > 1)}, {row['backend']}"
    return f"{row.get('model', row['what'])}, {processes}"


def shown(row: Row) -> str:
    """Return what was found, for the table."""
    if reason := row.get("error") or row.get("skipped"):
        return reason
    if "wrong" in row:
        return "equal to the bit" if row["met"] else "; ".join(row["wrong"][:3])
    if "waits" in row:
        if row["waits"] is None:
            return row["note"]
        return f"{row['waits']} waits a step, {row['waits_in_hooks']} in hooks"
    seconds = row["seconds"]["median"]
    facts = [f"{1e3 * seconds:.3g} ms"]
    if row["host_us"]:
        facts.append(f"host {row['host_us']['median']:.0f} us")
    if "share" in row:
        rate = row["bytes"] / seconds / 1e9
        facts.append(f"{rate:,.0f} GB/s, {between(row['share'])} of a copy's")
    for name, shown_as in (("over_fused_adamw", "fused AdamW"), ("over_adamw", "AdamW")):
        if name in row:
            facts.append(f"{between(row[name])} x {shown_as}")
    if "losses" in row:
        facts.append("loss {:.3f} to {:.3f}".format(*row["losses"]))
    if row.get("launches"):
        facts.append(f"{row['launches']} launches")
    if row["note"] and row["device"] != "cpu":
        facts.append(row["note"])
    return ", ".join(facts)


def between(values: dict[str, float]) -> str:
    """Return a median and its quartiles."""
    return f"{values['median']:.2f} ({values['low']:.2f} to {values['high']:.2f})"


if __name__ == "__main__":
    run(main, parse())
