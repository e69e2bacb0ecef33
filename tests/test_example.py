"""The example script trains as its first lines say to start it, on its own."""

import re
import shutil

import pytest
import torch

from tests.support.readmes import commands, words
from tests.support.runs import python

pytestmark = pytest.mark.slow


def test_plain_loop_says_what_starts_it():
    run = python("examples/plain_loop.py")
    command = "torchrun --nproc_per_node=4 examples/plain_loop.py"
    assert (run.returncode, run.stderr) == (2, f"error: type {command}\n")


def test_plain_loop_under_torchrun():
    _, typed = [words(c.text) for c in commands() if c.page == "examples/plain_loop.py"]
    assert typed[0] == "torchrun"
    run = python("-m", "torch.distributed.run", "--standalone", *typed[1:])
    assert run.returncode == 0, run.stderr
    accuracy, sent = re.search(r"accuracy ([\d.]+)%, ([\d.]+) kB", run.stdout).groups()
    assert float(accuracy) > 85
    assert float(sent) < 2 * 3 / 4 * 38_410 / 8 / 1000 * 1.02


@pytest.mark.parametrize(
    ("example", "processes"),
    [("accelerate_loop", 2), ("hf_trainer", 2), ("lightning_trainer", 2), ("fsdp2", 4)],
)
def test_a_framework_trains_and_sends_no_second_average(example, processes):
    page = f"examples/{example}.py"
    _, typed = [words(c.text) for c in commands() if c.page == page]
    assert typed == ["torchrun", f"--nproc_per_node={processes}", page]
    launch = ["-m", "torch.distributed.run", "--standalone", typed[1]]
    run = python(*launch, "tests/support/with_operators.py", page)
    assert run.returncode == 0, run.stderr
    said = re.search(r"accuracy ([\d.]+)%, ([\d,]+) bytes sent .*: ([\d,]+)", run.stdout)
    assert said is not None, run.stdout
    accuracy, sent, dense = said.groups()
    assert float(accuracy) > 85
    assert 25 * int(sent.replace(",", "")) < int(dense.replace(",", ""))


@pytest.mark.parametrize(
    ("example", "last"),
    [
        ("accelerate_loop", "epoch2"),
        ("hf_trainer", "checkpoint-128"),
        ("lightning_trainer", "epoch=1.ckpt"),
    ],
)
def test_a_framework_resumes_to_the_bit_with_every_workers_state(example, last, tmp_path):
    """After its last checkpoint is removed it is made again, of the one before."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, "tests/support/with_operators.py", f"examples/{example}.py", tmp_path]
    states = []
    for _ in range(2):
        run = python(*map(str, command))
        assert run.returncode == 0, run.stderr
        found = sorted(tmp_path.glob(f"{last}*/*.worker?of2.pt"))
        assert len(found) == 2, sorted(tmp_path.rglob("*"))
        states.append([torch.load(file, weights_only=True) for file in found])
        for path in tmp_path.glob(f"{last}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not any(map(torch.equal, *map(momenta, states[0])))
    for first, second in zip(*states, strict=True):
        assert first["workers_apart"] == second["workers_apart"]  # steps and parameters
        assert all(map(torch.equal, momenta(first), momenta(second)))


def momenta(file: dict) -> list[torch.Tensor]:
    return [each["momentum"] for each in file["state"].values()]
