"""CIFAR-10 and CIFAR-100: the hub's copies, or folders in the same layout."""

import io
from typing import Any

import numpy as np
import torch

from dlion.data.images import ImageData
from dlion.data.parquet import load_hub, load_parquet
from dlion.errors import UserError


def cifar10(
    path: str | None = None,
    augment: bool = True,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> ImageData:
    """CIFAR-10, 50,000 + 10,000 colour images of 32 x 32 in 10 classes.

    Args:
        path: a folder with ``train-*.parquet`` and ``test-*.parquet``, or ``train/*.parquet`` and
            ``test/*.parquet``, at any depth, of columns ``img`` (encoded images) and ``label``;
            None: the hub's ``uoft-cs/cifar10``.
        augment: random crop with 4 pixels of padding and horizontal flip.
        train_limit, test_limit: use only so many images, drawn once and for all; None: all.

    Raises:
        UserError: if there is no such folder, no such file, no such column, or no hub.
    """
    return _load("uoft-cs/cifar10", "label", 10, path, augment, train_limit, test_limit)


def cifar100(
    path: str | None = None,
    augment: bool = True,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> ImageData:
    """CIFAR-100, 100 classes in the column ``fine_label``; otherwise as :func:`cifar10`."""
    return _load("uoft-cs/cifar100", "fine_label", 100, path, augment, train_limit, test_limit)


def _load(
    hub: str,
    label: str,
    classes: int,
    path: str | None,
    augment: bool,
    train_limit: int | None,
    test_limit: int | None,
) -> ImageData:
    from datasets import Image

    columns = {"img", label}
    if path is None:
        splits = load_hub(hub, columns)
    else:
        splits = load_parquet(path, {"train": "train", "test": "test"}, columns)
    parts: list[torch.Tensor] = []
    for name, limit in (("train", train_limit), ("test", test_limit)):
        split = splits[name].cast_column("img", Image(decode=False))
        if limit is not None and limit < len(split):
            split = split.select(np.sort(np.random.default_rng(0).permutation(len(split))[:limit]))
        try:
            labels = torch.tensor(split[label][:], dtype=torch.int64)
            parts += [_decode(split["img"]), labels]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path or hub}: an image or label of {name} is not one ({error})"
            ) from error
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise UserError(f"{path or hub}: {name} has labels outside 0 .. {classes - 1}")
    return ImageData(*parts, classes=classes, crop=augment, flip=augment)


def _decode(images: Any) -> torch.Tensor:
    """Encoded images, ``{"bytes": ...}`` each, to uint8 ``[N, 3, 32, 32]``."""
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(i["bytes"])).convert("RGB")) for i in images]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
