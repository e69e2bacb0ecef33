"""Facts of a data set that suffice to build its model again without the data."""

from dataclasses import dataclass
from typing import Any

from dlion.suite.data import Data, Images, Text


@dataclass(frozen=True)
class ImageShape:
    """The shape of images and the number of their labels, as ``dlion.suite.data.Images`` has it."""

    channels: int
    image_size: int
    classes: int


@dataclass(frozen=True)
class TextShape:
    """Vocabulary and context of a text, as ``dlion.suite.data.Text`` has them."""

    vocabulary: int
    context: int


Shape = ImageShape | TextShape


def shape_of(data: Data) -> Shape | None:
    """Return the shape of images or text, None of data of another kind."""
    if isinstance(data, Images):
        return ImageShape(data.channels, data.image_size, data.classes)
    if isinstance(data, Text):
        return TextShape(data.vocabulary, data.context)
    return None


def shape_from(facts: dict[str, Any]) -> Shape:
    """Return the shape whose attributes these are.

    Raises:
        TypeError: if they are those of no shape.
    """
    return ImageShape(**facts) if "classes" in facts else TextShape(**facts)
