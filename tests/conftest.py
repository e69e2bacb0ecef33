"""Shared by all tests: one compute thread, and a way to run real worker processes."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "offline")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what ends in &
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children would ignore Ctrl-C too

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def train_py() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``train.py`` with overrides, as a user would: see tests.runs.train."""
    from tests.runs import train

    return train
