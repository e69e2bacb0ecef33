"""The Triton kernels compile for GPUs that need not be there, to code that keeps what is promised.

Every version of Triton that users get compiles for every kind of GPU. Those that are not installed
come from the package index, once, into a folder of the user's cache.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

# torch's wheels for CUDA pin Triton: 2.11 takes 3.6.0, 2.12 and 2.13 take 3.7.1; then the newest
# Each compiles for A100 or RTX PRO 6000 Blackwell, and the installed one for H100 too.
VERSIONS = {"3.6.0": (120,), "3.7.1": (120,), "3.9.0": (80,)}
# The assembler that 3.6.0 has for Blackwell fuses packed products and sums (mul.rn.f32x2,
# add.rn.f32x2), although it is told not to: results differ from the reference by a rounding.
FUSING = [("3.6.0", 120)]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlion"

Row = dict[str, Any]


def compiled(*arguments: str, folder: Path | None = None) -> list[Row]:
    """Compile kernels, with the Triton of a folder or the installed one."""
    paths = [folder, os.environ.get("PYTHONPATH"), ROOT / "src"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    command = [sys.executable, Path(__file__).with_name("compiled.py"), *arguments]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@cache
def triton_of(number: str) -> Path | None:
    """Return a folder with a version of Triton, None for the installed one; or skip the test."""
    if number == version("triton"):
        return None
    folder = CACHE / f"triton-{number}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as part:  # another process may do the same
            command = ["pip", "install", "--quiet", "--no-deps", f"triton=={number}"]
            command = [sys.executable, "-m", *command, "--target", f"{part}/triton"]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                reason = (run.stderr.strip() or "no message").splitlines()[-1]
                pytest.skip(f"Triton {number} could not be installed: {reason}")
            if not folder.exists():
                Path(part, "triton").rename(folder)
    return folder


def check(rows: list[Row], fusing: bool = False) -> None:
    """Require code with the bits of the reference, wide accesses, and hardly any spills.

    Args:
        fusing: whether the compiler is known to fuse products and sums; it still has to do so.
    """
    assert {row["kernel"]: row["error"] for row in rows if "error" in row} == {}
    assert len(rows) >= 20
    assert all(row["registers"] > 0 for row in rows)
    assert {name(row): row["spilled"] for row in rows if row["spilled"] > 0.01} == {}
    assert {name(row): row["narrow"] for row in rows if row["narrow"]} == {}
    inexact = {name(row): row["inexact"] for row in rows if row["inexact"]}
    if fusing:
        assert set().union(*inexact.values()) == {"FFMA"}
    else:
        assert inexact == {}


def name(row: Row) -> str:
    return f"{row['kernel']}, {row['label']}"


@pytest.mark.slow
def test_kernels_compile_for_an_h100():
    rows = compiled("90")
    assert len(rows) > 50  # with all types, sizes and addresses
    check(rows)


@pytest.mark.triton
@pytest.mark.parametrize("number", VERSIONS)
def test_kernels_compile_with_each_triton_for_several_gpus(number):
    rows = compiled(*map(str, VERSIONS[number]), "--some", folder=triton_of(number))
    assert {row["triton"] for row in rows} == {number}
    for capability in VERSIONS[number]:
        of_it = [row for row in rows if row["capability"] == capability]
        check(of_it, fusing=(number, capability) in FUSING)
