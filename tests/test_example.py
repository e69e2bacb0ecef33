"""The example script trains as its first lines say to start it, on its own."""

import re

import pytest

from tests.readmes import commands, words
from tests.runs import python

pytestmark = pytest.mark.slow


def test_plain_loop_says_what_starts_it():
    run = python("examples/plain_loop.py")
    command = "torchrun --nproc_per_node=4 examples/plain_loop.py"
    assert (run.returncode, run.stderr) == (2, f"error: type {command}\n")


def test_plain_loop_under_torchrun():
    (typed,) = [words(c.text) for c in commands() if c.page == "examples/plain_loop.py"]
    assert typed[0] == "torchrun"
    run = python("-m", "torch.distributed.run", "--standalone", *typed[1:])
    assert run.returncode == 0, run.stderr
    accuracy, sent = re.search(r"accuracy ([\d.]+)%, ([\d.]+) kB", run.stdout).groups()
    assert float(accuracy) > 85
    assert float(sent) < 2 * 3 / 4 * 101_770 / 8 / 1000 * 1.02
