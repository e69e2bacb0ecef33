"""CIFAR-10 and CIFAR-100: the hub's copies, or folders in the same layout."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dlion.data.images import ImageData
from dlion.data.parquet import keep_encoded, load_hub, load_parquet
from dlion.errors import UserError
from dlion.values import Count, Folder


def cifar10(
    path: Folder | None = None,
    augment: bool = True,
    train_limit: Count | None = None,
    test_limit: Count | None = None,
) -> ImageData:
    """Load CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 in 10 classes.

    Args:
        path: a folder with ``train-*.parquet`` and ``test-*.parquet``, or ``train/*.parquet`` and
            ``test/*.parquet``, at any depth, of columns ``img`` (encoded images) and ``label``;
            None: the hub's ``uoft-cs/cifar10``.
        augment: random crop with 4 pixels of padding and horizontal flip.
        train_limit, test_limit: the number of images to use, the same in every run; None: all.

    Raises:
        UserError: if there is no such folder, no such file, no such column, or no hub.
    """
    limits = {"train": train_limit, "test": test_limit}
    return _load("uoft-cs/cifar10", path, "label", classes=10, augment=augment, limits=limits)


def cifar100(
    path: Folder | None = None,
    augment: bool = True,
    train_limit: Count | None = None,
    test_limit: Count | None = None,
) -> ImageData:
    """Load CIFAR-100: 100 classes in the column ``fine_label``; otherwise as :func:`cifar10`.

    Args:
        path: as for :func:`cifar10`; None: the hub's ``uoft-cs/cifar100``.
        augment: random crop with 4 pixels of padding and horizontal flip.
        train_limit, test_limit: the number of images to use, the same in every run; None: all.
    """
    limits = {"train": train_limit, "test": test_limit}
    return _load(
        "uoft-cs/cifar100", path, "fine_label", classes=100, augment=augment, limits=limits
    )


def _load(
    hub: str,
    path: str | None,
    label: str,
    *,
    classes: int,
    augment: bool,
    limits: Mapping[str, int | None],
) -> ImageData:
    """Load the splits that ``limits`` names; ``label`` is the column of the labels."""
    columns = {"img", label}
    if path is None:
        tables = load_hub(hub, columns)
    else:
        tables = load_parquet(path, {split: split for split in limits}, columns)
    tensors: list[Tensor] = []
    for split, limit in limits.items():
        table = keep_encoded(tables[split], "img")
        if limit is not None and limit < len(table):
            table = table.select(np.sort(np.random.default_rng(0).permutation(len(table))[:limit]))
        try:
            labels = torch.tensor(table[label][:], dtype=torch.int64)
            tensors += [_decode(table["img"]), labels]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path or hub}: an image or label of {split} is not one ({error})"
            ) from error
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise UserError(f"{path or hub}: {split} has labels outside 0 .. {classes - 1}")
    return ImageData(*tensors, classes=classes, crop=augment, flip=augment)


def _decode(images: Iterable[Any]) -> Tensor:
    """Decode images, ``{"bytes": ...}`` each, to uint8 ``[N, 3, 32, 32]``."""
    pixels = [np.asarray(Image.open(io.BytesIO(i["bytes"])).convert("RGB")) for i in images]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
