"""Models that take their shape from the data set."""

from typing import Any

import hydra
from torch import nn

from dlion.data import ImageData, TextData
from dlion.models.factories import gpt, gpt2, resnet, timm_model, vit
from dlion.models.transformer import GPT, ViT

__all__ = ["GPT", "ViT", "build", "gpt", "gpt2", "resnet", "timm_model", "vit"]


def build(node: Any, data: ImageData | TextData) -> nn.Module:
    """The model of a config node (``name`` is for the records) for a data set."""
    options = {key: value for key, value in node.items() if key != "name"}
    return hydra.utils.instantiate(options, _partial_=True)(data)
