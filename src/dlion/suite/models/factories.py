"""Models by name, built to fit a data set, of which they ask no more than its shape (shapes.py).

torchvision, timm and transformers are imported inside the functions, as each takes seconds.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from dlion.errors import UserError
from dlion.suite.data import Data, Images, Text
from dlion.suite.data.hub import use_the_cache_if_offline
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.models.residual import SmallResNet
from dlion.suite.models.shapes import ImageShape, Shape, TextShape
from dlion.suite.models.transformer import GPT, ViT
from dlion.values import (
    Count,
    Depth,
    Limits,
    Name,
    Positive,
    Probability,
    Whole,
    did_you_mean,
    refusal,
    show,
)

Layers = Annotated[int, Limits(ge=0, le=1000)]
ResNet = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


def linear(data: Data) -> nn.Module:
    """Build a logistic regression on the pixels, the baseline of every other model."""
    images = _images(data)
    pixels = images.channels * images.image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, images.classes))


def vit(
    data: Data,
    patch_size: Count | None = None,
    dim: Count = 64,
    depth: Depth = 2,
    heads: Count = 4,
    mlp_dim: Count = 128,
    dropout: Probability = 0.0,
) -> ViT:
    """Build a vision transformer.

    Args:
        data: images.
        patch_size: height and width of a patch in pixels; None: a quarter of the image.
        dim: width.
        depth: number of blocks.
        heads: of attention; they divide the width.
        mlp_dim: hidden units of the MLPs.
        dropout: probability.

    Raises:
        UserError: if the patches do not fill the image, or the heads the width.
    """
    images = _images(data)
    patch = patch_size or max(images.image_size // 4, 1)
    if images.image_size % patch:
        fitting = [p for p in range(1, images.image_size + 1) if images.image_size % p == 0]
        raise UserError(
            f"model.patch_size={patch} does not divide the image size {images.image_size}: choose"
            f" one of {', '.join(map(str, fitting))}"
        )
    _check_heads(dim=dim, heads=heads)
    return ViT(
        image_size=images.image_size,
        channels=images.channels,
        classes=images.classes,
        patch_size=patch,
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_dim,
        dropout=dropout,
    )


def gpt(
    data: Data,
    dim: Count = 64,
    depth: Depth = 2,
    heads: Count = 4,
    mlp_dim: Count = 256,
    dropout: Probability = 0.0,
    tie_embeddings: bool = True,
    init_std: Positive | None = None,
    modern: bool = False,
) -> GPT:
    """Build a small GPT for the vocabulary and context of the data; see :class:`GPT`.

    Args:
        data: text.
        dim: width.
        depth: number of blocks.
        heads: of attention; they divide the width.
        mlp_dim: hidden units of the MLPs.
        dropout: probability.
        tie_embeddings: use the same matrix for tokens and logits.
        init_std: standard deviation of the first weights; None: 1 / sqrt(dim).
        modern: RMSNorm and gated MLPs, the GPT2++ of arXiv 2404.00438, section 5.2.
    """
    text = _text(data)
    _check_heads(dim=dim, heads=heads)
    return GPT(
        vocabulary=text.vocabulary,
        context=text.context,
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_dim,
        dropout=dropout,
        tie_embeddings=tie_embeddings,
        init_std=init_std,
        modern=modern,
    )


def small_resnet(
    data: Data, blocks: Depth = 1, width: Annotated[int, Limits(ge=2)] = 32
) -> SmallResNet:
    """Build the residual network of 3 * blocks + 5 layers; see :class:`SmallResNet`.

    Args:
        data: images.
        blocks: residual convolutions in each of three stages.
        width: channels of the first stage; the others have twice and four times as many.

    Raises:
        UserError: if nothing would be left of the images after three stages.
    """
    images = _images(data)
    if images.image_size < 8:
        raise UserError(
            f"images of {images.image_size} pixels are too small for model=resnet8, which halves"
            " them three times: they need at least 8"
        )
    return SmallResNet(images.channels, images.classes, blocks, width)


def resnet(data: Data, architecture: ResNet = "resnet18") -> nn.Module:
    """Build torchvision's ResNet.

    Images of up to 64 pixels get a 3 x 3 stem and no max-pooling, as is usual for CIFAR (He et al.
    2016, arXiv 1512.03385, section 4.2).

    Args:
        data: images.
        architecture: torchvision's name for it.
    """
    images = _images(data)
    declare_missing_operators()
    from torchvision import models

    model = models.get_model(architecture, num_classes=images.classes)
    small = images.image_size <= 64
    if small or images.channels != 3:
        size, stride = (3, 1) if small else (7, 2)
        model.conv1 = nn.Conv2d(images.channels, 64, size, stride, size // 2, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        model.maxpool = nn.Identity()
    return model


def timm_model(data: Data, architecture: Name, **options: Any) -> nn.Module:
    """Build any model of timm, untrained, for the size, channels and classes of the data.

    Args:
        data: images.
        architecture: timm's name for it.
        options: what timm gives to the model.

    Raises:
        UserError: if timm has no such model, or the model refuses images of this size.
    """
    images = _images(data)
    declare_missing_operators()
    import timm

    if not timm.is_model(architecture):
        similar = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.4)
        hint = f": did you mean {', '.join(similar)}?" if similar else ": see timm.list_models()"
        raise UserError(f"model.architecture={architecture} is not a model of timm{hint}")
    if options.get("pretrained"):
        use_the_cache_if_offline()
    options = {"num_classes": images.classes, "in_chans": images.channels, **options}
    try:
        return timm.create_model(architecture, img_size=images.image_size, **options)
    except TypeError:  # convolutional networks take any size and no such argument
        return timm.create_model(architecture, **options)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"model.architecture={architecture} does not take images of {images.image_size} pixels"
            f" ({error}): choose another or set its options, +model.patch_size=4 for instance"
        ) from error


class CausalLM(nn.Module):
    """A language model of transformers: tokens ``[B, T]`` -> logits ``[B, T, vocabulary]``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def gpt2(
    data: Data,
    n_layer: Depth = 12,
    n_embd: Count = 768,
    n_head: Count = 12,
    dropout: Probability = 0.0,
) -> CausalLM:
    """Build GPT-2 in any size, untrained, for the vocabulary and context of the data.

    Args:
        data: text.
        n_layer: number of blocks.
        n_embd: width.
        n_head: heads of attention; they divide the width.
        dropout: probability, of embeddings, attention and residuals.
    """
    text = _text(data)
    _check_heads(n_embd=n_embd, n_head=n_head)
    declare_missing_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=text.vocabulary,
        n_positions=text.context,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return CausalLM(GPT2LMHeadModel(config))


def causal_lm(
    data: Data, path: Name | None = None, architecture: Name = "llama", **options: Any
) -> CausalLM:
    """Build any causal language model of transformers, pretrained or not.

    Args:
        data: text; an untrained model takes its vocabulary.
        path: a pretrained model: a folder, or a name of the hub. Only safetensors are read, and no
            code that comes with a model is run. None: an untrained one.
        architecture: the name of an untrained one.
        options: entries of its configuration (llama's defaults are those of the 7-billion model).

    Raises:
        UserError: if the model or option is unknown, or the data has tokens it does not know.
    """
    text = _text(data)
    declare_missing_operators()
    from transformers import AutoConfig, AutoModelForCausalLM

    setting = f"model.path={path}" if path else f"model.architecture={architecture}"
    with _model_errors_named(setting), _hints(path is not None):
        if path is None:
            config = AutoConfig.for_model(architecture, vocab_size=text.vocabulary, **options)
        else:
            if not Path(path).is_dir():
                use_the_cache_if_offline()
            config = AutoConfig.from_pretrained(path, **{**options, "trust_remote_code": False})
        kept = vars(type(config)()).keys() | config.attribute_map.keys()
    for key, value in options.items():  # what is unknown would be kept or ignored without a word
        if not hasattr(config, key) if path else key in vars(config).keys() - kept:
            raise UserError(
                f"model.{key} is no entry of the configuration of {setting}"
                f"{did_you_mean(key, kept)}: transformers documents them as"
                f" {type(config).__name__}"
            )
        is_count = key.startswith(("num_", "n_")) or key.endswith("_size")
        kind = Layers if "layer" in key else Whole
        if is_count and isinstance(value, int) and (wrong := refusal(value, kind)):
            raise UserError(f"model.{key}={show(value)} {wrong}")
    if text.vocabulary > config.vocab_size:
        raise UserError(
            f"{setting} knows {config.vocab_size} tokens, the data set has {text.vocabulary}:"
            " prepare it with the tokenizer of the model"
        )
    most = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) is not None  # which have no last position
    if most is not None and most > 0 and not rotary and text.context > most:
        raise UserError(
            f"{setting} sees {most} tokens at once, fewer than dataset.context={text.context}: type"
            f" dataset.context={most} or less"
        )
    with _model_errors_named(setting), _hints(path is not None):
        if path is None or torch.get_default_device().type == "meta":
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        else:
            model = _pretrained(path, config)
    return CausalLM(model)


def saved_causal_lm(folder: Path) -> CausalLM:
    """Load a model of transformers, in float32, from a folder that ``save_pretrained`` wrote.

    Raises:
        UserError: if the folder holds none.
    """
    declare_missing_operators()
    with _model_errors_named(str(folder)):
        return CausalLM(_pretrained(folder))


def _pretrained(path: str | Path, config: Any = None) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if Path(path).is_dir():
        logging.disable_progress_bar()  # each process would show one
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )


@contextmanager
def _hints(shown: bool) -> Iterator[None]:
    """Show transformers' warnings, or not: those about untrained models are of no use here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    if not shown:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _model_errors_named(setting: str) -> Iterator[None]:
    """Turn an error of transformers about a model into a UserError that names the setting."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except StrictDataclassError as error:  # of an option: its last line is the reason
        raise UserError(f"{setting}: {str(error).strip().splitlines()[-1].strip()}") from error
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{setting} is a model with code of its own, which is not run"
            ) from error
        raise UserError(
            f"{setting} is not a causal language model of transformers that could be loaded:"
            f" {str(error).strip().splitlines()[0].partition(' Should contain one of')[0]}"
        ) from error


def _images(data: Data | Shape) -> Images | ImageShape:
    if not isinstance(data, Images | ImageShape):
        raise UserError("this model takes images, the data set is text: type model=gpt_tiny")
    return data


def _text(data: Data | Shape) -> Text | TextShape:
    if not isinstance(data, Text | TextShape):
        raise UserError("this model takes text, the data set is images: type model=vit_tiny")
    return data


def _check_heads(**sizes: int) -> None:
    """Refuse a width that the heads do not divide; both are given by their names."""
    (width, dim), (number, heads) = sizes.items()
    if dim % heads:
        raise UserError(
            f"model.{width}={dim} is not divisible by model.{number}={heads}: give a multiple"
        )
