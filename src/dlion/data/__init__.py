"""Data sets and how they are dealt out to workers."""

from typing import Any

from dlion.config import make
from dlion.data.base import ImageData, TextData
from dlion.data.cifar10 import cifar10
from dlion.data.digits import digits, mnist5k
from dlion.data.sharding import Sharding
from dlion.data.text import stdlib_text

__all__ = [
    "ImageData",
    "Sharding",
    "TextData",
    "cifar10",
    "digits",
    "load",
    "mnist5k",
    "stdlib_text",
]


def load(node: Any) -> ImageData | TextData:
    """The data set of a config node: ``source`` makes it, ``validation`` swaps the test set."""
    data = make(node.source)
    return data.hold_out() if node.validation else data
