"""Two trees that train alike are found equal, and one bit that differs is found."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runs import python

pytestmark = pytest.mark.slow

# the lowest bit of one parameter, in the first step only
ONE_BIT = """

def _nudged(self, closure=None, _step=DistributedOptimizer.step):
    loss = _step(self, closure)
    if self.param_groups[0]["steps"] == 1:
        param = self.param_groups[0]["params"][0].data
        param.view(-1)[:1].view(__import__("torch").int32).bitwise_xor_(1)
    return loss


DistributedOptimizer.step = _nudged
"""


def same_bits(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("benchmarks/same_bits.py", *arguments, env={"COLUMNS": "120"})


def test_a_tree_trains_to_the_bits_of_itself():
    done = same_bits("--tree", str(ROOT), "--smoke", "--only", "dlion_mavo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 2 cases are equal" in done.stdout


def test_one_bit_of_one_step_is_found(tmp_path: Path):
    shutil.copytree(ROOT / "src" / "dlion", tmp_path / "src" / "dlion")
    with (tmp_path / "src" / "dlion" / "optim" / "__init__.py").open("a") as file:
        file.write(ONE_BIT)
    done = same_bits("--tree", str(tmp_path), "--smoke", "--only", "g_lion")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT" in done.stdout
    assert "2x2 overlap: " in done.stdout


def test_a_commit_that_is_not_there_is_named():
    done = same_bits("no-such-commit", "--only", "g_lion")
    assert done.returncode == 2
    assert "no-such-commit cannot be checked out" in done.stderr


def test_a_commit_is_checked_out_and_gone_afterwards():
    def git(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--show-toplevel").stdout.strip() != str(ROOT):
        pytest.skip("the project is not a git checkout here, so it has no commits to compare with")
    before = git("worktree", "list").stdout
    done = same_bits("HEAD", "--only", "graddrop density")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "graddrop density=1.0" in done.stdout
    assert git("worktree", "list").stdout == before
