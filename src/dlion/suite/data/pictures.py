"""Encoded pictures, from files or tables: one at a time, or all of them as a tensor in memory."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dlion.errors import UserError

_MOST_BYTES = 4 * 10**9  # of pixels in memory
_GREY = ("1", "L", "LA", "La")  # Pillow's names
_DEEP = ("I", "F")  # beginnings of its names for grey of more than 8 bits

Source = Path | bytes | np.ndarray | Image.Image
"""A picture's file, the content of one, its pixels, uint8 ``[H, W]``, or Pillow's."""


def read_picture(source: Source, name: str, keep_grey: bool = False) -> Image.Image:
    """Decode a picture to 8 bits a channel as people see it, in colour unless it may stay grey.

    It is turned as its EXIF orientation says, and what is transparent shows a white ground. Grey
    values of more than 8 bits become 0 .. 255: of 16 bits in proportion, and where they fill less
    than half of these, as scans of 12 bits do, from the picture's darkest to its brightest.

    Raises:
        UserError: calling it ``name``, if it is damaged, no picture, or of more pixels than one has
            (Pillow's limit, against files that are small only until they are decoded).
    """
    try:
        if isinstance(source, Image.Image):
            image = source.copy()
        elif isinstance(source, np.ndarray):
            image = Image.fromarray(source)
        else:
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        with image, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF entries, which do not matter here
            image.load()
            with contextlib.suppress(Exception):  # it may say anything
                ImageOps.exif_transpose(image, in_place=True)
            grey = image.mode in _GREY or image.mode.startswith(_DEEP)
            image = _on_white(_to_8_bits(image))
            return image.convert("L" if keep_grey and grey else "RGB")
    except Exception as error:  # Pillow's readers raise whatever they come across
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "its format is not known" if unknown else str(error).partition("\n")[0]
        raise UserError(
            f"{name} is not a picture that can be read"
            f" ({reason or type(error).__name__}): replace it, or leave it out"
        ) from error


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return a picture whose channels have 8 bits, with a transparent grey value as it was."""
    clear = image.info.get("transparency")
    if not image.mode.startswith(_DEEP):
        if image.mode == "RGB" and clear is not None and max(clear) > 255:
            image.info["transparency"] = tuple(value >> 8 for value in clear)  # as its pixels
        return image
    values = np.asarray(image).astype(np.float64)
    seen = values[np.isfinite(values) & (values != clear)]
    low, high = (seen.min(), seen.max()) if seen.size else (0.0, 0.0)
    if 0 <= low <= high < 2**16 and not 0 < high - low < 2**15:
        shades = values / 256
    else:
        shades = 255 * (values - low) / ((high - low) or 1)
    pixels = np.nan_to_num(shades, posinf=255, neginf=0).clip(0, 255).astype(np.uint8)
    if clear is None:
        return Image.fromarray(pixels)
    alpha = np.where(values == clear, 0, 255).astype(np.uint8)
    return Image.merge("LA", [Image.fromarray(pixels), Image.fromarray(alpha)])


def _on_white(image: Image.Image) -> Image.Image:
    """Return a picture without transparency, as it looks on a white ground."""
    if not image.has_transparency_data:
        return image
    if image.mode in ("La", "PA"):
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


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
                f" square, of one size: type dataset=images dataset.image_size={side} to cut and"
                " scale them"
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


def check_varied(pictures: Tensor, where: str) -> None:
    """Refuse training pictures ``[N, ...]`` that are all equal, of which nothing can be learnt."""
    if len(pictures) > 1 and bool((pictures == pictures[:1]).all()):
        raise UserError(
            f"{where}: the {len(pictures):,} training pictures are all equal once they are read and"
            " scaled: look at one of them (what is transparent becomes white), or give others"
        )
