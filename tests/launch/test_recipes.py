"""Every recipe starts: the last run of its sweep, on small copies of the data.

At full size runs with every value of a sweep are composed, and their models and optimizers are
built without memory.
"""

import functools
import json
import math
import re
import shlex
from typing import NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dlion.errors import UserError
from dlion.suite import models
from dlion.suite.compare.commands import sweep_overrides
from dlion.suite.compare.trials import to_search_table
from dlion.suite.config import instantiate, resolve
from dlion.suite.data import ImageData, TextData
from dlion.suite.data.prepare import prepare
from dlion.suite.data.tokenizers import load_tokenizer
from dlion.suite.launch.check import check, check_settings
from dlion.suite.launch.environment import detect
from dlion.workers import Workers
from hydra_plugins.dlion_sweeper import methods_of
from tests.conftest import ROOT
from tests.data.formats import (
    write_cifar,
    write_documents,
    write_imagenet_folders,
    write_llama,
    write_tasks,
)
from tests.support.runs import train

CONF = ROOT / "conf"
FILES = {p.stem for p in (CONF / "experiment").glob("*.yaml")}
RECIPES = sorted(name for name in FILES if f"{name}_full" in FILES)
BOARD = sorted(name for name in FILES if name.startswith("board_"))  # of one size only
TINY = ["model.dim=16", "model.heads=2", "model.depth=1", "model.mlp_dim=16"]
# what makes a run small, by its data set and by its model
CUTS = {
    "cifar10": ["dataset.path={cifar10}", "dataset.test_limit=8"],
    "cifar100": ["dataset.path={cifar100}", "dataset.test_limit=8"],
    "choices": ["dataset.path={tasks}", "dataset.context=64", "batch_size=8"],
    "imagenet": ["dataset.path={imagenet}", "dataset.image_size=32", "dataset.loaders=1"],
    "prepared_text": ["dataset.path={tokens}", "dataset.context=16"],
    "stdlib_text": ["dataset.max_bytes=200000"],
    "causal_lm": ["model.path={llama}"],
    "gpt2": ["model.n_embd=32", "model.n_layer=1", "model.n_head=2"],
    "gpt2pp_350m": TINY,
    "gpt2pp_760m": TINY,
    "gpt_tiny": TINY,
    "llama_tiny": ["model.hidden_size=16", "model.num_hidden_layers=1"],
    "resnet8": ["model.width=4"],
    "resnet18": ["workers=2"],
    "vit_base_patch16_224": ["+model.depth=1", "+model.embed_dim=48", "+model.num_heads=2"],
    "vit_cifar": TINY,
}


class Run(NamedTuple):
    """One run of a sweep: its settings, and what Hydra is told to come to them."""

    settings: DictConfig
    overrides: list[str]


def sweep_of(*typed: str) -> list[list[str]]:
    """Return the overrides of each run of a recipe's sweep, without the seeds."""
    parser = OverridesParser.create()
    recipe = [text for text in typed if text.startswith("experiment=")]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = compose("config", recipe, return_hydra_config=True)
        params = {k: v for k, v in (config.hydra.sweeper.params or {}).items() if v != ""}
        varied = parser.parse_overrides([*(f"{k}={v}" for k, v in params.items()), *typed])
        methods = methods_of(config, varied, lambda first: compose("config", list(first)))
    params = {"optimizer": ",".join(methods), **params} if methods else params
    params.pop("seed", None)
    return sweep_overrides({"sweeper": {"params": params}, "overrides": {"task": list(typed)}})


def methods_in(*typed: str) -> list[str]:
    """Return the methods of a recipe's sweep."""
    swept = (word for overrides in sweep_of(*typed) for word in overrides)
    return list(dict.fromkeys(w.partition("=")[2] for w in swept if w.startswith("optimizer=")))


@functools.cache
def runs(*typed: str, last: bool = False, some: bool = False) -> list[Run]:
    """Return the runs of a recipe's sweep, without the seeds.

    Args:
        last: only the last one.
        some: only those with a value, or with choices together, that none before has.
    """
    parser, composed, seen, found = OverridesParser.create(), {}, set(), []
    sweep = sweep_of(*typed)
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        for overrides in sweep[-1:] if last else sweep:
            values = {o.key_or_group: o.value() for o in parser.parse_overrides(overrides)}
            files = tuple(pair for pair in values.items() if (CONF / pair[0]).is_dir())
            if some and files in composed and seen.issuperset(overrides):
                continue
            seen.update(overrides)
            if files not in composed:
                composed[files] = compose("config", overrides, return_hydra_config=True)
            config = composed[files]
            for key in values.keys() - dict(files).keys():
                if not key.startswith("hydra."):
                    OmegaConf.update(config, key, values[key])
            found.append(Run(resolve(config, config.hydra), overrides))
    return found


def full_runs(recipe: str, some: bool = False) -> list[DictConfig]:
    """Return the settings of the runs at full size; ``some``: see :func:`runs`."""
    return [run.settings for run in runs(f"experiment={recipe}_full", some=some)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Small data sets and a model, in their true formats."""
    root = tmp_path_factory.mktemp("disk")
    write_cifar(root / "cifar10", count=64)
    write_cifar(root / "cifar100", 100, ("img", "fine_label"), count=200)
    write_imagenet_folders(root / "imagenet")
    write_llama(root / "llama")
    write_tasks(root / "tasks")
    texts = write_documents(root / "documents.jsonl", 200)
    tokenizer = load_tokenizer(str(root / "llama"), "--tokenizer")
    prepare(_Table(texts), tokenizer, root / "tokens", held_out=10)
    return {p.name: p for p in root.iterdir()}


class _Table(list):
    def __getitem__(self, part):
        return {"text": list.__getitem__(self, part)}


@pytest.fixture(scope="module")
def started() -> set[tuple[str, str]]:
    """Data sets and models of full size, of which one recipe has started by now."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, *(f"{name}_full" for name in RECIPES), *BOARD])
def test_recipe_starts(tmp_path, disk, started, recipe):
    ((settings, overrides),) = runs(f"experiment={recipe}", last=True)
    if settings.elastic.lighthouse is not None:
        pytest.importorskip("torchft")
    if recipe.endswith("_full"):
        pair = (settings.dataset.name, settings.model.name)
        if pair in started:
            settings.dataset.path = str(ROOT)  # what it holds is not looked at
            check_settings(settings)
            return
        started.add(pair)
    cuts = [*CUTS.get(settings.dataset.name, []), *CUTS.get(settings.model.name, [])]
    processes = 2 if settings.faults.deaths else 1  # the last one may not die
    done = train(
        *overrides,
        *("seed=0", "workers=4", "batch_size=4", "steps=2", "eval_every=2"),
        *(f"processes={processes}", "logger=none", f"hydra.sweep.dir={tmp_path}"),
        *(cut.format(**disk) for cut in cuts),
    )
    assert done.returncode == 0, done.stderr
    (summary,) = (json.loads(p.read_text()) for p in tmp_path.rglob("summary.json"))
    assert math.isfinite(summary["test_loss"]) and summary["steps"] == 2


def stand_in(dataset: DictConfig) -> ImageData | TextData:
    """A data set of the shape of a full one."""
    if "context" in dataset:
        tokens = torch.zeros(2000, dtype=torch.uint8)
        vocabulary = 32_000 if dataset.name == "choices" else 50_257  # LLaMA's and GPT-2's
        return TextData(tokens, tokens, vocabulary, dataset.context)
    classes = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}[dataset.name]
    size = dataset.get("image_size", 32)
    x, y = torch.zeros(1, 3, size, size, dtype=torch.uint8), torch.zeros(1).long()
    return ImageData(x, y, x, y, classes)


SIZES = {  # the papers', but for what their models are known to have
    "vit_cifar": 9.5e6,
    "vit_small_patch16_224": 22.05e6,
    "vit_base_patch16_224": 86.57e6,
    "gpt2pp_350m": 350e6,
    "gpt2pp_760m": 760e6,
    "causal_lm": 6.74e9,  # LLaMA-7B
    "gpt2": 345e6,  # of Lion Cub's first author's scripts
    "resnet18": 11.2e6,
    "resnet50": 25.56e6,
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_full_runs_can_be_built(recipe):
    """Some have every method and every value."""
    built_methods = set()
    for settings in full_runs(recipe, some=True):
        settings.dataset.path = str(ROOT)  # what it holds is not looked at
        check_settings(settings)
        kind = settings.model.name, settings.optimizer.name
        if kind not in built_methods:
            model = built(OmegaConf.to_yaml(settings.model), OmegaConf.to_yaml(settings.dataset))
            with torch.device("meta"):
                workers = Workers(local=settings.workers)
                instantiate(settings.optimizer, model.named_parameters(), workers=workers)
            built_methods.add(kind)
    assert built_methods


@functools.cache
def built(model: str, dataset: str) -> torch.nn.Module:
    """Return the model of these settings, without memory."""
    settings = OmegaConf.create(model)
    with torch.device("meta"):
        found = models.build(settings, stand_in(OmegaConf.create(dataset)))
    size = sum(parameter.numel() for parameter in found.parameters())
    assert size == pytest.approx(SIZES[settings.name], rel=0.03)
    return found


def commands() -> list[str]:
    """The recipes' commands in the table of contents, as they are typed."""
    text = (ROOT / "sweep" / "README.md").read_text()
    return sorted(set(re.findall(r"`(experiment=[a-z]\w+[^`]*)`", text)))


def test_the_table_of_contents_is_complete():
    listed = {command.split()[0].partition("=")[2] for command in commands()}
    assert {name.removesuffix("_full") for name in listed} == {*RECIPES, *BOARD}


@pytest.mark.parametrize("command", [c for c in commands() if " " in c])
def test_what_is_typed_behind_a_recipe_is_accepted(command, tmp_path):
    for settings, _ in runs(*shlex.split(command.replace("DIR", str(tmp_path)))):
        check_settings(settings)


@pytest.mark.slow
@pytest.mark.parametrize("visible", [8, 1], ids=["all", "own"])
def test_the_line_for_slurm_fits_its_cluster(disk, monkeypatch, tmp_path, visible):
    """32 tasks on nodes of 8 GPUs, as the table of contents has it; each sees all, or its own."""
    text = (ROOT / "sweep" / "README.md").read_text()
    (line,) = (line for line in text.splitlines() if "hydra/launcher=slurm" in line)
    typed = shlex.split(line.replace("DIR", str(disk["imagenet"])))[2:]
    asked = dict(override.split("=", 1) for override in typed)
    nodes, tasks, gpus, cpus = (
        int(asked[f"hydra.launcher.{name}"])
        for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task")
    )
    for name, value in {
        "STEP_ID": "0",
        "STEP_NUM_TASKS": f"{nodes * tasks}",
        "STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "PROCID": "31",
        "LOCALID": "7",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert gpus == 8
    few_images = ["dataset.sharding=replicate", "batch_size=4"]
    settings, _ = runs(*typed, *few_images)[0]
    assert cpus > settings.dataset.loaders
    job = check(settings, tmp_path, detect())
    assert (job.workers.processes, job.workers.local, job.backend) == (32, 1, "nccl")


@pytest.mark.slow
def test_full_scale_is_the_papers():
    """Settings that arXiv 2404.00438 gives, section 5, and the number of runs it made."""
    full = full_runs("dlion_cifar10")
    recipe = OmegaConf.load(CONF / "experiment" / "dlion_cifar10_full.yaml")
    assert len(full) * len(recipe.hydra.sweeper.params.seed.split(",")) == 84
    for config in full:
        assert (config.batch_size, config.epochs, config.steps) == (32, 200, None)
        assert (config.dataset.sharding, config.dataset.test_limit) == ("replicate", None)
    for recipe in ("dlion_cifar10", "dlion_cifar10_tune"):  # 0.5 and 0 are for small digits
        optimizers = [config.optimizer for config in full_runs(recipe)]
        momenta = [o.momentum for o in optimizers if o.name in ("dgc", "graddrop")]
        assert momenta and set(momenta) == {0.9}


LION, ADAMW = ("g_lion", "dlion_mavo", "dlion_avg"), ("g_adamw",)


def check_methods(recipe: str, expected: dict[tuple[str, tuple], tuple]) -> list[DictConfig]:
    """Compare rate, betas and weight decay of a recipe's runs, by model and method."""
    full = full_runs(recipe)
    found = {(config.model.name, config.optimizer.name): config.optimizer for config in full}
    assert len(full) == len(found) == sum(len(methods) for _, methods in expected)
    for (model, methods), values in expected.items():
        for method in methods:
            optimizer = found[model, method]
            assert (optimizer.lr, *optimizer.betas, optimizer.weight_decay) == values
    return full


def trials(recipe: str, candidates: str) -> dict[str, dict]:
    """Return the values of each point of a search."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config, found = compose("config", [f"experiment={recipe}"]), {}
    for config.candidate in candidates:
        found[config.candidate] = OmegaConf.to_container(config.trial, resolve=True)
    return found


def pick(choices: list, share: float):
    return choices[int(len(choices) * share)]


@pytest.mark.parametrize(
    ("recipe", "rates", "gradient_rates", "betas", "adam_betas"),
    [
        (
            "unlike_data_tune",
            (5e-4, 1e-2),
            (2e-2, 2.0),
            [[0.9, 0.99], [0.9, 0.95], [0.8, 0.9], [0.7, 0.8]],
            [[0.9, 0.999], [0.9, 0.99], [0.9, 0.95], [0.8, 0.9]],
        ),
        (
            "unlike_text_tune",
            (1.5e-3, 2e-2),
            (3e-2, 3.0),
            [[0.9, 0.95], [0.8, 0.9], [0.7, 0.8], [0.6, 0.8]],
            [[0.9, 0.999], [0.9, 0.95], [0.8, 0.95], [0.7, 0.8]],
        ),
    ],
)
def test_a_search_has_the_points_of_the_sequence_that_it_names(
    recipe, rates, gradient_rates, betas, adam_betas
):
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(12).tolist()
    expected = {
        name: {
            "lr": pytest.approx(rates[0] * (rates[1] / rates[0]) ** x, rel=0.05),
            "gradient_lr": pytest.approx(
                gradient_rates[0] * (gradient_rates[1] / gradient_rates[0]) ** x, rel=0.05
            ),
            "betas": pick(betas, y),
            "adam_betas": pick(adam_betas, y),
            "momentum": pick([0.9, 0.8, 0.5, 0.0], y),
            "rise": pick([2, 3, 4, 3], z),
            "lookahead": pick([1.0, 0.5, 0.0, 1.0], z),
        }
        for name, (x, y, z) in zip("abcdefghijkl", points, strict=True)
    }
    assert trials(recipe, "abcdefghijkl") == expected
    full = trials(f"{recipe}_full", "abcdefghijkl")
    for name, (x, _, _) in zip("abcdefghijkl", points, strict=True):
        assert full[name]["lr"] == pytest.approx(2e-5 * 25**x, rel=0.05)
        assert full[name]["gradient_lr"] == pytest.approx(1e-3 * 100**x, rel=0.05)


@pytest.mark.parametrize("search", ["board_text_tune", "unlike_data_tune", "unlike_text_tune_full"])
def test_a_search_varies_every_method(search):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = compose("config", [f"experiment={search}"])
    tables = []
    for config.candidate in "ab":
        tables.append(OmegaConf.to_container(config.methods, resolve=True))
    for method in methods_in(f"experiment={search}"):
        assert tables[0][method] != tables[1][method], method


@pytest.mark.parametrize("board", ["board_cifar10", "board_text", "board_vit"])
def test_every_method_of_a_board_was_searched(board):
    """A method of the search is on the board once its search is over."""
    lines, searched = methods_in(f"experiment={board}"), methods_in(f"experiment={board}_tune")
    assert [method for method in searched if method in lines] == lines


def test_a_point_that_a_search_does_not_have_is_named():
    with pytest.raises(UserError, match="candidate=z is unknown: choose a to h"):
        runs("experiment=board_text_tune", "optimizer=dgc", "candidate=z")


def test_methods_that_are_typed_or_named_replace_the_table():
    table = list(OmegaConf.load(CONF / "experiment" / "dlion_cifar10.yaml").methods)
    assert methods_in("experiment=dlion_cifar10") == table
    assert methods_in("experiment=dlion_cifar10", "optimizer=dgc,demo") == ["dgc", "demo"]
    assert methods_in("experiment=dlion_cifar10", "optimizer=demo") == ["demo"]
    assert len(methods_in("experiment=dlion_cifar10_full")) == 7  # of the paper's figures
    assert methods_in("experiment=dlion_cifar10_tune_full") == table
    assert len(methods_in("experiment=board_text_workers", "workers=4")) == 8


@pytest.mark.slow
def test_a_sweep_has_all_methods_of_its_recipe(tmp_path):
    """Its number of runs is printed before the first wrong value."""
    for typed, count in (([], 4), (["optimizer=g_lion"], 1), (["optimizer=g_lion,dgc"], 2)):
        sweep = [*typed, "workers=0", f"hydra.sweep.dir={tmp_path}"]
        done = train("experiment=dlion_finetune", *sweep)
        assert done.returncode == 2 and done.stdout.startswith(f"{count} run"), done.stderr


def test_the_boards_search_has_the_points_of_the_sequence_that_it_names():
    points = torch.quasirandom.SobolEngine(4, scramble=True, seed=0).draw(8).tolist()
    own = {
        "rise": [3, 3, 2, 4],
        "lookahead": [0.5, 1.0, 1.0, 0.0],
        "clip": [0, 2.0, 2.5, 3.0],
        "outer_lr": [0.4, 0.7, 0.9, 1.0],
        "outer_momentum": [0.5, 0.8, 0.9, 0.9],
    }
    momenta = {
        "betas": [[0.9, 0.99], [0.9, 0.95], [0.8, 0.9], [0.7, 0.8]],
        "adam_betas": [[0.9, 0.999], [0.9, 0.99], [0.9, 0.95], [0.8, 0.9]],
        "momentum": [0.9, 0.8, 0.5, 0.0],
        "sign_momentum": [0.95, 0.9, 0.8, 0.7],
        "slow_momentum": [0.999, 0.99, 0.95, 0.9],
    }
    expected = {}
    for name, (x, y, z, w) in zip("abcdefgh", points, strict=True):
        rates = {"": 3e-4 * 20**x, "adam_": 1e-3 * 20**x, "gradient_": 0.02 * 200**x}
        taken_off = pick([0, 3e-5, 1e-4, 3e-4], w)
        expected[name] = {key: pick(values, y) for key, values in momenta.items()}
        expected[name] |= {key: pick(values, z) for key, values in own.items()}
        for family, rate in rates.items():
            expected[name][f"{family}lr"] = pytest.approx(rate, rel=0.05)
            expected[name][f"{family}decay"] = pytest.approx(taken_off / rate, rel=0.05)
    assert trials("board_text_tune", "abcdefgh") == expected


@pytest.mark.parametrize(
    ("recipe", "workers", "folder", "metric"),
    [
        ("board_text", None, "text", "loss"),
        ("board_text_workers", "4", "text/workers/n4", "loss"),
        ("board_text_workers", "32", "text/workers/n32", "loss"),
        ("board_cifar10", None, "cifar10", "accuracy"),
        ("board_vit", None, "vit", "accuracy"),
    ],
)
def test_a_line_of_the_board_has_the_best_of_its_trials(recipe, workers, folder, metric):
    table = to_search_table(ROOT / "results/board" / folder / "search.csv", metric)
    config = OmegaConf.load(CONF / "experiment" / f"{recipe}.yaml")
    settings = config.methods_by_workers[workers] if workers else config.methods
    search = OmegaConf.load(CONF / "search" / "board.yaml")
    # a search that continues has no line yet
    over = [row for row in table[1:] if int(row[3]) == 8 and row[0] in search.methods]
    assert {row[0] for row in over} == {*settings}
    for method, _, search.candidate, *_ in over:
        chosen = OmegaConf.to_container(search.methods[method], resolve=True)
        assert {key: settings[method][key] for key in chosen if key != "<<"} == {
            key: value for key, value in chosen.items() if key != "<<"
        }


@pytest.mark.slow
def test_full_imagenet_is_the_papers():
    small, base = "vit_small_patch16_224", "vit_base_patch16_224"
    expected = {
        (small, ADAMW): (3e-3, 0.9, 0.999, 0.1),
        (small, LION): (3e-4, 0.9, 0.99, 1.0),
        (base, ADAMW): (1e-3, 0.9, 0.999, 1.0),
        (base, LION): (1e-4, 0.9, 0.99, 10.0),
    }
    for config in check_methods("dlion_imagenet", expected):
        assert (config.workers, config.workers * config.batch_size) == (32, 4096)
        assert (config.epochs, config.steps, config.dataset.image_size) == (300, None, 224)
        assert (config.dataset.mixup, config.dataset.auto_augment) == (0.5, True)


@pytest.mark.slow
def test_full_imagenet_of_lion_cub_is_its_authors():
    models = ("resnet50", "vit_small_patch16_224", "vit_base_patch16_224")
    methods = ("g_lion", "dlion_mavo", "lion_cub")
    expected = {(model, methods): (3e-4, 0.9, 0.99, 1.0) for model in models}
    for config in check_methods("cub_imagenet", expected):
        assert (config.workers, config.batch_size, config.epochs) == (8, 1024, 90)
        assert (config.dataset.image_size, config.dataset.mixup) == (224, 0.8)


@pytest.mark.slow
def test_full_language_modelling_is_the_papers():
    steps = {"gpt2pp_350m": 14_000, "gpt2pp_760m": 30_000}
    expected = {
        **{(model, ADAMW): (3e-4, 0.95, 0.99, 0.1) for model in steps},
        **{(model, LION): (9e-5, 0.9, 0.99, 1.0) for model in steps},
    }
    for config in check_methods("dlion_openwebtext", expected):
        assert (config.workers, config.workers * config.batch_size) == (32, 480)
        assert (config.steps, config.dataset.context) == (steps[config.model.name], 1024)


@pytest.mark.slow
def test_full_finetuning_is_the_papers():
    expected = {
        ("causal_lm", ADAMW): (2e-5, 0.9, 0.999, 0.0),
        ("causal_lm", LION): (6e-6, 0.9, 0.99, 0.01),
    }
    for config in check_methods("dlion_finetune", expected):
        assert (config.workers, config.workers * config.batch_size) == (4, 32)
        assert (config.epochs, config.steps, config.dataset.shots) == (3, None, 3)
        assert len(config.dataset.tasks) == 7
