"""Data sets, and how they are divided among workers."""

from typing import Any

from dlion.errors import UserError
from dlion.suite.config import instantiate
from dlion.suite.data.base import Data, Images, Text
from dlion.suite.data.choices import choices
from dlion.suite.data.cifar import cifar10, cifar100
from dlion.suite.data.digits import digits, mnist5k
from dlion.suite.data.folders import state_of
from dlion.suite.data.image_data import ImageData
from dlion.suite.data.image_files import ImageFiles, imagenet
from dlion.suite.data.multiple_choice import MultipleChoice
from dlion.suite.data.next_line import next_line
from dlion.suite.data.own_images import images
from dlion.suite.data.sharding import Dealing, Sharding
from dlion.suite.data.text import TextData, stdlib_text
from dlion.suite.data.tokens import prepared_text
from dlion.suite.settings import Samples
from dlion.values import parameters

__all__ = [
    "Data",
    "Dealing",
    "ImageData",
    "ImageFiles",
    "Images",
    "MultipleChoice",
    "Sharding",
    "Text",
    "TextData",
    "choices",
    "cifar10",
    "cifar100",
    "digits",
    "imagenet",
    "images",
    "load",
    "mnist5k",
    "next_line",
    "prepared_text",
    "stdlib_text",
]

_latest: dict[str, tuple[Any, ImageData]] = {}  # one at most, by its settings: files and data


def load(node: Any) -> Data:
    """Load the data set of a config node; ``validation`` replaces its test set by training data.

    The next run of a sweep shares pictures that are in memory, if its settings and the files are
    the same: to decode CIFAR-10 takes as long as hundreds of steps.
    """
    settings = {key: value for key, value in node.items() if key not in parameters(Samples)}
    key, path = f"{settings} {node.validation}", settings.get("path")
    files, data = _latest.pop(key, (None, None))
    _latest.clear()  # before others are loaded, which may need the memory
    if data is None or files != state_of(path):
        data = instantiate(settings)
        data = _held_out(data) if node.validation else data
    if isinstance(data, ImageData):
        _latest[key] = state_of(path), data
    return data


def _held_out(data: Data) -> Data:
    held_out = data.hold_out()
    if held_out.test_size < 1:
        raise UserError(
            f"dataset.validation=true holds out a tenth of the {data.train_size} training samples,"
            " which is too little to test on: give more, or leave it out"
        )
    return held_out
