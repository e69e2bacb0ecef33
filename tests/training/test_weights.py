"""A finished run leaves a model: it is loaded, measured again, and trained on from."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file, save_file

import dlion
from dlion.errors import UserError
from dlion.exchange import Channel
from dlion.suite import data as datasets
from dlion.suite import models
from dlion.suite.data import ImageData, TextData
from dlion.suite.launch.arguments import Arguments
from dlion.suite.training.evaluation import evaluate
from dlion.suite.training.weights import (
    check_pretrained,
    check_weights,
    load_weights,
    recorded_input,
    save_model,
)
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.data.formats import write_classes, write_llama, write_tasks, write_tokenizer
from tests.support.runs import record, train
from tests.training.test_spread import net

pytestmark = pytest.mark.slow

SETTINGS = ["logger=none", "workers=3", "steps=4", "eval_every=4", "batch_size=8"]
DIGITS = [*SETTINGS, "dataset=digits"]
TINY = ["model.dim=8", "model.depth=1", "model.heads=2", "model.mlp_dim=16"]
NET = "tests.training.test_spread.net"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Finished runs: images, BatchNorm, text, and a pretrained model of transformers."""
    root = tmp_path_factory.mktemp("weights")
    write_llama(root / "base")
    write_tasks(root / "tasks")
    write_tokenizer(root / "tokenizer")
    tasks = ["dataset=choices", f"dataset.path={root / 'tasks'}", "dataset.context=64"]
    for name, more in {
        "vit": ["dataset=digits", *TINY],
        "net": ["dataset=digits", f"model._target_={NET}"],
        "gpt": [*tasks, "model=gpt_tiny", *TINY, f"dataset.tokenizer={root / 'tokenizer'}"],
        "llama": [*tasks, f"model.path={root / 'base'}", "precision=bf16"],
    }.items():
        train(*SETTINGS, *more, "processes=1", f"output_dir={root / name}", code=0)
    shutil.rmtree(root / "base")  # what a run began with need not be there any more
    return root


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.parametrize("name", ["vit", "net", "gpt", "llama"])
def test_a_stored_model_gives_the_recorded_number(root, name):
    run = root / name
    own = {
        "net": [f"model._target_={NET}"],
        "llama": [f"dataset.tokenizer={run / 'model'}", f"dataset.path={root / 'tasks'}"],
    }
    before = contents(root)
    done = train(f"evaluate={run}", "processes=3", *own.get(name, []), code=0)
    assert contents(root) == before
    _, (row,) = record(run)
    found = [key for key in row if key.startswith(("test_", "accuracy_"))]
    assert len(found) == (2 if name in ("vit", "net") else 9)
    line = ", ".join(f"{key} {row[key]} (recorded {row[key]})" for key in found)
    assert done.stdout.splitlines()[-1] == f"{run}: {line}"


@pytest.mark.parametrize("name", ["vit", "net", "gpt"])
def test_load_model_gives_it_back(root, name):
    model = dlion.load_model(root / name, build=net if name == "net" else None)
    assert not model.training
    data = datasets.load(OmegaConf.load(root / name / ".hydra" / "config.yaml").dataset)
    results = evaluate(model, data, Channel(Workers()), "cpu")
    assert results.items() <= record(root / name)[1][-1].items()


def test_a_run_whose_components_had_other_names_is_read(root, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(root / "vit", run)
    shutil.copy(ROOT / "tests" / "training" / "earlier_config.yaml", run / ".hydra" / "config.yaml")
    now, before = (dlion.load_model(path).state_dict() for path in (root / "vit", run))
    assert all(torch.equal(now[name], before[name]) for name in now.keys() | before.keys())
    done = train(f"evaluate={run}", "processes=1", code=0)
    row = record(run)[1][0]
    assert f"test_loss {row['test_loss']} (recorded {row['test_loss']})" in done.stdout
    typed = [*DIGITS, *TINY, "processes=1", f"output_dir={run}", "resume=auto"]
    assert "is finished; nothing is left to do" in train(*typed, code=0).stdout


def test_transformers_reads_what_a_run_leaves(root):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = root / "llama" / "model"
    assert not (root / "llama" / "model.safetensors").exists()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == theirs.config.vocab_size
    tokens = torch.arange(12).view(2, 6)
    ours = dlion.load_model(root / "llama")
    assert ours(tokens).dtype == torch.bfloat16
    assert torch.equal(ours(tokens), theirs(tokens).logits)


def test_training_goes_on_from_weights_with_other_settings(root, tmp_path):
    """From a run or its file, on one process or two, the bits are the same."""
    other = [*DIGITS, *TINY, "optimizer=g_lion", "workers=2", "eval_every=2"]
    sources = [root / "vit", root / "vit" / "model.safetensors"]
    for i, source in enumerate(sources, 1):
        train(*other, f"init_from={source}", f"processes={i}", f"output_dir={tmp_path / str(i)}")
    assert record(tmp_path / "1") == record(tmp_path / "2")
    train(*other, "processes=1", f"output_dir={tmp_path / 'anew'}", code=0)
    begun, anew = (record(tmp_path / name)[1][0]["train_loss"] for name in ("1", "anew"))
    assert begun < anew


@pytest.mark.parametrize("model", [NET, "tests.training.test_spread.half_frozen"])
def test_what_began_with_weights_is_resumed(root, tmp_path, model):
    settings = [*DIGITS, f"model._target_={model}", f"init_from={root / 'net'}", "processes=1"]
    train(*settings, f"output_dir={tmp_path / 'whole'}", code=0)
    cut = f"output_dir={tmp_path / 'cut'}"
    train(*settings, cut, "stop_after=2", code=75)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    refused = train(*settings, cut, f"init_from={tmp_path / 'whole'}", "resume=auto", code=2)
    assert "is of a run with other settings (init_from is weights " in refused.stderr
    train(*settings, cut, "resume=auto", code=0)
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    stored = [load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole")]
    assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0] | stored[1])


@pytest.mark.parametrize(("place", "end"), [("tokenizer", 1), ("bytes", 256)])
def test_generation_stops_at_the_token_that_ended_the_documents(tmp_path, place, end):
    from transformers import AutoConfig, GenerationConfig

    write_tokenizer(tmp_path / "tokenizer")
    place = place if place == "bytes" else str(tmp_path / place)
    data = TextData(*2 * [torch.zeros(32)], vocabulary=257, context=8, tokenizer_at=place)
    save_model(models.gpt2(data, n_layer=1, n_embd=8, n_head=1), data, tmp_path)
    for kind in (AutoConfig, GenerationConfig):
        assert kind.from_pretrained(tmp_path / "model").eos_token_id == end


def test_what_cannot_be_had_is_one_sentence(root, tmp_path):
    out = f"output_dir={tmp_path / 'out'}"
    for words, sentence in (
        ([*DIGITS, f"init_from={root / 'gpt'}"], "holds the weights of another model (missing "),
        ([*DIGITS, f"init_from={tmp_path}"], "holds no weights: give the directory of a finished"),
        (["-m", f"evaluate={tmp_path},{root / 'vit'}"], f"{tmp_path} holds no finished run"),
        ([f"evaluate={tmp_path}"], f"{tmp_path} holds no finished run"),
        ([f"evaluate={root / 'net'}"], f"type model._target_={NET}"),
        ([f"evaluate={root / 'vit'}", "workers=4"], "takes workers from the run"),
    ):
        refused = train(*words, out, code=2) if "init" in words[-1] else train(*words, code=2)
        assert sentence in refused.stderr and refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "metrics.jsonl").touch()  # of a run that got more steps, and was killed
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is not finished: its model comes with its last step"):
        check_weights(torch.nn.Linear(1, 1), tmp_path)


def images(size: int = 8) -> ImageData:
    x = torch.zeros(8, 1, size, size, dtype=torch.uint8)
    return ImageData(x, torch.arange(8), x, torch.arange(8), 8)


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path):
    save_model(models.vit(images(), dim=8), images(), tmp_path)
    with pytest.raises(UserError, match=r"shape .*, embed.weight \[8, 4\] instead of \[12, 4\]"):
        check_weights(models.vit(images(), dim=12), tmp_path)
    with pytest.raises(UserError, match=r"unexpected blocks.1.* and 9 more\)"):
        check_weights(models.vit(images(), dim=8, depth=1), tmp_path)
    with pytest.raises(UserError, match=r"missing 1.weight, 1.bias; unexpected blocks"):
        check_weights(models.linear(images()), tmp_path)


def test_tied_weights_are_written_once_and_loaded_to_all_names(tmp_path):
    text = TextData(torch.zeros(99), torch.zeros(99), vocabulary=11, context=4)
    tied, other = models.gpt(text, dim=8, heads=2), models.gpt(text, dim=8, heads=2)
    save_model(tied, text, tmp_path)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    load_weights(other, tmp_path)
    assert other.head.weight is other.tokens.weight
    assert torch.equal(other.head.weight, tied.head.weight)
    save_model(models.gpt(text, dim=8, heads=2, tie_embeddings=False), text, tmp_path)
    with pytest.raises(UserError, match=r"unexpected head.weight"):
        check_weights(tied, tmp_path)


def test_a_tied_model_of_transformers_comes_back(tmp_path):
    text = TextData(torch.zeros(99), torch.zeros(99), vocabulary=11, context=4)
    small = {"n_layer": 1, "n_embd": 8, "n_head": 2}
    model, other = models.gpt2(text, **small).eval(), models.gpt2(text, **small).eval()
    save_model(model, text, tmp_path)
    load_weights(other, tmp_path)
    tokens = torch.arange(4).view(1, 4)
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(models.saved_causal_lm(tmp_path / "model")(tokens), model(tokens))


def test_parts_of_a_folder_are_read_together_and_nothing_is_unpickled(tmp_path):
    model, file = models.linear(images()), tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    for number, (name, tensor) in enumerate(state.items()):
        save_file({name: tensor}, tmp_path / f"{number}.safetensors")
    parts = {name: f"{number}.safetensors" for number, name in enumerate(state)}
    index.write_text(json.dumps({"weight_map": parts}))
    load_weights(model, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    index.write_text("[]")
    with pytest.raises(UserError, match="is damaged"):
        check_weights(model, tmp_path)
    torch.save(state, file)
    with pytest.raises(UserError, match="no file of safetensors"):
        check_weights(model, file)


def test_integers_are_no_weights(tmp_path):
    model, file = models.linear(images()), tmp_path / "model.safetensors"
    save_file({name: t.double() for name, t in model.state_dict().items()}, file)
    check_weights(model, file)
    save_file({name: t.to(torch.int8) for name, t in model.state_dict().items()}, file)
    with pytest.raises(UserError, match=r"not of real numbers 1.weight, 1.bias\)"):
        check_weights(model, file)


def test_a_pretrained_folder_is_compared_before_it_is_loaded(tmp_path):
    text = TextData(torch.zeros(99), torch.zeros(99), vocabulary=11, context=4)
    model = models.gpt2(text, n_layer=1, n_embd=8, n_head=2)
    save_model(model, text, tmp_path)
    folder, file = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    whole, name = load_file(file), "transformer.h.0.mlp.c_fc.bias"
    check_pretrained(model, folder)
    save_file({key.removeprefix("transformer."): tensor for key, tensor in whole.items()}, file)
    check_pretrained(model, folder)  # as the body alone is saved
    save_file(whole | {name: torch.zeros(3)}, file)
    with pytest.raises(UserError, match=rf"{name} is \[3\] instead of \[32\]"):
        check_pretrained(model, folder)
    del whole[name]
    save_file(whole, file)
    with pytest.raises(UserError, match=f"{name} is missing"):
        check_pretrained(model, folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds pickled weights, which could run anything"):
        check_pretrained(model, folder)
    longer = TextData(torch.zeros(99), torch.zeros(99), vocabulary=11, context=8)
    with pytest.raises(UserError, match=r"sees 4 tokens at once, .* type dataset.context=4"):
        models.causal_lm(longer, path=str(folder))


def test_paths_that_are_there_need_no_quotes(tmp_path):
    for name in ("it's (1)", "a,b", "日本", 'q"q'):
        word = f"dataset.path={tmp_path / name}"
        assert Arguments([word]).ordered() == [word]
        (tmp_path / name).mkdir()
        escaped = str(tmp_path / name).replace('"', '\\"')
        assert Arguments([word]).ordered() == [f'dataset.path="{escaped}"']


@pytest.mark.parametrize(
    ("group", "values", "sentence"),
    [
        ("model", {"_target_": "os.system"}, "type model._target_=os.system, or in Python"),
        ("model", {"_target_": "dlion.suite.models.factories.vit"}, "are not dlion's own"),
        ("model", {"_target_": "dlion.models.factories.vit"}, "are not dlion's own"),
        ("model", {"dim": {"_target_": "os.getpid"}}, "names more functions"),
        ("model", {"_target_": ["os"]}, "are not dlion's own"),
        ("model", {"dim": "${oc.env:HOME}"}, "looks values up"),
    ],
)
def test_a_foreign_run_is_not_executed(root, tmp_path, group, values, sentence):
    run = tmp_path / "run"
    shutil.copytree(root / "vit", run, ignore=shutil.ignore_patterns("checkpoint"))
    file = run / ".hydra" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config[group] |= values
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=sentence):
        dlion.load_model(run)


def test_settings_of_groups_reach_the_recorded_ones():
    words = ["evaluate=RUN", "dataset.path=a=b", "hydra.x=2", "+dataset.loaders=1"]
    assert Arguments(words).ordered() == [words[0], "++dataset.path=a=b", *words[2:]]
    assert Arguments(words[1:]).ordered() == words[1:]


def test_a_trained_model_names_what_is_on_a_picture_and_keeps_its_own_normalisation(tmp_path):
    write_classes(tmp_path / "pets")
    settings = ["dataset=images", "logger=none", "workers=2", "batch_size=4", "steps=30"]
    settings += ["optimizer=g_adamw", "optimizer.lr=3e-3", "dataset.augment=false"]
    umask = os.umask(0o022)
    try:
        trained = train(
            *settings, f"dataset.path={tmp_path / 'pets'}", f"output_dir={tmp_path / 'run'}", code=0
        )
    finally:
        os.umask(umask)
    assert "16 pictures to train on, 16 to test on" in trained.stdout
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o644}
    model = dlion.load_model(tmp_path / "run")
    assert list(model.input.names) == ["cats", "dogs"]
    for name in ("cats", "dogs"):
        logits = model(model.input(str(tmp_path / "pets" / "test" / name / "0.PNG")))
        assert model.input.names[logits.argmax()] == name
    # the training pictures decide the normalisation of a run: others do not change what it measures
    shutil.copytree(tmp_path / "pets" / "test", tmp_path / "others" / "test")
    for path in (tmp_path / "pets" / "test").rglob("*.PNG"):
        darker = Image.open(path).point(lambda value: value // 3)
        new = tmp_path / "others" / "train" / path.parent.name / path.name
        new.parent.mkdir(parents=True, exist_ok=True)
        darker.save(new)
    again = train(f"evaluate={tmp_path / 'run'}", f"dataset.path={tmp_path / 'others'}", code=0)
    recorded = json.loads((tmp_path / "run" / "summary.json").read_text())["test_loss"]
    assert f"test_loss {recorded} (recorded {recorded})" in again.stdout


def test_a_model_of_transformers_takes_bytes(tmp_path):
    text = TextData(
        torch.zeros(99), torch.zeros(99), vocabulary=257, context=4, tokenizer_at="bytes"
    )
    model = models.gpt2(text, n_layer=1, n_embd=8, n_head=2)
    save_model(model, text, tmp_path)
    made = recorded_input(tmp_path)
    assert made.context == 4 and made("abcdef").tolist() == [list(b"cdef")]


def test_weights_for_pictures_of_another_size_name_theirs(root, tmp_path):
    write_classes(tmp_path / "pets", size=16, mode="L")
    words = [*SETTINGS, *TINY, "dataset=images", f"dataset.path={tmp_path / 'pets'}", "workers=2"]
    refused = train(*words, f"init_from={root / 'vit'}", "init_from_except=head.*", code=2)
    assert "its pictures had 8 pixels: dataset.image_size=8" in refused.stderr
