"""Models that take their shape from the data set."""

from typing import Any

from torch import nn

from dlion.suite.config import instantiate
from dlion.suite.data import Data
from dlion.suite.models.factories import (
    CausalLM,
    causal_lm,
    gpt,
    gpt2,
    linear,
    resnet,
    saved_causal_lm,
    small_resnet,
    timm_model,
    vit,
)
from dlion.suite.models.shapes import ImageShape, Shape, TextShape, shape_from, shape_of
from dlion.suite.models.transformer import GPT, ViT

__all__ = [
    "GPT",
    "CausalLM",
    "ImageShape",
    "Shape",
    "TextShape",
    "ViT",
    "build",
    "causal_lm",
    "gpt",
    "gpt2",
    "linear",
    "resnet",
    "saved_causal_lm",
    "shape_from",
    "shape_of",
    "small_resnet",
    "timm_model",
    "vit",
]


def build(node: Any, data: Data | Shape) -> nn.Module:
    """Build the model of a config node for a data set, or for one of its shape."""
    return instantiate(node, data)
