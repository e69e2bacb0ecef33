"""The wheel trains away from the checkout, with nothing beside it but what it asks for."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

# what pip install dlion brings along, apart from what that needs itself
ASKED_FOR = {"torch", "numpy", "numba"}
TRAINING = """
import sys

import torch
import torch.distributed as dist

import dlion

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(rank)
x = torch.randn(64, 32)  # every worker has its own data
y = x[:, :1] - x[:, 1:2]
model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = dlion.DLion(model.parameters(), lr=0.01, overlap=True, bucket_cap_mb=1)
losses = []
for _ in range(60):
    losses.append(torch.nn.functional.mse_loss(model(x), y))
    optimizer.zero_grad()
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0] / 2, losses
print(dlion.__file__)
print(*(name for name in sys.modules if name.startswith("dlion.suite")))
print(sum(parameter.sum() for parameter in model.parameters()).item())
dist.destroy_process_group()
"""
EVERY_OPTIMIZER = """
import inspect
import sys

import torch

import dlion

assert dlion.optim.DLion is dlion.DLion  # before anything else has imported it
for name in dlion.__all__:
    if name == "load_model":
        continue
    kind = getattr(dlion, name)
    if not isinstance(kind, type):
        continue
    if issubclass(kind, torch.optim.Optimizer) and not inspect.isabstract(kind):
        parameter = torch.nn.Parameter(torch.ones(8, 8))
        optimizer = kind([parameter], lr=0.01)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        print(name)
print(*(name for name in sys.modules if name.startswith("dlion.suite")), file=sys.stderr, end="")
"""
EVERY_COMMAND = """
import sys

from dlion.__main__ import COMMANDS, main

for name in COMMANDS:
    try:
        main([name, "outputs"])
    except SystemExit as end:
        assert end.code in (1, 2), name  # of one sentence each
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with ``bin/python`` of an environment that has the wheel and what it asks for."""
    pytest.importorskip(
        "build.__main__",
        reason="the wheel is made with build, which is not installed: type pip install '.[test]'",
    )
    place = tmp_path_factory.mktemp("wheel")
    source, wheels = place / "source", place / "wheels"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # isolated, it would fetch setuptools, but tests are to run offline
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, source]
    subprocess.run(build, cwd=place, env=away_from_here(), check=True)
    shutil.rmtree(source)
    venv.create(place)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    own = ["--python", place / "bin" / "python"]
    install = [*pip, *own, "install", "--no-deps", "--no-index", *wheels.iterdir()]
    subprocess.run(install, env=away_from_here(), check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (wheel,) = importlib.metadata.distributions(path=[str(packages)])
    for name in needed_by(wheel):
        bring(name, packages)
    return place


def needed_by(distribution: importlib.metadata.Distribution) -> set[str]:
    """The names of all that a distribution needs here without its extras, and they in turn."""
    found, waiting = set(), [distribution]
    while waiting:
        for line in waiting.pop().requires or []:
            asked = Requirement(line)
            here = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if here and asked.name not in found:
                found.add(asked.name)
                waiting.append(importlib.metadata.distribution(asked.name))
    return found


def bring(name: str, packages: Path) -> None:
    """Link what is installed under a name here into another environment."""
    distribution = importlib.metadata.distribution(name)
    for part in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (packages / part).exists():
            (packages / part).symlink_to(distribution.locate_file(part))


def away_from_here() -> dict[str, str]:
    """The variables of the tests, without what would find this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def start(place: Path, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    env = away_from_here() | variables
    command = [place / "bin" / "python", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, env=env, stdout=pipe, stderr=pipe, text=True)


def test_two_processes_train_with_the_wheel_alone(place):
    (place / "training.py").write_text(TRAINING)
    processes = [  # the one whose kernels are not compiled starts sooner and gets the same
        start(place, "training.py", rank, place / "meeting", DLION_KERNELS=kernels)
        for rank, kernels in enumerate(("compiled", "reference"))
    ]
    printed = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        file, suite, parameters = stdout.splitlines()
        assert Path(file).is_relative_to(place)
        assert not suite
        printed.append(parameters)
    assert printed[0] == printed[1]


def test_no_optimizer_needs_the_suite(place):
    run = start(place, "-c", EVERY_OPTIMIZER, DLION_KERNELS="reference")
    stdout, suite = run.communicate(timeout=120)
    assert run.returncode == 0 and not suite, suite
    methods = [yaml.safe_load(file.read_text()) for file in (ROOT / "conf/optimizer").glob("*")]
    assert {f"dlion.optim.{name}" for name in stdout.split()} == {m["_target_"] for m in methods}


def test_a_hydra_program_beside_the_wheel_hears_nothing_of_it(place, tmp_path):
    """Its plugins are looked for in every program of an environment that has Hydra."""
    hydra = importlib.metadata.distribution("hydra-core")
    for name in {"hydra-core"} | needed_by(hydra):
        bring(name, tmp_path)
    code = """
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
print([kind.__name__ for kind in Plugins.instance().discover(Launcher)])
"""
    run = start(place, "-W", "error", "-c", code, PYTHONPATH=str(tmp_path))
    stdout, stderr = run.communicate(timeout=120)
    assert (run.returncode, stderr) == (0, "") and "BasicLauncher" in stdout, stderr


def test_the_wheel_asks_for_little_and_has_types(place):
    (packages,) = place.glob("lib/python*/site-packages")
    found = importlib.metadata.distributions(path=[str(packages)])
    (wheel,) = (distribution for distribution in found if distribution.name == "dlion")
    asked = map(Requirement, wheel.requires or [])
    assert {each.name for each in asked if "extra" not in str(each.marker)} == ASKED_FOR
    assert (packages / "dlion" / "py.typed").exists()


def test_what_needs_the_suite_says_so(place):
    missing = "is not installed: type pip install 'dlion[suite]'\n"
    train, load = (ROOT / "train.py",), ("-c", "from dlion import load_model")
    runs = [start(place, *arguments) for arguments in (("-c", EVERY_COMMAND), train, load)]
    (_, commands), (_, trained), (_, loaded) = (run.communicate(timeout=120) for run in runs)
    assert [run.returncode for run in runs] == [0, 1, 1], commands
    assert missing in commands
    assert all(line.startswith("error: ") for line in commands.splitlines())
    assert trained == f"error: hydra {missing}"
    assert loaded.endswith(missing)
