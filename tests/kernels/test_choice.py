"""Which kernels a GPU gets: Triton's, if the machine can build what launches them."""

import importlib.util
from pathlib import Path

import pytest

from dlion import kernels
from tests.support.runs import python

pytestmark = [
    pytest.mark.slow,
    # not importorskip: tests of the kernels choose the interpreter before Triton is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton"),
]

CHOOSE = """
import os, sysconfig, sys, torch
from torch._subclasses import FakeTensorMode
from dlion import kernels

folder, *compiler = sys.argv[1:]
os.environ["PATH"] = folder
os.environ.pop("CC", None)
os.environ.update({"CC": name for name in compiler})
real = sysconfig.get_path
sysconfig.get_path = lambda name, *more: folder if name == "include" else real(name, *more)
with FakeTensorMode():  # which has CUDA tensors where there is no GPU
    vector = torch.empty(64, device="cuda")
print(*(kernels.choose(vector).__name__ for _ in range(2)))
"""


def chosen(folder: Path, *files: str, compiler: str | None = None) -> tuple[str, str]:
    """Return which module CUDA tensors get, twice, and what is printed about it.

    Args:
        folder: where programs and headers are looked for.
        files: those that are there.
        compiler: what the variable ``CC`` names.
    """
    for name in files:
        (folder / name).touch(mode=0o755)
    done = python("-c", CHOOSE, folder, *filter(None, [compiler]))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second
    return first.rpartition(".")[2], done.stderr


@pytest.mark.parametrize(("program", "named"), [("clang", None), ("mine", "mine")])
def test_triton_runs_where_it_finds_a_compiler(tmp_path, program, named):
    module, errors = chosen(tmp_path, "Python.h", program, compiler=named)
    assert module == "triton_cuda" and "RuntimeWarning" not in errors


def test_without_a_compiler_the_reference_runs_after_one_warning(tmp_path):
    module, errors = chosen(tmp_path, "Python.h")
    assert module == "reference"
    assert errors.count("RuntimeWarning: kernels run in plain torch, which is much slower") == 1
    assert "Triton needs a C compiler: install gcc or clang, or let CC name one" in errors
    assert chosen(tmp_path, "gcc", compiler="missing")[0] == "reference"


def test_so_it_does_without_the_headers_of_python(tmp_path):
    module, errors = chosen(tmp_path, "gcc")
    assert module == "reference" and "install the headers of this Python (python3-dev)" in errors


def test_a_triton_that_fuses_products_and_sums_is_not_used():
    assert kernels._inexact("3.6.0", (9, 0)) is None
    assert kernels._inexact("3.7.1", (12, 0)) is None
    assert "3.7 or newer for this GPU, not 3.6.0" in (kernels._inexact("3.6.0", (12, 0)) or "")
