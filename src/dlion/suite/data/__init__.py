"""Data sets, and how they are divided among workers."""

from typing import Any

from dlion.errors import UserError
from dlion.suite.config import instantiate
from dlion.suite.data.base import Data, Images, Text
from dlion.suite.data.choices import choices
from dlion.suite.data.cifar import cifar10, cifar100
from dlion.suite.data.digits import digits, mnist5k
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


def load(node: Any) -> Data:
    """Load the data set of a config node; ``validation`` replaces its test set by training data."""
    data = instantiate(
        {key: value for key, value in node.items() if key not in parameters(Samples)}
    )
    if not node.validation:
        return data
    held_out = data.hold_out()
    if held_out.test_size < 1:
        raise UserError(
            f"dataset.validation=true holds out a tenth of the {data.train_size} training samples,"
            " which is too little to test on: give more, or leave it out"
        )
    return held_out
