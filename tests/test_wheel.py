"""The wheel trains away from the checkout, with nothing beside it but what it asks for.

So do README's library part, examples and the suite, beside what their pages say to install.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.support.readmes import Command, commands, words
from tests.test_readmes import PRELUDE

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
def wheel(tmp_path_factory) -> Path:
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
    (made,) = wheels.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel) -> Callable[..., Path]:
    """Make the environment after ``pip install`` of some words, with ``examples`` in its folder.

    The wheel is installed in it; what pip would fetch for that is linked from this environment.
    """
    made: dict[tuple[str, ...], Path] = {}

    def install(*asked: str) -> Path:
        if asked not in made:
            made[asked] = place = tmp_path_factory.mktemp("installed")
            venv.create(place)
            pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
            own = ["--python", place / "bin" / "python"]
            command = [*pip, *own, "install", "--no-deps", "--no-index", wheel]
            subprocess.run(command, env=away_from_here(), check=True)
            for name in needed(*(re.sub(r"^\.", "dlion", word) for word in asked)) - {"dlion"}:
                bring(name, place)
            for name in ("examples", "conf", "train.py"):
                (place / name).symlink_to(ROOT / name)
        return made[asked]

    return install


@pytest.fixture(scope="module")
def place(installed) -> Path:
    """A folder with ``bin/python`` of an environment that has the wheel and what it asks for."""
    return installed(".")


def needed(*asked: str) -> set[str]:
    """The names of what pip installs for requirements, with all that these need in turn."""
    waiting = [*map(Requirement, asked)]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) not in found:
                found.add((requirement.name, extra))
                lines = importlib.metadata.requires(requirement.name) or []
                waiting += [
                    each
                    for each in map(Requirement, lines)
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in found}


def bring(name: str, place: Path) -> None:
    """Link what is installed under a name here into another environment, with its commands."""
    distribution = importlib.metadata.distribution(name)
    (packages,) = place.glob("lib/python*/site-packages")
    for part in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (packages / part).exists():
            (packages / part).symlink_to(distribution.locate_file(part))
    for command in distribution.entry_points.select(group="console_scripts"):
        script = place / "bin" / command.name
        called = f"from {command.module} import {command.attr} as main\nmain()\n"
        script.write_text(f"#!{place}/bin/python\n{called}")
        script.chmod(0o755)


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


def test_a_hydra_program_beside_the_wheel_hears_nothing_of_it(installed):
    """Its plugins are looked for in every program of an environment that has Hydra."""
    code = """
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
print([kind.__name__ for kind in Plugins.instance().discover(Launcher)])
"""
    run = start(installed(".", "hydra-core"), "-W", "error", "-c", code)
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
    said = (run.communicate(timeout=120)[1] for run in runs)
    # on a slow machine all say that they still load
    commands, trained, loaded = (re.sub("still loading .*\n", "", text) for text in said)
    assert [run.returncode for run in runs] == [0, 1, 1], commands
    assert missing in commands
    assert all(line.startswith("error: ") for line in commands.splitlines())
    assert trained == f"error: hydra {missing}"
    assert loaded.endswith(missing)


def typed_in(place: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Type a line for a shell where ``bin`` of an environment comes first."""
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    env = away_from_here() | {"PATH": path} | variables
    return subprocess.run(
        ["bash", "-c", line], cwd=place, env=env, capture_output=True, text=True, timeout=300
    )


def asked_for(command: Command) -> tuple[str, ...]:
    """What a command of pip installs; none if it is another command."""
    program, *others = words(command.text) if not command.python else [""]
    return tuple(others[1:]) if program == "pip" else ()


def test_the_library_part_of_the_readme_needs_what_it_installs_alone(installed):
    lines = (ROOT / "README.md").read_text().splitlines()
    end = lines.index("## Try the suite")
    part = [c for c in commands() if c.page == "README.md" and c.line <= end]
    (asked,) = filter(None, map(asked_for, part))
    (snippet,) = [command.text for command in part if command.python]
    (launch,) = [c.text for c in part if c.text.startswith("torchrun")]
    place = installed(*asked)
    (place / "snippet.py").write_text(PRELUDE + snippet)
    for line in ("python snippet.py", launch):
        done = typed_in(place, line)
        assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy 9\d\.\d%, 7\.\d kB sent a step", done.stdout), done.stdout


EXAMPLES = [
    f"examples/{name}.py" for name in ("accelerate_loop", "hf_trainer", "lightning_trainer")
]


@pytest.mark.parametrize("page", [*EXAMPLES, "examples/fsdp2.py"])
def test_an_example_needs_what_it_says_alone(installed, page):
    install, launch = [command for command in commands() if command.page == page]
    done = typed_in(installed(*asked_for(install)), launch.text, DLION_KERNELS="reference")
    assert done.returncode == 0, done.stderr
    assert "accuracy 9" in done.stdout


@pytest.mark.parametrize("page", EXAMPLES)
def test_an_example_without_its_framework_says_what_to_type(installed, page):
    install, _ = [command for command in commands() if command.page == page]
    done = typed_in(installed("."), f"python {page}")
    assert done.returncode == 1
    said = re.fullmatch(r"error: \w+ is not installed: type (.*)\n", done.stderr)
    assert said is not None and said[1] == install.text, done.stderr


def test_elastic_workers_need_what_the_example_says_alone(installed):
    install, *_ = [c for c in commands() if c.page == "examples/elastic.py"]
    place = installed(*asked_for(install))
    lines = "trap 'kill $(jobs -p)' EXIT; coproc dlion lighthouse --bind 127.0.0.1:0;"
    lines += " read -ru ${COPROC[0]} _ _ address _; address=${address%;};"
    lines += " python examples/elastic.py $address & python examples/elastic.py $address"
    done = typed_in(place, lines, DLION_KERNELS="reference", RUST_LOG="error")
    assert done.returncode == 0, done.stderr
    assert "accuracy 9" in done.stdout
    missing = typed_in(installed("."), "python examples/elastic.py 127.0.0.1:1")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert missing.stderr.endswith("which is not installed: type pip install 'dlion[elastic]'\n")


@pytest.mark.parametrize(
    ("extras", "settings"),
    [
        (".[suite]", "workers=2 processes=1"),
        (".[suite,elastic]", "workers=1 elastic=true"),
        (".[suite,tensorboard]", "workers=2 processes=1 logger=tensorboard"),
    ],
)
def test_the_suite_needs_what_its_extras_bring_alone(installed, extras, settings):
    place = installed(extras)
    small = "model=linear dataset=mnist5k steps=2 eval_every=2 output_dir=out"
    done = typed_in(place, f"python train.py {small} {settings}", DLION_KERNELS="reference")
    assert done.returncode == 0, done.stderr
    for line in ("dlion report out", "dlion table out", "dlion plot out", "dlion export out"):
        done = typed_in(place, line)
        assert done.returncode == 0, f"{line}: {done.stderr}"
