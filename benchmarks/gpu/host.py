"""In a process of one tree: the host's time of an optimizer's launches, without a GPU.

Triton compiles and prepares every launch as for an H100, and leaves out the launch itself. Tensors
are in main memory and small. Only what users of the optimizers see is used, as this runs with old
and new sources. Prints a line of JSON: microseconds and launches of each case.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu.no_device import NoDevice

TENSORS, SHAPE = 300, (64, 64)
REPEATS, CALLS = 5, 10  # the least of the repeats counts


def leave_out_launches() -> list[str]:
    """Let Triton do all but launch; return the list that the names of kernels are added to."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(90))
    launches: list[str] = []
    prepare = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        launches.append(self.__name__)
        return prepare(self, *args, **options)

    JITFunction.run = run
    CompiledKernel.run = property(lambda self: lambda *args: None)
    CompiledKernel._init_handles = lambda self: setattr(self, "function", 0)
    CompiledKernel.launch_metadata = lambda self, grid, stream, *args: None
    return launches


def cases() -> dict[str, Callable[[], Any]]:
    """Return what is timed: the message about a bucket of all tensors, and a whole step."""
    import torch

    from dlion import optim

    found: dict[str, Callable[[], Any]] = {}
    for name in ("DLion", "LionCub"):
        params = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(TENSORS)]
        optimizer = getattr(optim, name)(params)
        for param in params:
            param.grad = torch.zeros(SHAPE)
        (bucket,) = optimizer.buckets
        found[f"{name}, encode"] = lambda made=(optimizer, bucket): made[0].encode(made[1], 0)
        found[f"{name}, step"] = optimizer.step
    return found


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported
    import torch

    import dlion.kernels

    launches = leave_out_launches()
    from dlion.kernels import triton_cuda

    torch.set_num_threads(1)
    dlion.kernels._compiled = lambda device, package: triton_cuda
    rows: dict[str, dict[str, float]] = {}
    for name, case in cases().items():
        try:
            case()
        except TypeError as error:  # of kernels that cannot be launched
            print(f"{name}: {error}", file=sys.stderr)
            continue
        launches.clear()
        case()
        count, best = len(launches), float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            for _ in range(CALLS):
                case()
            best = min(best, (time.perf_counter() - start) / CALLS)
        rows[name] = {"us": best * 1e6, "launches": count}
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
