"""Every recipe starts: the small one as it is, the full one on a shrunken copy."""

import json
import math
import re

import pytest
from omegaconf import OmegaConf

from dlion.data.prepare import prepare
from dlion.data.tokens import load_tokenizer
from tests.conftest import ROOT
from tests.data.formats import (
    write_cifar,
    write_documents,
    write_imagenet_folders,
    write_llama,
    write_tasks,
)

RECIPES = sorted(p.parent.name for p in (ROOT / "conf" / "experiment").glob("*/small.yaml"))
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
            "optimizer=dlion_mavo",
        ],
        1,
    ),
    "dlion_imagenet": (
        [
            *("dataset.path={imagenet}", "dataset.image_size=32", "dataset.loaders=1", "workers=4"),
            *("batch_size=4", "+model.depth=1", "+model.embed_dim=48", "+model.num_heads=2"),
            *("optimizer=dlion_avg", "model.architecture=vit_small_patch16_224"),
        ],
        1,
    ),
    "dlion_openwebtext": (
        [
            "dataset.path={tokens}",
            *TINY_VIT,
            "dataset.context=16",
            "workers=4",
            "model=gpt2pp_350m",
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
    "cub_resnet": (
        ["dataset.path={cifar100}", "workers=2", "batch_size=4", "seed=0", "optimizer.bits=4"],
        2,
    ),
    "cub_sync": (
        ["dataset.path={cifar100}", "workers=2", "batch_size=4", "seed=0"],
        5,
    ),
    **{
        name: (
            ["dataset.path={cifar10}", *TINY_VIT, "batch_size=4", "optimizer=dlion_mavo", *cut],
            1,
        )
        for name, *cut in (
            ("vote_attack", "faults.byzantine=2", "seed=0"),
            ("vote_local", "local_steps=2", "seed=0"),
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


def test_the_table_of_contents_is_complete():
    listed = set(re.findall(r"experiment=([a-z]\w+)", (ROOT / "sweep" / "README.md").read_text()))
    assert listed == set(RECIPES) == set(SMALL) == set(FULL)


def test_full_scale_is_the_papers():
    """Settings that arXiv 2404.00438 gives, and the number of runs it made."""
    folder = ROOT / "conf" / "experiment" / "dlion_cifar10"
    common, full = (OmegaConf.load(folder / f"{name}.yaml") for name in ("common", "full"))
    sweep = {**common.hydra.sweeper.params, **full.hydra.sweeper.params}
    assert math.prod(len(str(values).split(",")) for values in sweep.values()) == 84
    assert (common.batch_size, full.epochs, common.dataset.sharding) == (32, 200, "replicate")
