"""Part ``steps``: the local work of a step, many small tensors, and what the host waits for."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import Row
from local_step import evaluate, make_cases
from same_bits import METHODS
from torch import Tensor

from dlion import optim
from gpu.timing import NO_COUNTS, Call, launches, timed, timed_in_turn, waits

Shapes = list[tuple[int, ...]]

CALLS = 3  # in a row, timed together
SPARSE = ("graddrop", "dgc")  # messages of differing length, whose lengths the host must read
LOCAL = ("diloco", "muloco", "sparseloco")  # whose gradients no header tells the others about
LATE = 3  # steps after which every method of METHODS sends what it sends from then on


# ---- the local work of a step -------------------------------------------------------------------


def measure_steps(key: Row, args: Namespace) -> list[Row]:
    """Time the local work of a step, see local_step.py."""
    with torch.device(args.device):
        cases = make_cases(key["d"])
    times = timed(cases, args, CALLS)
    rows = evaluate({case: found.device for case, found in times.items()}, key["d"])
    for row in rows:
        row |= times[row["case"]].row()
        ours = row["case"] == "dlion_mavo" and key["d"] >= 10**8
        row["met"] = row["over_fused_adamw"]["median"] <= 1 if ours else None
    return rows


# ---- many tensors -------------------------------------------------------------------------------


def gpt2_shapes(layers: int, width: int, context: int, vocabulary: int) -> Shapes:
    """Return the shapes of GPT-2's parameters, in the order of transformers."""
    block = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return [(vocabulary, width), (context, width), *layers * block, (width,), (width,)]


TENSORS: dict[str, Callable[[bool], Shapes]] = {  # given whether they are to be small
    "300 of 1e5": lambda small: [(100,)] * 3 if small else [(100_000,)] * 300,
    "GPT-2 345M": lambda small: gpt2_shapes(*((1, 8, 4, 16) if small else (24, 1024, 1024, 50257))),
}


def measure_tensors(key: Row, args: Namespace) -> list[Row]:
    """Time backward passes and ``step()`` of optimizers of many tensors.

    The backward pass only hands gradients over. Its time with overlap, less that without, is the
    time of the hooks.
    """
    shapes = TENSORS[key["tensors"]](args.small)
    gradients = list(random_tensors(shapes, args.device))
    times, counts = {}, {}
    for name, make in optimizers().items():  # one at a time in memory
        times |= timed_in_turn({name: cycle_of(make, shapes, gradients)}, args)
    for name, make in optimizers().items():  # after all times, as a profiler may slow launches
        cycle = cycle_of(make, shapes, gradients)
        for call in cycle.values():
            call()
        counts |= {f"{name}: {act}": launches(call, args.device) for act, call in cycle.items()}
    return [
        {"case": case, "launches": counts[case], **found.row(), "met": None}
        for case, found in times.items()
        if not case.endswith("zero_grad")
    ]


def cycle_of(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    shapes: Shapes,
    gradients: list[Tensor],
) -> dict[str, Call]:
    """Return what follows each other in a step of a new optimizer."""
    device = gradients[0].device
    parameters = [torch.nn.Parameter(t) for t in random_tensors(shapes, device)]
    optimizer = make(parameters)
    return {
        "zero_grad": optimizer.zero_grad,
        "backward": partial(torch.autograd.backward, parameters, gradients),
        "step": optimizer.step,
    }


def measure_encoding(key: Row, args: Namespace) -> list[Row]:
    """Time the encoding of the messages about many tensors, all buckets."""
    shapes = TENSORS[key["tensors"]](args.small)
    cases = {}
    for method in ("dlion_mavo", "lion_cub"):
        parameters = [torch.nn.Parameter(t) for t in random_tensors(shapes, args.device)]
        for parameter, gradient in zip(
            parameters, random_tensors(shapes, args.device), strict=True
        ):
            parameter.grad = gradient
        optimizer = make_optimizer(method, overlap=False, params=parameters, bucket_cap_mb=25)
        cases[method] = partial(encode_all, optimizer)
    times = timed(cases, args, CALLS)
    counts = {case: launches(call, args.device) for case, call in cases.items()}
    return [
        {"case": case, "launches": counts[case], **found.row(), "met": None}
        for case, found in times.items()
    ]


def random_tensors(shapes: Shapes, device: str | torch.device) -> Iterator[Tensor]:
    return (torch.randn(shape, device=device) for shape in shapes)


def optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """Return what makes the optimizers that are timed."""
    made: dict[str, Any] = {
        "AdamW, fused": partial(torch.optim.AdamW, fused=True),
        "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    }
    for method in ("dlion_mavo", "lion_cub"):
        for overlap in (False, True):
            name = f"{method}{', overlap' * overlap}"
            made[name] = partial(make_optimizer, method, overlap, bucket_cap_mb=25)
    return made


def make_optimizer(
    method: str, overlap: bool, params: list[torch.nn.Parameter], **options: Any
) -> optim.DistributedOptimizer:
    """Return the optimizer of a method of same_bits.py, whose messages go through collectives.

    It does not look for NaN unless it is told to: that is a pass of its own.
    """
    class_name, settings = METHODS[method]
    options = {"nonfinite": None, **options}
    optimizer = getattr(optim, class_name)(params, overlap=overlap, **settings, **options)
    optimizer.channel.alone = False  # also where there is no other process
    return optimizer


@torch.no_grad()
def encode_all(optimizer: optim.DistributedOptimizer) -> None:
    """Encode the messages about all buckets."""
    for bucket in optimizer.buckets:
        optimizer.encode(bucket, 0)


# ---- waits of the host --------------------------------------------------------------------------


def count_waits(key: Row, args: Namespace) -> list[Row]:
    """Count how often the host waits for the device in a step of every method."""
    variants: dict[str, dict[str, Any]] = {
        "": {"overlap": False},
        ", overlap": {"overlap": True},
        ", overlap, nonfinite=stop": {"overlap": True, "nonfinite": "stop"},
    }
    rows = []
    for method in ("dlion_mavo", "dgc") if args.small else METHODS:
        for variant, options in variants.items():
            found = waits_of(partial(make_optimizer, method, bucket_cap_mb=0.5, **options), args)
            rows.append({"case": f"{method}{variant}", **found, "met": None})
            if found["waits"] is not None:
                looks = method in LOCAL and options.get("nonfinite") == "stop"
                few = found["waits"] <= (3 if method in SPARSE else 1 + looks)
                rows[-1]["met"] = few and not found["waits_in_hooks"]
    return rows


def waits_of(make: Callable[..., optim.DistributedOptimizer], args: Namespace) -> Row:
    """Return the waits of a step: in all, in hooks of the backward pass, and by place."""
    shapes = [(16, 16) if args.small else (256, 256)] * 12
    parameters = [torch.nn.Parameter(t) for t in random_tensors(shapes, args.device)]
    gradients = list(random_tensors(shapes, args.device))
    optimizer = make(params=parameters)

    def step() -> None:
        torch.autograd.backward(parameters, gradients)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(LATE):
        step()
    if args.device == "cpu":
        return {"waits": None, "note": NO_COUNTS}
    with waits() as places:
        step()
    in_hooks = sum(count for place, count in places.items() if place.startswith("hook"))
    return {
        "buckets": len(optimizer.buckets),
        "waits": places.total(),
        "waits_in_hooks": in_hooks,
        "where": dict(places.most_common()),
    }
