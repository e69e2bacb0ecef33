"""CIFAR-10 through Hugging Face datasets: the hub's copy, or a folder in the same layout."""

import io
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch

from dlion.data.base import ImageData
from dlion.errors import UserError

HUB = "uoft-cs/cifar10"
COLUMNS = {"img", "label"}


def cifar10(
    path: str | None = None,
    augment: bool = True,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> ImageData:
    """CIFAR-10, 50,000 + 10,000 colour images of 32 x 32 in 10 classes.

    Args:
        path: a folder with ``train-*.parquet`` and ``test-*.parquet``, at any depth, of columns
            ``img`` (encoded images) and ``label``; None: the hub's ``uoft-cs/cifar10``.
        augment: random crop with 4 pixels of padding and horizontal flip.
        train_limit, test_limit: use only so many images, drawn once and for all; None: all.

    Raises:
        UserError: if there is no such folder, no such file, no such column, or no hub.
    """
    if path is None and not _hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # use the cache at once instead of trying for minutes
    from datasets import Image, disable_progress_bars, load_dataset

    disable_progress_bars()
    try:
        splits = (
            load_dataset(HUB) if path is None else load_dataset("parquet", data_files=_files(path))
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"the hub's {HUB} cannot be reached: type dataset.path=DIR with a folder of its"
            " parquet files"
        ) from error
    found = set(splits["train"].column_names)
    if not found >= COLUMNS:
        raise UserError(
            f"dataset.path={path} has the columns {', '.join(sorted(found))}: img and label are"
            " needed"
        )
    parts: list[torch.Tensor] = []
    for name, limit in (("train", train_limit), ("test", test_limit)):
        split = splits[name].cast_column("img", Image(decode=False))
        if limit is not None and limit < len(split):
            split = split.select(np.sort(np.random.default_rng(0).permutation(len(split))[:limit]))
        parts += [_decode(split["img"]), torch.tensor(split["label"][:], dtype=torch.int64)]
    return ImageData(*parts, classes=10, crop=augment, flip=augment)


def _hub_answers() -> bool:
    hub = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def _files(path: str) -> dict[str, list[str]]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"dataset.path={path} is not a folder: give that of the parquet files")
    files = {
        split: [str(p) for p in sorted(folder.rglob(f"{split}-*.parquet"))]
        for split in ("train", "test")
    }
    for split, found in files.items():
        if not found:
            raise UserError(
                f"dataset.path={path} holds no {split}-*.parquet: give a folder in the layout"
                f" of the hub's {HUB}"
            )
    return files


def _decode(images: Any) -> torch.Tensor:
    """Encoded images, ``{"bytes": ...}`` each, to uint8 ``[N, 3, 32, 32]``."""
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(i["bytes"])).convert("RGB")) for i in images]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
