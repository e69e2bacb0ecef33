"""Every command that a page says to type works, in a shrunken form where it is long.

RULES say, for each program, how a command of it is shrunken, and run or checked as far as this
machine can. A command without a rule fails. Commands of benchmarks are run in tests/benchmarks, the
example's in test_example.py, what builds the site in test_docs.py.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.run as torchrun_command
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig

from dlion.__main__ import COMMANDS
from dlion.errors import UserError
from dlion.suite.compare import plot
from dlion.suite.compare.options import AXES, curves_of
from dlion.suite.config import resolve
from dlion.suite.data.prepare import Texts, prepare
from dlion.suite.launch.check import check_settings
from dlion.suite.settings import NEEDS
from tests.conftest import ROOT
from tests.support.compositions import is_choice
from tests.support.readmes import Command, commands, pages, words
from tests.support.runs import Run

pytestmark = pytest.mark.slow

CONF = ROOT / "conf"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SMALL_RESULTS = "results/cub_bits"
OUT = "@OUT@"  # in a shrunken command: a file or a folder that it may write
RECORDED = r"RUNS|RUN_DIR|outputs|runs(/.*)?"  # what pages call a folder of runs
# what a page leaves to its reader
ANY_RECIPE = (r"^experiment=NAME", "experiment=vote_attack")
ANY_VALUE = {
    "optimizer=NAME": "optimizer=dlion_avg",
    "optimizer.lr=LR": "optimizer.lr=1e-3",
    "elastic=true": "elastic.lighthouse=here",  # what train.py makes of it
}
FEW_STEPS = {"steps": "2", "eval_every": "2", "logger": "none", "processes": "1"}
TINY = {"model.dim": "16", "model.heads": "2", "model.depth": "1", "model.mlp_dim": "16"}
SMALL_MODELS = {
    "vit_cifar": TINY,
    "gpt_tiny": TINY,
    "gpt2": {"model.n_embd": "32", "model.n_layer": "1", "model.n_head": "2"},
    "timm": {"+model.depth": "1", "+model.embed_dim": "48", "+model.num_heads": "2"},
    "resnet18": {"workers": "2", "batch_size": "4"},
}
SMALL_DATA = {
    "imagenet": {"dataset.image_size": "32", "dataset.loaders": "1"},
    "prepared_text": {"dataset.context": "16"},
    "choices": {"dataset.context": "64", "workers": "1", "accumulate": "2"},
    "stdlib_text": {"dataset.max_bytes": "20000"},
}
# what pages let the reader choose, and what is chosen here
CHOICES = {
    "experiment=NAME": "experiment=vote_noniid",
    "optimizer=NAME": "optimizer=dlion_mavo",
    "=LR": "=1e-3",
    "[_full]": "_full",
    "[,VALUE...]": "",
}
# what a block of Python in a page may take for granted: this, a trained model, and a photo
TRAINED, PHOTO = "outputs/pets", "photo.jpg"
PRELUDE = """
import torch
import torch.distributed as dist
import dlion

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
loss = model(torch.randn(3, 4)).square().sum()
batches = [torch.randn(3, 4)]
def loss_of(batch): return model(batch).square().mean()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> "Place":
    return Place(tmp_path_factory.mktemp("readmes"))


@pytest.mark.parametrize("command", commands(), ids=lambda c: f"{c.page}:{c.line}")
def test_what_a_page_says_to_type_works(place, command):
    try_out(place, command)


def test_a_command_without_a_rule_fails(place):
    with pytest.raises(LookupError, match="there is no rule for `python tune"):
        try_out(place, Command("page.md", 1, "python tune.py"))


@pytest.mark.parametrize(
    "text",
    [
        "python train.py optimizer=dlion",
        "python train.py -m optimizer=g_lion,dlion seed=0,1",
        "python train.py worker=4",
        "dlion plot results/nowhere",
        "dlion plott results/mnist5k",
        "dlion dashboard --projects dlion",
        "torchrun --nproc=x train.py",
        "conda env create -f env.yml",
        ".venv/bin/pip install -e '.[tests]'",
    ],
)
def test_a_command_that_is_wrong_fails(place, text):
    refusals = ConfigCompositionException, MissingConfigException, UserError
    with pytest.raises((AssertionError, SystemExit, *refusals)):
        try_out(place, Command("page.md", 1, text))


def test_commands_are_found_wherever_pages_have_them():
    found = {(command.page, command.python) for command in commands()}
    assert {("README.md", False), ("README.md", True), ("train.py", False)} <= found
    assert len([page for page, _ in found if page.startswith("results/")]) > 5


def test_tests_that_pages_name_exist():
    """``tests/FILE.py::NAME``, or ``::NAME`` behind one."""
    named = 0
    for page in pages():
        file = ""
        for path, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", page.read_text()):
            file = path or file
            if test:
                assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{page}: {file}::{test}"
                named += 1
    assert named > 15


def try_out(place: "Place", command: Command) -> None:
    """Run a command, or check it."""
    if command.python:
        block = place.root / f"block-{len(place.tried)}.py"
        block.write_text(PRELUDE + command.text)
        if TRAINED in command.text:
            place.train_on_pictures()
        place.run(block.name)
        return
    text = command.text
    for choice, chosen in CHOICES.items():
        text = text.replace(choice, chosen)
    typed = words(text)
    while typed[0] in ("sudo", "python3", ".venv/bin/python"):
        typed = typed[1:] if typed[0] == "sudo" else ["python", *typed[1:]]
    for pattern, rule in RULES.items():
        if re.match(pattern, " ".join(typed)):
            rule(place, typed)
            return
    raise LookupError(f"there is no rule for `{command.text}`: add one to tests/test_readmes.py")


class Place:
    """A folder to type commands in: the repository's scripts, small data, some recorded runs.

    Attributes:
        tried: the shrunken commands that went well, none of which is run twice.
    """

    def __init__(self, root: Path):
        self.root, self.tried, self._seen = root, set(), set()
        for name in ("train.py", "conf", "examples"):
            (root / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "results", root / "results")  # some commands write there
        (root / "written").mkdir()

    def is_new(self, *things: object) -> bool:
        """Return whether nobody has asked about one of these before."""
        fresh = {*things} - self._seen
        self._seen |= fresh
        return bool(fresh)

    def run(self, *command: str, processes: tuple[dict[str, str], ...] = ({},)) -> None:
        """Run ``python``'s arguments, in processes that differ in their variables."""
        if command in self.tried:
            return
        out = str(self.root / "written" / str(len(self.tried)))
        filled = [word.replace(OUT, out) for word in command]
        for run in [Run(filled, variables, self.root) for variables in processes]:
            done = run.wait()
            printed = f"{done.stdout}\n{done.stderr}"
            assert done.returncode == 0, f"{' '.join(command)} failed:\n{printed}"
        self.tried.add(command)

    def data(self, name: str) -> str:
        """Return a folder of small data in its true format, or an untrained model."""
        if not (self.root / "data").exists():
            write_data(self.root / "data")
        return str(self.root / "data" / name)

    def train_on_pictures(self) -> None:
        """Leave a trained model, and a picture that it has not seen."""
        pictures = self.data("images")
        shutil.copy(next(Path(pictures).rglob("*.PNG")), self.root / PHOTO)
        small = ("dataset=images", f"dataset.path={pictures}", "model=linear", "workers=2")
        few = (*_overrides(FEW_STEPS), "batch_size=2", f"output_dir={TRAINED}")
        self.run("train.py", *small, *few)

    def runs(self) -> str:
        """Return a folder of recorded runs that every figure can be drawn of."""
        path = self.root / "runs"
        swept = ("optimizer=lion_cub", "optimizer.bits=1,2", "workers=2,4")
        small = (
            "dataset=digits",
            "box=true",
            "agreement=true",
            *_overrides(FEW_STEPS),
            "batch_size=2",
        )
        self.run("train.py", "-m", *swept, *small, f"hydra.sweep.dir={path}")
        return str(path)


def write_data(root: Path) -> None:
    """Write small data sets and a model, each in a folder of its name."""
    from dlion.suite.data.tokenizers import load_tokenizer
    from tests.data import formats

    root.mkdir()
    formats.write_classes(root / "images")
    (root / "book.txt").write_text(200 * "a line of a text\n")
    formats.write_cifar(root / "cifar10", count=64)
    formats.write_cifar(root / "cifar100", 100, ("img", "fine_label"), count=200)
    formats.write_imagenet_folders(root / "imagenet")
    formats.write_llama(root / "llama")
    formats.write_tasks(root / "choices")

    texts = Texts(formats.write_documents(root / "documents.jsonl", 200))
    tokenizer = load_tokenizer(str(root / "llama"), "--tokenizer")
    prepare(texts, tokenizer, root / "prepared_text", held_out=10)


# Rules: each is given the words of a command.


def train(place: Place, typed: list[str]) -> None:
    """Compose everything that is typed, and run two steps of the first run unless it is a recipe's.

    Nor is one run that has no setting and no choice which those before it have not. Every recipe is
    run, shrunken, in tests/launch/test_recipes.py.
    """
    if "--help" in typed:
        place.run(*typed[1:])
        return
    config, small = _small_training(place, typed[typed.index("train.py") + 1 :])
    keys = [word.partition("=")[0] for word in small]
    traits = [word if is_choice(key) else key for word, key in zip(small, keys, strict=True)]
    if small and place.is_new(*traits):
        place.run(*small)
    else:
        settings = resolve(config, config.hydra)
        if "path" in settings.dataset:
            settings.dataset.path = str(ROOT)  # what it holds is not looked at
        check_settings(settings)


def train_own(place: Place, typed: list[str]) -> None:
    """Run two steps with components of one's own, which Python finds by a variable."""
    variable, _, *arguments = typed
    own = variable.removeprefix("PYTHONPATH=")
    paths = {"PYTHONPATH": os.pathsep.join([own, os.environ.get("PYTHONPATH", "")])}
    place.run(*arguments, *_overrides(FEW_STEPS), f"output_dir={OUT}", processes=(paths,))


def train_under_torchrun(place: Place, typed: list[str]) -> None:
    """Check torchrun's options with its own parser, and run two processes as it would."""
    options = [re.sub(r"=N$|(?<=restarts)$", "=3", word) for word in typed[1:]]
    if "train.py" not in typed:  # an option that a sentence is about
        torchrun_command.get_args_parser().parse_args([*options, "train.py"])
        return
    torchrun_command.get_args_parser().parse_args(options)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    _train_together(
        place,
        typed,
        [
            {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | address
            for rank in ("0", "1")
        ],
    )


def train_under_srun(place: Place, typed: list[str]) -> None:
    """Run two processes as tasks of a step of SLURM."""
    options = typed[1 : typed.index("python")]
    assert all(re.fullmatch(r"--(nodes|ntasks|ntasks-per-node)=\d+", word) for word in options)
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_JOB_ID": "1", "MASTER_PORT": str(_free_port())}
    _train_together(
        place, typed, [step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    )


def compare(place: Place, typed: list[str]) -> None:
    """Read recorded runs where a page says RUNS, else what it names; write to another place.

    One figure of each kind is drawn; of the others the curves are made.
    """
    arguments = []
    for word in itertools.takewhile(lambda word: word != ">", typed):
        files = sorted(place.root.glob(word)) if "*" in word else []
        arguments += map(str, files) if files else [word]
    for index, word in enumerate(arguments):
        if arguments[index - 1] in ("-o", "--output"):
            arguments[index] = OUT + Path(word).suffix
        elif re.fullmatch(RECORDED, word):
            arguments[index] = place.runs()
        elif word == "results":  # a report of all takes long
            arguments[index] = SMALL_RESULTS
    if arguments[1] == "plot" and not place.is_new(_kind_of_figure(arguments)):
        with contextlib.chdir(place.root):
            options = plot.parse(arguments[2:])
            curves_of(options, options.panels, options.x)
    else:
        place.run("-m", *arguments)


def _kind_of_figure(arguments: list[str]) -> tuple[str, ...]:
    """Return the options that are given, and which axis is asked for."""
    given = [word for word in arguments if word.startswith("--")]
    axes = [word for word in arguments if word in AXES]
    return "figure", *sorted(given), *axes


def write_tables(place: Place, typed: list[str]) -> None:
    """Check that there are pages whose tables would be written: test_readme.py writes some."""
    place.run("-m", "dlion.suite.compare.readme", "--help")
    assert all(list(ROOT.glob(word)) for word in typed if word.endswith(".md"))


def only_options(place: Place, typed: list[str]) -> None:
    """Check that a command has the options that are typed: it needs more than there is here."""
    module, _ = COMMANDS[typed[1]]
    place.run("-m", *typed[:2], "--help")
    source = Path(importlib.util.find_spec(f"dlion.suite.{module}").origin).read_text()
    for word in typed:
        assert not word.startswith("--") or f'"{word}"' in source, f"{typed[1]} has no {word}"


def prepare_text(place: Place, typed: list[str]) -> None:
    """Tokenize documents of ours."""
    if len(typed) == 2:
        place.run("-m", *typed, "--help")
        return
    allowed = {"-o": OUT, "--output": OUT, "--tokenizer": place.data("llama")}
    own = typed[2].endswith(".txt")
    source = f"{place.data('llama')}/../{'book.txt' if own else 'documents.jsonl'}"
    arguments = ["-m", "dlion", "prepare", source]
    for option, value in itertools.pairwise(typed):
        if option.startswith("-"):
            arguments += [option, allowed.get(option, value)]
    place.run(*arguments, *(() if own else ("--tokenizer", allowed["--tokenizer"])))


def files_exist(place: Place, typed: list[str]) -> None:
    """Check that what a program of the system is to read or run is there."""
    for word in typed:
        if "/" in word or word.endswith((".yml", ".yaml", ".toml", ".py")):
            assert (ROOT / word).exists() or ".venv" in word, f"there is no {word}"
    if typed[0] == ".ci/run":
        assert os.access(ROOT / typed[0], os.X_OK)
    if typed[0] == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()


def pip_install(place: Place, typed: list[str]) -> None:
    """Check that the project has the extras that are to be installed."""
    (extras,) = [re.search(r"^\.(?:\[(.*)\])?$", word) for word in typed if word.startswith(".[")
                 or word == "."]  # fmt: skip
    for extra in filter(None, (extras[1] or "").split(",")):
        assert extra in PROJECT["project"]["optional-dependencies"]


def build_reference(place: Place, typed: list[str]) -> None:
    """Check that there is what it is built of: test_docs.py builds it."""
    assert (ROOT / typed[typed.index("-c") + 1] / "conf.py").exists()


def run_pytest(place: Place, typed: list[str]) -> None:
    """Check that there are the markers and the files that are named."""
    files_exist(place, [word.split("::")[0] for word in typed[1:]])
    markers = [line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    arguments = typed[typed.index("pytest") + 1 :]
    for option, value in itertools.pairwise(arguments):
        if option == "-m":
            assert set(re.findall(r"\w+", value)) - {"not", "and", "or"} <= set(markers)


def draw_pictures(place: Place, typed: list[str]) -> None:
    """Draw the one that takes least, and photograph a page if there is a browser."""
    wanted = ["help", *(["page"] if shutil.which("chromedriver") else [])]
    small = ["--results", "results/dlion_theory", "--study", "dlion_theory"]
    place.run(*typed[1:], *small, "--only", *wanted, "-o", OUT)


def run_elsewhere(place: Place, typed: list[str]) -> None:
    """Check that there is the script."""
    assert (ROOT / next(word for word in typed if word.endswith(".py"))).exists()


def module_exists(place: Place, typed: list[str]) -> None:
    """Check that there is the module behind ``-m``."""
    assert importlib.util.find_spec(typed[2]) is not None


def run_code(place: Place, typed: list[str]) -> None:
    """Run what stands behind ``-c``."""
    exec(typed[2], {})


RULES: dict[str, Callable[[Place, list[str]], None]] = {
    r"python train\.py": train,
    r"PYTHONPATH=\S+ python train\.py": train_own,
    r"python results/pictures/draw\.py": draw_pictures,
    r"torchrun (?!.*examples/)": train_under_torchrun,
    r"srun .*python train\.py": train_under_srun,
    r"python -m dlion\.suite\.compare\.readme": write_tables,
    r"dlion (board|dashboard|export|lighthouse|sync)": only_options,
    r"dlion prepare": prepare_text,
    r"dlion": compare,
    r"(python (-W ignore )?|torchrun .*)(benchmarks|examples)/": run_elsewhere,
    r"python -m tests\.cuda\.report": module_exists,  # tests/cuda makes its table
    r"python -c": run_code,
    r"(python -m )?pytest": run_pytest,
    r"(\.venv/bin/)?pip install": pip_install,
    r"python -m venv|conda env create|\.ci/run|pre-commit|(\.venv/bin/)?ruff": files_exist,
    r"pyrefly": files_exist,
    r"sphinx-build": build_reference,
}


# Training in its smallest form.


def _small_training(place: Place, typed: list[str]) -> tuple[DictConfig, list[str]]:
    """Return what is composed, and the arguments of the smallest form; none: all was to compose it.

    Recipes are run in tests/launch/test_recipes.py, jobs of SLURM in test_slurm.py, slow networks
    in test_network.py.
    """
    chosen = {}
    for override in OverridesParser.create().parse_overrides(_filled_in(typed)):
        chosen[override.input_line.split("=")[0]] = _values(override)
    deciding = {other for other, _, _ in NEEDS.values()}  # the last gives others an effect
    first = {key: values[-1 if key in deciding else 0] for key, values in chosen.items()}
    config = _compose(first)
    several = "-m" in typed or config.hydra.mode == RunMode.MULTIRUN
    for key, values in chosen.items():
        assert len(values) == 1 or several, f"{key} has several values, but there is no -m"
        for value in values[1:]:
            _compose(first | {key: value})
    if "experiment" in first or first.get("hydra/launcher") == "slurm":
        return config, []
    small = first | FEW_STEPS | {"batch_size": str(max(2, config.accumulate))}
    small |= SMALL_DATA.get(config.dataset.name, {}) | SMALL_MODELS.get(config.model.name, {})
    if "path" in config.dataset:
        small["dataset.path"] = place.data(config.dataset.name)
    if "model.path" in small:
        small["model.path"] = place.data("llama")
    for key in ("network", "network.rate", "output_dir", "hydra.sweep.dir", "epochs"):
        small.pop(key, None)
    where = "hydra.sweep.dir" if several else "output_dir"
    flag = ["-m"] if "-m" in typed else []
    return config, ["train.py", *flag, *_overrides(small), f"{where}={OUT}"]


def _train_together(place: Place, typed: list[str], processes: list[dict[str, str]]) -> None:
    _, small = _small_training(place, typed[typed.index("train.py") + 1 :])
    assert small
    shown = [word for word in small if not word.startswith("processes=")]
    place.run(*shown, processes=tuple(processes))


def _filled_in(typed: list[str]) -> list[str]:
    """Return the overrides, with something in place of what a reader is to replace."""
    overrides = [word for word in typed if word != "-m"]
    return [re.sub(*ANY_RECIPE, ANY_VALUE.get(word, word)) for word in overrides]


def _values(override) -> list[str]:
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [override.input_line.split("=", 1)[1]]


def _compose(overrides: dict[str, str]) -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose("config", overrides=_overrides(overrides), return_hydra_config=True)


def _overrides(values: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
