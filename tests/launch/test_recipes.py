"""Every recipe starts: the small one as it is, the full one on a shrunken copy.

At full size every run of a sweep is composed, and its model and optimizer are built without memory.
"""

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dlion import models
from dlion.config import make
from dlion.data import ImageData, TextData
from dlion.data.prepare import prepare
from dlion.data.tokens import load_tokenizer
from dlion.launch import cli
from dlion.launch.check import check, check_numbers
from dlion.launch.environment import detect
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.data.formats import (
    write_cifar,
    write_documents,
    write_imagenet_folders,
    write_llama,
    write_tasks,
)

CONF = ROOT / "conf"
RECIPES = sorted(p.parent.name for p in (CONF / "experiment").glob("*/small.yaml"))
TINY_VIT = ["model.dim=16", "model.heads=2", "model.depth=1", "model.mlp_dim=16"]
# what is cut, and how many runs are left
SMALL = {
    "dlion_cifar10": (["dataset.path={cifar10}", "workers=4", "seed=0"], 10),
    "dlion_cifar10_tune": (
        ["dataset.path={cifar10}", "optimizer=g_lion,dgc", "pick=d", "workers=2"],
        2,
    ),
    "dlion_finetune": ([], 4),
    "dlion_imagenet": ([], 4),
    "dlion_openwebtext": (["workers=4", "seed=0"], 4),
    "dlion_theory": (["workers=4", "seed=0"], 3),
    "cub_bits": (["optimizer.scale=l1", "seed=0"], 4),
    "cub_layers": (["optimizer.sync_pattern=null,'norm|bias'", "seed=0"], 2),
    "cub_resnet": (["optimizer.bits=1,4", "seed=0"], 4),
    "cub_sync": (["optimizer.momentum_sync=0,exponential,1", "seed=0"], 3),
    "vote_attack": (["faults.byzantine=2", "seed=0"], 3),
    "vote_local": (["local_steps=1,4", "optimizer=dlion_avg", "seed=0"], 2),
    "vote_noniid": (["optimizer=dlion_mavo", "seed=0"], 3),
}
FULL = {
    "dlion_cifar10": (["dataset.path={cifar10}", *TINY_VIT, "workers=4", "seed=42"], 7),
    "dlion_cifar10_tune": (
        ["dataset.path={cifar10}", *TINY_VIT, "optimizer=g_lion", "optimizer.lr=1e-3", "workers=2"],
        3,
    ),
    "dlion_finetune": (
        [
            "dataset.path={tasks}",
            "model.path={llama}",
            "dataset.context=64",
        ],
        4,
    ),
    "dlion_imagenet": (
        [
            *("dataset.path={imagenet}", "dataset.image_size=32", "dataset.loaders=1", "workers=4"),
            *("batch_size=4", "+model.depth=1", "+model.embed_dim=48", "+model.num_heads=2"),
            "optimizer=g_adamw,g_lion,dlion_avg",
        ],
        6,
    ),
    "dlion_openwebtext": (
        [
            "dataset.path={tokens}",
            *TINY_VIT,
            "dataset.context=16",
            "workers=4",
            "optimizer=g_adamw,dlion_mavo",
        ],
        4,
    ),
    "dlion_theory": (
        ["dataset.path={cifar10}", *TINY_VIT, "workers=4", "seed=0", "batch_size=4"],
        3,
    ),
    "cub_bits": (
        [
            *("dataset.path={tokens}", "model.n_embd=32", "model.n_layer=1", "model.n_head=2"),
            *("dataset.context=16", "workers=4", "seed=0", "optimizer.bits=2"),
        ],
        2,
    ),
    "cub_layers": (
        [
            *("dataset.path={tokens}", "model.n_embd=32", "model.n_layer=1", "model.n_head=2"),
            *("dataset.context=16", "workers=4", "seed=0", "optimizer.sync_pattern='ln_|bias'"),
        ],
        1,
    ),
    "cub_resnet": (
        ["dataset.path={cifar100}", "workers=2", "batch_size=4", "seed=0", "optimizer.bits=4"],
        2,
    ),
    "cub_sync": (
        [
            *("dataset.path={cifar100}", "workers=2", "batch_size=4", "seed=0"),
            "optimizer.momentum_sync=exponential,1",
        ],
        2,
    ),
    **{
        name: (
            ["dataset.path={cifar10}", *TINY_VIT, "batch_size=4", "optimizer=dlion_mavo", *cut],
            1,
        )
        for name, *cut in (
            ("vote_attack", "faults.byzantine=2", "seed=0"),
            ("vote_local", "local_steps=4", "seed=0"),
            ("vote_noniid", "dataset.alpha=0.1", "seed=0"),
        )
    },
}


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


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_starts(train_py, tmp_path, disk, recipe, scale):
    cuts, runs = (SMALL if scale == "small" else FULL)[recipe]
    done = train_py(
        *(f"experiment={recipe}", *([f"scale={scale}"] if scale == "full" else [])),
        *(cut.format(**disk) for cut in cuts),
        *("steps=2", "eval_every=2", "logger=none", "processes=1", f"hydra.sweep.dir={tmp_path}"),
    )
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(p.read_text()) for p in tmp_path.rglob("summary.json")]
    assert len(summaries) == runs
    assert all(math.isfinite(s["test_loss"]) and s["steps"] == 2 for s in summaries)


class FullRun(NamedTuple):
    """One run of a sweep, without its seed."""

    choices: dict[str, str]
    config: DictConfig


def full_runs(recipe: str) -> Iterator[FullRun]:
    """Every combination that ``experiment=RECIPE scale=full`` sweeps over."""
    experiment = f"experiment={recipe}/full"
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        sweep = compose("config", overrides=[experiment], return_hydra_config=True).hydra.sweeper
        texts = [f"{key}={values}" for key, values in sweep.params.items() if key != "seed"]
        swept = {
            o.get_key_element(): list(o.sweep_iterator() if o.is_sweep_override() else [o.value()])
            for o in OverridesParser.create().parse_overrides(texts)
        }
        groups = [key for key in swept if (CONF / key).is_dir()]
        for names in itertools.product(*(swept.pop(group) for group in groups)):
            chosen = dict(zip(groups, names, strict=True))
            pairs = [f"{group}={name}" for group, name in chosen.items()]
            composed = compose("config", overrides=[experiment, *pairs])
            for values in itertools.product(*swept.values()):
                config = composed.copy()
                for key, value in zip(swept, values, strict=True):
                    value = getattr(value, "text", value)  # of what is quoted
                    OmegaConf.update(config, key, value, force_add=False)
                OmegaConf.resolve(config)
                yield FullRun(chosen, config)


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
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_full_run_can_be_built(recipe):
    built = {}
    for _, config in full_runs(recipe):
        check_numbers(config)
        name = config.model.name
        data = stand_in(config.dataset)
        with torch.device("meta"):
            if name not in built:
                built[name] = models.build(config.model, data)
                size = sum(p.numel() for p in built[name].parameters())
                assert size == pytest.approx(SIZES[name], rel=0.03)
            workers = Workers(local=config.workers)
            make(config.optimizer, built[name].named_parameters(), workers=workers)
    assert built


def commands() -> list[str]:
    """The recipes' commands in the table of contents, as they are typed."""
    text = (ROOT / "sweep" / "README.md").read_text()
    return sorted(set(re.findall(r"`(experiment=[a-z]\w+[^`]*)`", text)))


def test_the_table_of_contents_is_complete():
    listed = {command.split()[0].partition("=")[2] for command in commands()}
    assert listed == set(RECIPES) == set(SMALL) == set(FULL)


@pytest.mark.parametrize("command", [c for c in commands() if " " in c])
def test_what_is_typed_behind_a_recipe_is_accepted(command, tmp_path):
    typed = shlex.split(command.replace("DIR", str(tmp_path)))
    arguments = [*typed, "seed=0", "hydra.sweep.dir=runs/NAME"]
    cli._check_command_line(cli._name_recipe(arguments, CONF), CONF)


def test_the_line_for_slurm_fits_its_cluster(disk, monkeypatch, tmp_path):
    """32 tasks on nodes of 8 GPUs, as the table of contents has it."""
    text = (ROOT / "sweep" / "README.md").read_text()
    (line,) = (line for line in text.splitlines() if "hydra/launcher=slurm" in line)
    typed = shlex.split(line.replace("DIR", str(disk["imagenet"])))
    arguments = cli._name_recipe(typed[2:], CONF)
    cli._check_command_line(arguments, CONF)
    asked = dict(a.split("=", 1) for a in arguments)
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rest = [a for a in arguments if not a.startswith("hydra")]
    rest += ["model.architecture=vit_small_patch16_224", "optimizer=g_lion"]
    rest += ["dataset.sharding=replicate", "batch_size=4"]  # the images are few
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = compose("config", overrides=rest)
    assert cpus > config.dataset.loaders
    job = check(config, tmp_path, detect())
    assert (job.workers.processes, job.workers.local, job.backend) == (32, 1, "nccl")


def test_full_scale_is_the_papers():
    """Settings that arXiv 2404.00438 gives, section 5, and the number of runs it made."""
    folder = CONF / "experiment" / "dlion_cifar10"
    common, full = (OmegaConf.load(folder / f"{name}.yaml") for name in ("common", "full"))
    sweep = {**common.hydra.sweeper.params, **full.hydra.sweeper.params}
    assert math.prod(len(str(values).split(",")) for values in sweep.values()) == 84
    assert (common.batch_size, full.epochs, common.dataset.sharding) == (32, 200, "replicate")
    for recipe in ("dlion_cifar10", "dlion_cifar10_tune"):  # 0.5 and 0 are for small digits
        runs = [
            c.optimizer for _, c in full_runs(recipe) if c.optimizer.name in ("dgc", "graddrop")
        ]
        assert runs and all(optimizer.momentum == 0.9 for optimizer in runs)


LION, ADAMW = ("g_lion", "dlion_mavo", "dlion_avg"), ("g_adamw",)


def check_methods(recipe: str, expected: dict[tuple[str, tuple], tuple]) -> list[DictConfig]:
    """Compare rate, betas and weight decay of a recipe's runs, by model and method."""
    runs = list(full_runs(recipe))
    found = {(c.model.name, c.optimizer.name): c.optimizer for _, c in runs}
    assert len(runs) == len(found) == sum(len(methods) for _, methods in expected)
    for (model, methods), values in expected.items():
        for method in methods:
            optimizer = found[model, method]
            assert (optimizer.lr, *optimizer.betas, optimizer.weight_decay) == values
    return [config for _, config in runs]


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


def test_full_language_modelling_is_the_papers():
    steps = {"gpt2pp_350m": 14_000, "gpt2pp_760m": 30_000}
    expected = {
        **{(model, ADAMW): (3e-4, 0.95, 0.99, 0.1) for model in steps},
        **{(model, LION): (9e-5, 0.9, 0.99, 1.0) for model in steps},
    }
    for config in check_methods("dlion_openwebtext", expected):
        assert (config.workers, config.workers * config.batch_size) == (32, 480)
        assert (config.steps, config.dataset.context) == (steps[config.model.name], 1024)


def test_full_finetuning_is_the_papers():
    expected = {
        ("causal_lm", ADAMW): (2e-5, 0.9, 0.999, 0.0),
        ("causal_lm", LION): (6e-6, 0.9, 0.99, 0.01),
    }
    for config in check_methods("dlion_finetune", expected):
        assert (config.workers, config.workers * config.batch_size) == (4, 32)
        assert (config.epochs, config.steps, config.dataset.shots) == (3, None, 3)
        assert len(config.dataset.tasks) == 7
