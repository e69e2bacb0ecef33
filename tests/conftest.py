"""Shared by all tests: one compute thread, and what marks mean."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.markers import (  # noqa: F401 - pytest finds them here
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
)

os.environ.setdefault("WANDB_MODE", "offline")
torch.set_num_threads(1)
# a shell ignores the one in what ends in &, nohup the other, and children would ignore them too
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def only_what_is_new() -> None:
    """Let nothing that is imported by now be looked through again, nor copied by forks."""
    gc.freeze()
