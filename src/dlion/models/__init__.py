"""Models that take their shape from the data set."""

from typing import Any

from torch import nn

from dlion.config import instantiate
from dlion.data import Data
from dlion.models.factories import causal_lm, gpt, gpt2, linear, resnet, timm_model, vit
from dlion.models.transformer import GPT, ViT

__all__ = [
    "GPT",
    "ViT",
    "build",
    "causal_lm",
    "gpt",
    "gpt2",
    "linear",
    "resnet",
    "timm_model",
    "vit",
]


def build(node: Any, data: Data) -> nn.Module:
    """Build the model of a config node for a data set."""
    return instantiate(node, data)
