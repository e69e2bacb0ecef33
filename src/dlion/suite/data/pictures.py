"""Encoded pictures, from files or tables: one at a time, or all of them as a tensor in memory."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dlion.errors import UserError
from dlion.values import Called

_MOST_BYTES = 4 * 10**9  # of pixels in memory
_GREY = ("1", "L", "LA", "La")  # Pillow's names
_DEEP = ("I", "F")  # beginnings of its names for grey of more than 8 bits
_PHOTOMETRIC = 262  # TIFF's tag of what is white; 0: zero
_GAMMA = 1 / 2.2  # of PNG files that are as screens show them

Source = Path | bytes | np.ndarray | Image.Image
"""A picture's file, the content of one, its pixels, uint8 ``[H, W]``, or Pillow's."""

Levels = Annotated[tuple[float, float], Called("two numbers, [BLACK, WHITE]")]


def read_picture(
    source: Source, name: str, keep_grey: bool = False, levels: Sequence[float] | None = None
) -> Image.Image:
    """Decode a picture to 8 bits a channel as people see it, in colour unless it may stay grey.

    It is turned as its EXIF orientation says, its colours are those of its ICC profile or gamma,
    and what is transparent shows a white ground. Of an animation, or a file of several pages, it is
    the first picture.

    Args:
        source: where it is.
        name: for messages.
        keep_grey: whether a grey picture stays grey.
        levels: of grey values of more than 8 bits, as :func:`levels_of` returns them for a set of
            pictures; None: those of this picture.

    Raises:
        UserError: if it is damaged, no picture, or of more pixels than one has (Pillow's limit,
            against files that are small only until they are decoded).
    """
    with _opened(source, name) as image:
        image.load()
        with contextlib.suppress(Exception):  # EXIF may say anything
            ImageOps.exif_transpose(image, in_place=True)
        grey = image.mode in _GREY or image.mode.startswith(_DEEP)
        image = _in_srgb(_on_white(_to_8_bits(image, levels)))
        return image.convert("L" if keep_grey and grey else "RGB")


def levels_of(pictures: Iterable[tuple[str, Source]]) -> tuple[float, float] | None:
    """Return the grey values of a set of pictures that become black and white.

    Only grey pictures of more than 8 bits count, without any it is None. It is all of 16 bits where
    they fill more than half of these, and their darkest and brightest value otherwise, as for scans
    of 12 bits.

    Raises:
        UserError: as :func:`read_picture`.
    """
    ranges = []
    for name, source in pictures:
        with _opened(source, name) as image:
            if image.mode.startswith(_DEEP):  # of others no more than the header is read
                ranges.append(_range(_grey_values(image), image.info.get("transparency")))
    return _levels(ranges) if ranges else None


@contextlib.contextmanager
def _opened(source: Source, name: str) -> Iterator[Image.Image]:
    """Open a picture; what goes wrong with it in here is said in one sentence.

    Raises:
        UserError: calling it ``name``.
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
            yield image
    except Exception as error:  # Pillow's readers raise whatever they come across
        reason = str(error).partition("\n")[0]
        if isinstance(error, UnidentifiedImageError):
            empty = source == b"" or (isinstance(source, Path) and not source.stat().st_size)
            reason = "it is empty" if empty else "its format is not known"
        raise UserError(
            f"{name} is not a picture that can be read"
            f" ({reason or type(error).__name__}): replace it, or leave it out"
        ) from error


def _grey_values(image: Image.Image) -> np.ndarray:
    """Return grey of more than 8 bits, dark where it is small."""
    values = np.asarray(image)
    inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0  # Pillow inverts 8 bits alone
    return 2**16 - 1 - values if inverted and image.mode.startswith("I;16") else values


def _range(values: np.ndarray, clear: int | None) -> tuple[float, float]:
    """Return the least and the greatest value that is finite and not the transparent one."""
    seen = values[np.isfinite(values) & (values != clear)]
    return (float(seen.min()), float(seen.max())) if seen.size else (0.0, 0.0)


def _levels(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    whole = 0 <= low <= high < 2**16 and not 0 < high - low < 2**15
    return (0.0, 65280.0) if whole else (low, high)  # 255 / 65280 = 1 / 256


def _to_8_bits(image: Image.Image, levels: Sequence[float] | None) -> Image.Image:
    """Return a picture whose channels have 8 bits, with a transparent value as it was."""
    clear = image.info.get("transparency")
    if not image.mode.startswith(_DEEP):
        if image.mode == "RGB" and clear is not None and max(clear) > 255:
            image.info["transparency"] = tuple(value >> 8 for value in clear)  # as its pixels
        return image
    values = _grey_values(image).astype(np.float64)
    low, high = levels or _levels([_range(values, clear)])
    shades = (values - low) * 255 / ((high - low) or 1)
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


def _in_srgb(image: Image.Image) -> Image.Image:
    """Return an opaque picture in the colours that its ICC profile or PNG's gamma stands for."""
    profile, gamma = image.info.get("icc_profile"), image.info.get("gamma")
    if "srgb" in image.info or not (profile or gamma or image.mode == "LAB"):
        return image
    if image.mode not in ("L", "CMYK", "LAB"):
        image = image.convert("RGB")
    if profile or image.mode == "LAB":
        change = _to_srgb(profile, image.mode)
        return image if change is None else change.apply(image)
    exponent = _GAMMA / gamma
    table = [round(255 * (value / 255) ** exponent) for value in range(256)]
    return image.point(table * len(image.getbands())) if abs(exponent - 1) > 0.05 else image


@lru_cache(maxsize=64)
def _to_srgb(profile: bytes | None, mode: str) -> Any:
    """Return the change of colours from an ICC profile; None: there is nothing to change."""
    try:
        source: Any = ImageCms.createProfile("LAB")
        if profile:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "srgb" in ImageCms.getProfileDescription(source).lower():
                return None
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):  # it is damaged, or of other colours
        return None


def decode(
    pictures: Iterable[tuple[str, Source]],
    count: int,
    size: int | None = None,
    keep_grey: bool = False,
    levels: Sequence[float] | None = None,
) -> Tensor:
    """Decode square pictures to uint8 ``[N, C, S, S]``.

    Args:
        pictures: the name of each for messages, and where it is.
        count: how many they are.
        size: pixels S to which they are scaled, after the middle was cut out of those that are not
            square; None: they are S pixels high and wide already.
        keep_grey: make one channel (C = 1) if all are grey; otherwise there are three.
        levels: of grey values of more than 8 bits, as for :func:`read_picture`.

    Raises:
        UserError: if one cannot be read, they differ in size, or are too much for the memory.
    """
    progress = Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
    with progress:
        named = progress.track(pictures, count, description="reading pictures")
        arrays = list(_squares(named, count, size, keep_grey, levels))
    if any(array.ndim == 3 for array in arrays):
        arrays = [a if a.ndim == 3 else np.stack(3 * [a], axis=-1) for a in arrays]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(arrays)).unsqueeze(1)


def _squares(
    pictures: Iterable[tuple[str, Source]],
    count: int,
    size: int | None,
    keep_grey: bool,
    levels: Sequence[float] | None,
) -> Iterator[np.ndarray]:
    """Yield the pixels of pictures of one size, ``[S, S]`` or ``[S, S, 3]``."""
    first, side = "", 0
    if size is not None:
        _check_memory(count, size)
    for name, source in pictures:
        image = read_picture(source, name, keep_grey, levels)
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
    if len(pictures) > 1 and all(torch.equal(each, pictures[0]) for each in pictures[1:]):
        raise UserError(
            f"{where}: the {len(pictures):,} training pictures are all equal once they are read and"
            " scaled: look at one of them (what is transparent becomes white), or give others"
        )
