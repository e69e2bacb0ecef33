"""Encoded pictures, from files or tables: one at a time, or all of them as a tensor in memory."""

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dlion.errors import UserError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MOST_BYTES = 4 * 10**9  # of pixels in memory
_GREY = ("1", "L", "LA")  # Pillow's names

Source = Path | bytes | np.ndarray
"""A picture's file, the content of one, or its grey pixels, uint8 ``[H, W]``."""


def read_picture(source: Source, name: str, keep_grey: bool = False) -> Image.Image:
    """Decode a picture to 8 bits a channel, in colour unless it is grey and may stay so.

    Raises:
        UserError: calling it ``name``, if it is damaged, no picture, or of more pixels than one has
            (Pillow's limit, against files that are small only until they are decoded).
    """
    try:
        if isinstance(source, np.ndarray):
            image = Image.fromarray(source)
        else:
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        with image:
            if image.mode.startswith("I;16"):  # Pillow would make all but the darkest white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode == "P" and "transparency" in image.info:  # Pillow would warn
                image = image.convert("RGBA")
            if image.mode in ("I", "F"):
                raise ValueError("it has 32 bits a pixel, 8 or 16 are possible")
            return image.convert("L" if keep_grey and image.mode in _GREY else "RGB")
    except Exception as error:  # Pillow's readers raise whatever they come across
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "its format is not known" if unknown else str(error).partition("\n")[0]
        raise UserError(
            f"{name} is not a picture that can be read"
            f" ({reason or type(error).__name__}): replace it, or leave it out"
        ) from error


def decode(
    pictures: Iterable[tuple[str, Source]],
    count: int,
    size: int | None = None,
    keep_grey: bool = False,
) -> Tensor:
    """Decode square pictures to uint8 ``[N, C, S, S]``.

    Args:
        pictures: the name of each for messages, and where it is.
        count: how many they are.
        size: pixels S to which they are scaled, after the middle was cut out of those that are not
            square; None: they are S pixels high and wide already.
        keep_grey: make one channel (C = 1) if all are grey; otherwise there are three.

    Raises:
        UserError: if one cannot be read, they differ in size, or are too much for the memory.
    """
    progress = Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
    with progress:
        named = progress.track(pictures, count, description="reading pictures")
        arrays = list(_squares(named, count, size, keep_grey))
    if any(array.ndim == 3 for array in arrays):
        arrays = [a if a.ndim == 3 else np.stack(3 * [a], axis=-1) for a in arrays]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(arrays)).unsqueeze(1)


def _squares(
    pictures: Iterable[tuple[str, Source]], count: int, size: int | None, keep_grey: bool
) -> Iterator[np.ndarray]:
    """Yield the pixels of pictures of one size, ``[S, S]`` or ``[S, S, 3]``."""
    first, side = "", 0
    if size is not None:
        _check_memory(count, size)
    for name, source in pictures:
        image = read_picture(source, name, keep_grey)
        if size is not None and image.size != (size, size):
            image = ImageOps.fit(image, (size, size))
        if not first:
            first, side = name, image.width
            if size is None:
                _check_memory(count, side)
        if image.size != (side, side):
            width, height = image.size
            raise UserError(
                f"{name} has {width} x {height} pixels, but {first} is {side} wide and all must be"
                f" square and alike: type dataset=images dataset.image_size={side} to cut and scale"
                " them"
            )
        yield np.asarray(image)


def _check_memory(count: int, side: int) -> None:
    size = 3 * count * side**2
    if size > _MOST_BYTES:
        raise UserError(
            f"{count:,} pictures of {side} x {side} pixels take {size / 1e9:.1f} GB in memory: type"
            f" a smaller dataset.image_size, or dataset=imagenet dataset.image_size={side}, which"
            " decodes them when they are needed"
        )
