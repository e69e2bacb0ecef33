"""What trains alike in two trees is found equal, and one bit that differs is found."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.runs import python

pytestmark = pytest.mark.slow

# the lowest bit of one parameter, in the first step of one method only
ONE_BIT = """

def _nudged(self, closure=None, _step=GLion.step):
    loss = _step(self, closure)
    param = self.param_groups[0]["params"][0].data
    if self.param_groups[0]["steps"] == 1 and param.element_size() == 4:
        param.view(-1)[:1].view(__import__("torch").int32).bitwise_xor_(1)
    return loss


GLion.step = _nudged
"""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take those that are not compiled for a tree."""
    monkeypatch.setenv("DLION_KERNELS", "reference")
    monkeypatch.setenv("COLUMNS", "120")


def git(directory: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This tree, committed."""
    for name in ("src", "conf", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    git(tmp_path, *author, "commit", "--quiet", "--message", "before")
    return tmp_path


def test_one_bit_of_one_step_of_one_method_is_found(checkout: Path):
    with (checkout / "src" / "dlion" / "methods" / "dense.py").open("a") as file:
        file.write(ONE_BIT)
    script = checkout / "benchmarks" / "same_bits.py"
    done = python(script, "HEAD", "--smoke", "--only", "lion")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 3 cases differ" in done.stdout
    assert "DIFFERENT" in done.stdout
    assert "2x2 overlap: " in done.stdout
    assert len(git(checkout, "worktree", "list").splitlines()) == 1  # HEAD's is gone


def test_another_checkout_that_is_the_same_is_found_equal():
    case = "graddrop density=1.0"
    done = python("benchmarks/same_bits.py", "--tree", ROOT, "--only", case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 1 cases are equal" in done.stdout


def test_a_commit_that_is_not_there_is_named():
    done = python("benchmarks/same_bits.py", "no-such-commit", "--only", "g_lion")
    assert done.returncode == 2
    assert "no-such-commit cannot be checked out" in done.stderr
