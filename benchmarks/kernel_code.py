"""The machine code of the Triton kernels, and what bounds their speed.

    python benchmarks/kernel_code.py

Compiles the cases of accelerator.py for GPUs that need not be there, counts the instructions of
each kind, and prints a table in Markdown. "Over HBM" is the number of elements a second that the
execution units can handle, over the number that the memory's bandwidth allows. Below 1 a kernel
cannot reach that bandwidth. It is an estimate within 25 %, not a measurement: stalls are left out,
and 8 messages are added, by loops that run 8 times. Writes kernel_code.json.

Triton's wheel has the assembler and the disassembler. The version is the installed one, or that of
a folder: PYTHONPATH=DIR after pip install --no-deps --target DIR triton==3.7.1.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from common import Parser, Row, run
from gpu.kernels import VOTERS, arguments_of, bytes_moved
from gpu.no_device import NoDevice
from kernel_cases import kernel

from dlion.errors import RunFailed
from dlion.suite.files import write_atomically
from dlion.suite.record.provenance import commit

ELEMENTS = 1 << 20


class Gpu(NamedTuple):
    """A GPU, as its data sheet and the table of arithmetic throughput have it.

    Attributes:
        capability: of the code, 90 for 9.0.
        clock: Hz.
        bandwidth: of its memory, bytes a second.
        lanes: threads of a multiprocessor that a kind of instruction serves in a clock cycle.
    """

    name: str
    capability: int
    multiprocessors: int
    clock: float
    bandwidth: float
    lanes: dict[str, int]


# Lanes: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions". Which unit
# executes an instruction: Nsight Compute's Kernel Profiling Guide, "Pipelines". Four schedulers
# issue one instruction of 32 threads a cycle each. Integer products take half of the float32 units.
LANES = {"issue": 128, "alu": 64, "fma": 128, "imad": 64, "xu": 16, "memory": 32}
GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 80GB SXM data sheet: 19.5 TFLOPS of float32 are 64 lanes at 1.41 GHz
        Gpu("A100", 80, 108, 1.41e9, 2.039e12, LANES | {"fma": 64, "fp64": 32}),
        # NVIDIA H100 SXM data sheet. Its clock rises to 1.98 GHz, which a full load rarely leaves:
        # 1.755 GHz is that of the PCIe card
        Gpu("H100", 90, 132, 1.755e9, 3.35e12, LANES | {"fp64": 64}),
        # NVIDIA RTX PRO 6000 Blackwell data sheets: 2.3 GHz (300 W) to 2.6 GHz (600 W)
        Gpu("RTX PRO 6000", 120, 188, 2.4e9, 1.79e12, LANES | {"fp64": 2}),
    )
}


# ---- compilation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What would have been launched: a kernel, how many programs, and what Triton made of it."""

    kernel: str
    programs: int
    compiled: Any

    @property
    def threads(self) -> int:
        return self.programs * self.compiled.metadata.num_warps * 32

    @cached_property
    def code(self) -> "Code":
        return Code(self.compiled.asm["cubin"])


@contextmanager
def compiling(capability: int, ones: bool = False) -> Iterator[list[Launch]]:
    """Compile for a GPU wherever a kernel is launched; yield the list that launches are added to.

    Wrappers may be given tensors of any device, ``meta`` too: names, dtypes, strides, sizes and
    addresses decide what is compiled, as they do in a launch.

    Args:
        ones: compile with every integer 1, which Triton makes a constant of the kernel's code.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def compile_only(self: JITFunction, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            if ones:
                pairs = zip(args, self.params, strict=True)
                args = tuple(1 if type(a) is int and not p.is_constexpr else a for a, p in pairs)
            compiled = self.run(*args, grid=grid, warmup=True, **options)
            launches.append(Launch(self.__name__, prod(grid), compiled))

        return call

    driver.set_active(NoDevice(capability))
    with patch.object(JITFunction, "__getitem__", compile_only):
        yield launches


class Instruction(NamedTuple):
    """A line of machine code; ``target``: the index of the instruction that it branches to."""

    name: str
    guarded: bool
    target: int | None

    @property
    def width(self) -> int:
        """Bytes of global memory that a thread reads or writes."""
        if not self.name.startswith(("LDG", "STG")):
            return 0
        found = re.search(r"\.[US]?(8|16|64|128|256)\b", self.name)
        return int(found[1]) // 8 if found else 4

    @property
    def unit(self) -> str | None:
        """The execution unit; None if it only has to be issued."""
        name = self.name.partition(".")[0]
        return next((unit for unit, names in UNITS.items() if re.fullmatch(names, name)), "alu")


# by the beginning of an instruction's name; whatever has none is an "alu" instruction
UNITS = {
    None: r"U.+|R2UR|S2U?R|VOTEU?|NOP|B(RA|AR|SSY|SYNC|REAK|MOV)|EXIT|CALL|RET|WARPSYNC|YIELD|"
    r"(LDG)?DEPBAR|ERRBAR|MEMBAR",
    "fma": r"F(ADD|MUL|FMA|SWZADD)2?|H(ADD|MUL|FMA)2",
    "imad": r"I(MAD|MUL|DP)",
    "xu": r"MUFU|I2F|F2I|I2FP|F2F|FRND|POPC|BREV|FLO",
    "fp64": r"D(ADD|MUL|FMA|SETP|MNMX)",
    "memory": r"(LD|ST)[GSCL]?M?|ATOM[GS]?|RED|SHFL",
}


class Code:
    """The machine code of a kernel."""

    def __init__(self, cubin: bytes) -> None:
        """Disassemble what Triton calls ``cubin``."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            self.sass = _tool("nvdisasm", "--print-code", "--no-dataflow", file.name)
            usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        self.registers, self.stack = map(int, found.groups())

    @cached_property
    def instructions(self) -> list[Instruction]:
        """The kernel's own, without those of functions that it calls."""
        lines: list[tuple[str, bool, str | None]] = []
        labels: dict[str | None, int] = {}
        for line in self.sass.splitlines():
            if label := re.match(r"([.$]\S+):", line):
                if label[1].startswith("$"):  # a division by a number of 64 bits, or the like
                    break
                labels[label[1]] = len(lines)
            elif found := re.match(_INSTRUCTION, line):
                to = found["to"] if found["name"].startswith(("BRA", "CALL")) else None
                lines.append((found["name"], bool(found["guard"] or found["if"]), to))
        return [Instruction(name, guarded, labels.get(to)) for name, guarded, to in lines]

    def spilled(self, repeats: int) -> float:
        """Return the share of instructions that access local memory, where registers lack.

        Kernels have no addresses of other kinds that a generic load or store could be of.
        """
        counts = self.path(repeats)
        local = re.compile(r"(LD|ST)(L|\.).*")
        return sum(n for name, n in counts.items() if local.match(name)) / counts.total()

    def path(self, repeats: int) -> Counter[str]:
        """Count the instructions of a thread by name, loops counted ``repeats`` times.

        Where the code branches, the way is taken that moves more bytes of global memory, and of two
        with as many that of fewer instructions: whole blocks, without masks.
        """
        code, times = self.instructions, self._times(repeats)
        best: list[tuple[float, float, int | None]] = [(0.0, 0.0, None)] * (len(code) + 1)
        for i in reversed(range(len(code))):
            name, guarded, target = code[i]
            ways = [i + 1] if guarded or not name.startswith(("BRA", "EXIT", "RET")) else []
            if target is not None:
                ways.append(max(target, i + 1))  # from the end of a loop on
            moved, rest, way = max(((*best[j][:2], j) for j in ways), default=(0.0, 0.0, None))
            best[i] = moved + times[i] * code[i].width, rest - times[i], way
        counts: Counter[str] = Counter()
        at: int | None = 0
        while at is not None and at < len(code):
            counts[code[at].name] += times[at]
            at = best[at][2]
        return counts

    def _times(self, repeats: int) -> list[float]:
        """Return how often each instruction is executed.

        Of a loop that the compiler has unrolled, another is left for the rest. The one that loads
        least handles one message, the one that loads most handles as many times more.
        """
        code = self.instructions
        times = [1.0] * len(code)
        ends = [(n, i.target) for n, i in enumerate(code) if i.target is not None and i.target <= n]
        loops = [slice(start, end + 1) for end, start in ends]
        loads = [sum(i.name.startswith("LDG") for i in code[loop]) for loop in loops]
        for loop, count in zip(loops, loads, strict=True):
            if count:
                share = repeats * min(filter(None, loads)) / count if count == max(loads) else 0.0
                times[loop] = [share] * (loop.stop - loop.start)
        return times


# such as "/*0f70*/  @!P6 BRA `(.L_x_1) ;" or, where all threads share a condition, "BRA.U UP0, `("
_INSTRUCTION = re.compile(
    r"\s+/\*\w+\*/\s+(?P<guard>@!?\w+\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?: (?P<if>[^`;]*\w, )?`\((?P<to>\.L\w+)\))?.*;"
)


def _tool(name: str, *arguments: str) -> str:
    """Run a program of Triton's wheel; return what it prints."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


# ---- bounds -------------------------------------------------------------------------------------


def cycles(counts: Counter[str], gpu: Gpu) -> dict[str, float]:
    """Return the cycles for which a warp keeps each unit of a multiprocessor busy."""
    used: Counter[str] = Counter(issue=counts.total())
    for name, count in counts.items():
        instruction = Instruction(name, False, None)
        if (unit := instruction.unit) is not None:
            used[unit] += count * max(1, instruction.width // 4)  # 4 bytes a lane and cycle
    used["fma"] += used["imad"]
    return {unit: 32 * count / gpu.lanes[unit] for unit, count in used.items()}


def facts(launch: Launch, elements: int, moved: float, gpu: Gpu) -> Row:
    """Return what the table says of a kernel on a GPU.

    Args:
        elements: that the launch handles.
        moved: bytes of global memory for each of them.
    """
    code = launch.code
    counts = code.path(VOTERS)
    busy = cycles(counts, gpu)
    unit = max(busy, key=lambda unit: busy[unit])
    of_thread = elements / launch.threads
    capacity = gpu.multiprocessors * gpu.clock * 32 * of_thread / busy[unit]
    return {
        "registers": code.registers,
        "spilled": round(code.spilled(VOTERS), 4),
        "instructions": round(counts.total() / of_thread, 1),
        "over_hbm": round(capacity / (gpu.bandwidth / moved), 2),
        "limit": unit,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--cases", nargs="+", choices=arguments_of(64, "meta"), metavar="CASE")
    return parser.read(arguments, gpus=["H100"], cases=["encode_signs", "compare_sum, 1 bit"])


def main(args: argparse.Namespace) -> None:
    os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported
    try:
        import triton
    except ImportError as error:
        raise RunFailed("Triton is not installed: type pip install -e '.[test]'") from error
    from dlion.kernels import triton_cuda

    made = arguments_of(ELEMENTS, "cpu")
    columns = [f"{gpu}: regs | instr. | / HBM | limit" for gpu in args.gpus]
    print(f"Triton {triton.__version__}\n")
    print(f"| case | bytes | {' | '.join(columns)} |\n|{' --- |' * (2 + 4 * len(columns))}")
    rows: list[Row] = []
    for case in args.cases or made:
        name, arguments = case.partition(",")[0], made[case]()
        moved = bytes_moved(name, arguments) / ELEMENTS
        found: list[Row] = []
        for gpu in map(GPUS.__getitem__, args.gpus):
            with compiling(gpu.capability) as launches:
                kernel(triton_cuda, name)(*arguments)
            found.append({"gpu": gpu.name, **facts(launches[0], ELEMENTS, moved, gpu)})
        cells = "".join(
            f" {row['registers']} | {row['instructions']} | {row['over_hbm']} | {row['limit']} |"
            for row in found
        )
        print(f"| {case} | {moved:.4g} |{cells}", flush=True)
        rows.append({"case": case, "bytes": moved, "gpus": found})
    data = {"triton": triton.__version__, "commit": commit(), "rows": rows}
    write_atomically(args.output / "kernel_code.json", json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
