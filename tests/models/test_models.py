"""Every model fits the data it is given, or says what would."""

import importlib
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.nn import functional as F

from dlion.errors import TrainingFailed, UserError
from dlion.suite import models
from dlion.suite.data import ImageData, TextData
from dlion.suite.models.causal import check_causal
from dlion.suite.models.shapes import TextShape
from tests.conftest import ROOT
from tests.data.formats import write_llama


def images(size: int = 32, channels: int = 3, classes: int = 10) -> ImageData:
    x = torch.randint(256, (8, channels, size, size), dtype=torch.uint8)
    return ImageData(x, torch.arange(8) % classes, x, torch.arange(8) % classes, classes)


def text() -> TextData:
    tokens = torch.randint(256, (400,), dtype=torch.uint8)
    return TextData(tokens, tokens, 256, context=16)


def node(name: str, **options):
    return OmegaConf.merge(OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml"), options)


@pytest.mark.parametrize(
    ("architecture", "options"), [("resnet10t", {}), ("vit_tiny_patch16_224", {"depth": 1})]
)
def test_the_line_of_the_guide_loads_a_model_of_timm(tmp_path, architecture, options):
    model = models.timm_model(images(), architecture, **options)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    page = (ROOT / "docs" / "how-to" / "use-a-model.md").read_text()
    line = next(
        line
        for line in page.splitlines()
        if "timm.create_model(" in line and line.endswith("# a ViT") == ("vit" in architecture)
    )
    known = {"weights": f"{tmp_path}/model.safetensors", "timm": importlib.import_module("timm")}
    more = "".join(f", {key}={value}" for key, value in options.items())
    exec(line.replace("NAME", f"'{architecture}'{more}"), known)
    with torch.no_grad():
        one, other = (made.eval()(torch.ones(1, 3, 32, 32)) for made in (model, known["model"]))
    assert torch.equal(one, other)


CASES = [
    ("vit_tiny", images(28, 1), {}),
    ("linear", images(28, 1), {}),
    ("vit_tiny", images(8, 1), {}),
    ("resnet8", images(), {}),
    ("resnet8", images(8, 1), {"width": 2, "blocks": 2}),
    ("vit_cifar", images(), {"depth": 1}),
    ("resnet18", images(28, 1), {}),
    ("resnet50", images(), {}),
    ("timm", images(), {"architecture": "resnet10t"}),
    ("timm", images(), {"patch_size": 8}),
    ("gpt_tiny", text(), {}),
    ("gpt_tiny", text(), {"tie_embeddings": False}),
    ("gpt_tiny", text(), {"modern": True}),
    ("gpt2", text(), {"n_layer": 1, "n_embd": 32, "n_head": 2}),
    ("llama_tiny", text(), {}),
    (
        "causal_lm",
        text(),
        {
            "architecture": "gpt_neox",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
]


@pytest.mark.parametrize(("name", "data", "options"), CASES)
def test_model_trains_on_its_data(name, data, options):
    config = OmegaConf.merge(node(name), options)
    with torch.device("meta"):
        counted = sum(p.numel() for p in models.build(config, data).parameters())
    model = models.build(config, data)
    assert sum(p.numel() for p in model.parameters()) == counted
    x, y = data.batch(torch.arange(4), torch.Generator().manual_seed(0))
    logits = model(x)
    assert logits.shape == (*y.shape, 10 if isinstance(data, ImageData) else 256)
    F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_papers_vit_has_its_size():
    with torch.device("meta"):
        model = models.build(node("vit_cifar"), images())
    assert len(model.blocks) == 6 and model.norm.normalized_shape == (512,)
    assert 9.4e6 < sum(p.numel() for p in model.parameters()) < 9.7e6


@pytest.mark.parametrize(
    ("name", "data", "options", "sentence"),
    [
        ("vit_tiny", text(), {}, "type model=gpt_tiny"),
        ("gpt_tiny", images(), {}, "type model=vit_tiny"),
        ("vit_tiny", images(28, 1), {"patch_size": 5}, "choose one of 1, 2, 4, 7, 14, 28"),
        ("vit_tiny", images(), {"heads": 3}, "model.dim=64 is not divisible by model.heads=3"),
        ("timm", images(), {"architecture": "resnt18"}, "did you mean resnet18"),
    ],
)
def test_what_does_not_fit_is_explained(name, data, options, sentence):
    with pytest.raises(UserError, match=sentence):
        models.build(OmegaConf.merge(node(name), options), data)


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_used():
    code = "import sys, dlion.suite.training, dlion.suite.launch; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    heavy = {"timm", "torchvision", "transformers", "datasets", "wandb", "matplotlib", "plotly"}
    assert loaded and not heavy & set(loaded.split())


def test_a_pretrained_model_comes_from_a_folder(tmp_path):
    write_llama(tmp_path)
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(20, (300,), dtype=torch.uint8)
    data = TextData(tokens, tokens, 20, context=16)
    model = models.build(node("causal_lm", path=str(tmp_path)), data)
    x, _ = data.test_batch(0, 2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model(x), theirs(x).logits)


def test_a_pretrained_model_that_does_not_fit_is_named(tmp_path):
    data = text()
    with pytest.raises(UserError, match="is not a causal language model of transformers"):
        models.build(node("causal_lm", path=str(tmp_path)), data)
    with pytest.raises(UserError, match=r"model.architecture=lama is not a causal"):
        models.build(node("causal_lm", architecture="lama"), data)
    with pytest.raises(UserError, match=r"model.hidden_sise .*=llama \(did you mean hidden_size"):
        models.build(node("causal_lm", architecture="llama", hidden_sise=64), data)
    write_llama(tmp_path)
    for unknown in ("hidden_sise", "trust_remote_code"):
        with pytest.raises(UserError, match=f"model.{unknown} is no entry of the configuration"):
            models.build(node("causal_lm", path=str(tmp_path), **{unknown: True}), data)
    with pytest.raises(UserError, match="the data set has 256: prepare it with the tokenizer"):
        models.build(node("causal_lm", path=str(tmp_path)), data)


def test_constants_keep_their_precision_in_bfloat16():
    from dlion.suite.training.precision import in_precision

    model = in_precision(models.build(node("llama_tiny"), text()), "bf16", "cpu")
    frequencies = dict(model.named_buffers())["model.model.rotary_emb.inv_freq"]
    assert frequencies.dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_weights_in_pickles_are_not_read(tmp_path):
    write_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    tokens = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(UserError, match="is not a causal language model"):
        models.build(node("causal_lm", path=str(tmp_path)), TextData(tokens, tokens, 20, 16))


def test_a_language_model_that_looks_ahead_is_refused():
    text, small = TextShape(vocabulary=32, context=16), {"hidden_size": 16}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for options in ({"is_decoder": True}, {}):
        model = models.causal_lm(text, architecture="bert", **small, **options).train()
        with nullcontext() if options else pytest.raises(TrainingFailed, match="is_decoder=true"):
            check_causal(model, text.vocabulary, text.context, "cpu")
        assert model.training
    check_causal(models.gpt(text, dim=8, depth=1, heads=2), 32, 16, "cpu")
