"""CIFAR-10 and CIFAR-100: the hub's copies, or folders in the same layout."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.suite.data.folders import LeftOut
from dlion.suite.data.image_data import ImageData
from dlion.suite.data.parquet import (
    NamedPictures,
    class_names,
    keep_encoded,
    load_hub,
    load_parquet,
)
from dlion.suite.data.pictures import check_varied, decode
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
        UserError: if the folder, a file or a column is missing, or the hub is not available.
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
    columns, left_out, names = {"img", label}, LeftOut(), ()
    if path is None:
        tables = load_hub(hub, columns)
    else:
        tables = load_parquet(path, {split: split for split in limits}, columns, left_out)
    tensors: list[Tensor] = []
    for split, limit in limits.items():
        where = path or hub
        table = keep_encoded(tables[split], "img", where)
        names = names or class_names(table, label)
        if limit is not None and limit < len(table):
            left_out[f"beyond dataset.{split}_limit"] += len(table) - limit
            table = table.select(np.sort(np.random.default_rng(0).permutation(len(table))[:limit]))
        labels = table[label][:]
        if {type(value) for value in labels} != {int}:
            raise UserError(f"{where}: the column {label} of {split} does not hold whole numbers")
        if not 0 <= min(labels) <= max(labels) < classes:
            raise UserError(f"{where}: {split} has labels outside 0 .. {classes - 1}")
        pictures = NamedPictures(table, "img", f"{split} in {where}", Path(path or "").expanduser())
        tensors += [decode(pictures, len(table)), torch.tensor(labels)]
    check_varied(tensors[0], path or hub)
    return ImageData(
        *tensors,
        classes=classes,
        crop=augment,
        flip=augment,
        names=tuple(names or map(str, range(classes))),
        left_out=left_out,
    )
