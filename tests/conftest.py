"""Shared by all tests: one compute thread, and what marks mean."""

import fcntl
import gc
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from dlion.methods import METHODS
from dlion.suite.machine import cores
from dlion.workers import Workers
from tests.support.compositions import remember_compositions
from tests.support.markers import (  # noqa: F401 - pytest finds them here
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
)

os.environ.setdefault("WANDB_MODE", "offline")
# torch asks the driver without starting CUDA, which must not happen before a fork
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
torch.set_num_threads(1)
remember_compositions()
# a shell ignores the one in what ends in &, nohup the other, and children would ignore them too
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return a process more than there are cores, as some tests wait; each needs a gigabyte."""
    return min(cores(), 4) + 1


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.runs import start_fork_server

    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        # with a GPU, train.py would train there
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start_fork_server()


@pytest.fixture(scope="session", autouse=True)
def kernels_on_disk(tmp_path_factory) -> None:
    """Compile the kernels of each method in one of several test processes, to the disk of all.

    They begin in different places, and who comes second waits.
    """
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        share = len(METHODS) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = share * int(worker.removeprefix("gw"))
        for name in [*METHODS][first:] + [*METHODS][:first]:
            with (tmp_path_factory.getbasetemp().parent / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                params, options = [torch.nn.Parameter(torch.zeros(8, 8))], METHODS[name].options
                METHODS[name].cls(params, workers=Workers(local=2), **options).prepare()


@pytest.fixture(scope="session", autouse=True)
def only_what_is_new(kernels_on_disk) -> None:
    """Let nothing that is imported by now be looked through again, nor copied by forks."""
    gc.freeze()
