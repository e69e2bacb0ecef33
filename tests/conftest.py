"""Shared by all tests: one compute thread, and what marks mean."""

import os
import signal
from pathlib import Path

import torch

from tests.markers import (  # noqa: F401 - pytest finds them here
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
)

os.environ.setdefault("WANDB_MODE", "offline")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what ends in &
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children would ignore Ctrl-C too

ROOT = Path(__file__).resolve().parents[1]
