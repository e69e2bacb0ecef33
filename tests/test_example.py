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


@pytest.mark.parametrize(
    ("example", "processes"),
    [("accelerate_loop", 2), ("hf_trainer", 2), ("lightning_trainer", 2), ("fsdp2", 4)],
)
def test_a_framework_trains_and_sends_no_second_average(example, processes):
    page = f"examples/{example}.py"
    (typed,) = [words(c.text) for c in commands() if c.page == page]
    assert typed == ["torchrun", f"--nproc_per_node={processes}", page]
    launch = ["-m", "torch.distributed.run", "--standalone", typed[1]]
    run = python(*launch, "tests/with_operators.py", page)
    assert run.returncode == 0, run.stderr
    said = re.search(r"accuracy ([\d.]+)%, ([\d,]+) bytes sent .*: ([\d,]+)", run.stdout)
    assert said is not None, run.stdout
    accuracy, sent, dense = said.groups()
    assert float(accuracy) > 85
    assert 25 * int(sent.replace(",", "")) < int(dense.replace(",", ""))
