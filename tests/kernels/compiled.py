"""Compiles all Triton kernels for a GPU that need not be there; prints a line of JSON for each.

    python tests/kernels/compiled.py 90 [120 ...] [--some]

It is a process of its own, as tests of the kernels set TRITON_INTERPRET. The kernels are called
through their wrappers; only the launch is left out. A call that fails is a line with its error.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
import triton
from gpu.kernels import MOVES, VOTERS, arguments_of, tensors_in
from kernel_cases import Compiled, Message, cases, kernel
from kernel_code import Launch, compiling
from torch import Tensor

from dlion.kernels import triton_cuda

ALIGNED, FAR = 1 << 16, 2**31 + 2**20  # elements
ODD = ("encode_signs", "encode_levels, 4 bits", "encode_deltas", "apply_signs")  # addresses
CASES = (  # of kernel_cases.py: odd sizes, bfloat16 and other constants
    *("encode_signs-65-*-False", "encode_levels-65-*-1", "encode_levels-65-*-127", "measure-65-*"),
    *("apply-65-bfloat16", "lion-65-bfloat16", "momentum-65-bfloat16"),
    *("encode_deltas-65-bfloat16-2", "decode_deltas-65-*"),
)
# what rounds to other bits than the reference: in PTX, and in what the assembler makes of it
INEXACT = re.compile(r"\bfma\.r\w\.b?f\w+|\w+\.ftz\b|\bdiv\.full\.f\w+|\w+\.approx\.\w+")
FUSED = re.compile(r"\b[FD]FMA2?\b")


class Call(NamedTuple):
    """A call of a wrapper.

    Attributes:
        aligned: whether addresses and sizes are multiples of 16.
        ones: whether all integers that its kernels are given are to be 1.
    """

    label: str
    name: str
    arguments: tuple[Any, ...]
    aligned: bool = False
    ones: bool = False


def calls() -> Iterator[Call]:
    """Yield calls of all kernels: dtypes, sizes, addresses and numbers of planes."""
    for call in benchmarked(ALIGNED, "cpu"):
        yield call._replace(aligned=True)
        yield call._replace(label=f"{call.label}, ones", ones=True)
        if call.label in ODD:
            arguments = shifted(call.arguments)
            yield call._replace(label=f"{call.label}, odd addresses", arguments=arguments)
    for call in benchmarked(FAR, "meta"):  # takes no memory
        yield call._replace(label=f"{call.label}, {FAR} elements")
    for n, largest in ((64, 1), (64, 14), (8, 254), (64, 254)):
        planes, bits = largest.bit_length(), (n * largest).bit_length()
        label, rows = f"{n} workers, {planes} bits", words(n, planes)
        yield Call(label, "sum_planes", (rows, largest, words(bits)))
        yield Call(label, "compare_sum", (rows, largest, n * largest // 2, *words(2)))
    for case in cases():
        if any(fnmatch(case.name, pattern) for pattern in CASES):
            for name, arguments in case.calls(Compiled(triton_cuda, "cpu", interpreted=True)):
                given = (a.view() if isinstance(a, Message) else a for a in arguments)
                yield Call(case.name, name, tuple(given))


def benchmarked(d: int, device: str) -> Iterator[Call]:
    """Yield the cases that accelerator.py times."""
    for case, make in arguments_of(d, device).items():
        yield Call(case, case.partition(",")[0], make())


def words(*shape: int) -> Tensor:
    return torch.zeros(*shape, ALIGNED // 64, dtype=torch.int64)


def shifted(argument: Any) -> Any:
    """Copy vectors to addresses that are no multiples of 16."""
    if isinstance(argument, Tensor) and argument.is_floating_point() and argument.ndim:
        return torch.cat([argument.flatten()[:1], argument.flatten()])[1:].view_as(argument)
    if isinstance(argument, tuple | list):
        parts = map(shifted, argument)
        return type(argument)(*parts) if hasattr(argument, "_fields") else type(argument)(parts)
    return argument


def describe(call: Call, launch: Launch) -> dict[str, Any]:
    """Return what there is to know of a kernel."""
    code, source, ptx = launch.code, launch.compiled.src, launch.compiled.asm["ptx"]
    inexact = INEXACT.findall(ptx)
    if not re.search(r"\b(div|sqrt)\.rn\.f", ptx):  # which are rounded rightly, by way of these
        inexact += FUSED.findall(code.sass)
    divisible = [source.fn.arg_names[place[0]] for place, how in source.attrs.items() if how]
    return {
        "registers": code.registers,
        "stack": code.stack,
        "spilled": code.spilled(VOTERS),
        "shared": launch.compiled.metadata.shared,
        "accesses": Counter(i.name for i in code.instructions if i.width),
        "divisible": divisible,
        "inexact": sorted(set(inexact)),
        "narrow": narrow(call, launch) if call.aligned and source.name == f"_{call.name}" else [],
    }


def narrow(call: Call, launch: Launch) -> list[str]:
    """Say what a thread does not read or write by wide accesses, where blocks are whole.

    Its share of the float32 vectors needs accesses of 128 bits; those of bfloat16, more than 16.
    """
    arguments = filter(None, (list(tensors_in(argument)) for argument in call.arguments))
    vectors = [
        (tensor.nbytes / launch.threads, moves)
        for tensors, moves in zip(arguments, MOVES[call.name], strict=True)
        for tensor in tensors
        if tensor.dtype == torch.float32 and tensor.numel() >= ALIGNED
    ]
    path = launch.code.path(VOTERS)
    found = [name for name in path if re.match(r"(LDG|STG)\b.*16$", name)]
    for act, how, name in (("reads", "r", "LDG.E.128"), ("writes", "w", "STG.E.128")):
        needed = sum(share for share, moves in vectors if how in moves)
        if (wide := 16 * sum(path[other] for other in path if other.startswith(name))) < needed:
            found.append(f"{act} {wide:g} of {needed:g} bytes by 128 bits")
    return found


def main(capability: int, some: bool = False) -> None:
    """Print the kernels for a capability, or only ``some``: those that accelerator.py times."""
    known: set[bytes] = set()
    facts = {"capability": capability, "triton": triton.__version__}
    for call in benchmarked(ALIGNED, "cpu") if some else calls():
        row = {**facts, "kernel": call.name, "label": call.label}
        with compiling(capability, call.ones) as launches:
            try:
                kernel(triton_cuda, call.name)(*call.arguments)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                print(json.dumps({**row, "error": reason}), flush=True)
        for launch in launches:
            if (cubin := launch.compiled.asm["cubin"]) not in known:
                known.add(cubin)
                found = {"kernel": launch.kernel, **describe(call, launch)}
                print(json.dumps(row | found), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if argument.isdecimal():
            main(int(argument), "--some" in sys.argv)
