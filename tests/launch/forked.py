"""train.py in processes that are forked where everything is imported already: a start costs 0.1 s.

What a user types goes through train.py itself, with its own arguments, output and exit code; only
Python's start and the imports are shared.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT

_PRELOADED = ["tests.launch.preloaded"]


def train(*overrides: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``train.py`` with overrides, as the fixture train_py does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        process = context.Process(target=_main, args=(overrides, env or {}, Path(directory)))
        process.start()
        process.join(300)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"train.py {' '.join(overrides)} takes more than 300 s")
        stdout, stderr = ((Path(directory) / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(overrides, process.exitcode, stdout, stderr)


def _main(overrides: tuple[str, ...], env: dict[str, str], directory: Path) -> None:
    os.chdir(ROOT)
    os.environ |= env
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
    sys.argv = ["train.py", *overrides]
    runpy.run_path("train.py", run_name="__main__")
