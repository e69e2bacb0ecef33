"""Images that stay in their files and are decoded by helper processes: ImageNet and its like."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from dlion.errors import TrainingFailed, UserError
from dlion.suite.data.base import Batch, Images, split_off
from dlion.suite.data.layouts import LAYOUTS, folder_with
from dlion.suite.data.parquet import content, keep_encoded, load_parquet
from dlion.suite.data.pictures import read_picture
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.machine import cores, die_with
from dlion.values import Count, Folder, NotNegative, Whole

_PATIENCE = 300  # seconds for a batch, after which a helper process counts as stuck
# ImageNet's, as torchvision's models use them
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class ImageFiles(Images):
    """Encoded images and labels, decoded when they are needed.

    Random changes of a sample depend on its batch's seed alone, not on the process that decodes it.

    Attributes:
        train, test: sequences of (PIL image, label).
        classes: number of labels.
        image_size: pixels, of square crops.
        auto_augment: torchvision's policy for ImageNet (Cubuk et al. 2019, arXiv 1805.09501).
        mixup: alpha of MixUp (Zhang et al. 2018, arXiv 1710.09412), which makes training labels
            shares ``[B, classes]``; 0: none.
        loaders: helper processes that decode, for each process; 0: none.
    """

    train: Sequence[tuple[Any, int]]
    test: Sequence[tuple[Any, int]]
    classes: int
    image_size: int = 224
    auto_augment: bool = False
    mixup: float = 0.0
    loaders: int = 0
    # their helper processes stay for the next evaluation
    _test_loaders: dict[tuple[tuple[int, ...], str], DataLoader] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    channels = 3
    test_batch_size = 128

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def labels(self) -> Tensor:
        return torch.tensor(_labels(self.train))

    @property
    def test_size(self) -> int:
        return len(self.test)

    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        return _to(device, _Training(self)[indices.tolist(), generator.initial_seed()])

    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        return _to(device, _Testing(self, stop - start)[start])

    def batches(
        self, requests: Iterable[tuple[Tensor, int]], device: str = "cpu"
    ) -> Iterator[Batch]:
        samplings = ((indices.tolist(), seed) for indices, seed in requests)
        return (_to(device, batch) for batch in self._loader(_Training(self), samplings, device))

    def test_batches(self, starts: Iterable[int], device: str = "cpu") -> Iterator[Batch]:
        key = tuple(starts), device
        if key not in self._test_loaders:
            dataset = _Testing(self, self.test_batch_size)
            self._test_loaders[key] = self._loader(dataset, key[0], device)
        return (_to(device, batch) for batch in self._test_loaders[key])

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> Self:
        train, test = split_off(self.train_size, fraction, seed)
        return replace(
            self, train=Subset(self.train, train.tolist()), test=Subset(self.train, test.tolist())
        )

    def _loader(self, dataset: Dataset, requests: Iterable[Any], device: str) -> DataLoader:
        """Return a loader of ``dataset[request]`` for each request."""
        loaders = min(self.loaders, cores())  # more would be slower, and torch would warn
        return DataLoader(
            dataset,
            batch_size=None,  # a request is a batch
            sampler=requests,
            num_workers=loaders,
            persistent_workers=loaders > 0,
            worker_init_fn=partial(_begin, os.getpid()),
            timeout=_PATIENCE if loaders else 0,
            pin_memory=device == "cuda",
        )


def _labels(samples: Any) -> list[int]:
    """Return the labels of samples, or of some of them, without decoding pictures."""
    if isinstance(samples, Subset):
        labels = _labels(samples.dataset)
        return [labels[i] for i in samples.indices]
    return samples.targets


def _begin(parent: int, _: int) -> None:
    """Let a helper process end with its parent, whose lock on the run's directory it shares."""
    die_with(parent)


class _Batches(Dataset):
    """Batches by requests, or the sentence about a picture that cannot be read.

    (An exception in a helper process would arrive with its traceback.)
    """

    def __getitem__(self, request: Any) -> Batch | str:
        try:
            return self.make(request)
        except UserError as error:
            return str(error)

    def make(self, request: Any) -> Batch:
        """Return the batch of a request."""
        raise NotImplementedError


class _Training(_Batches):
    """Training batches by their samples and seed: ``(indices, seed)`` is an index."""

    def __init__(self, data: ImageFiles):
        declare_missing_operators()
        from torchvision.transforms import v2

        self.data = data
        self._change = v2.Compose(
            [
                v2.RandomResizedCrop(data.image_size),
                v2.RandomHorizontalFlip(),
                v2.AutoAugment() if data.auto_augment else v2.Identity(),
                v2.PILToTensor(),
            ]
        )
        self._mix = v2.MixUp(alpha=data.mixup, num_classes=data.classes) if data.mixup else None

    def make(self, request: tuple[list[int], int]) -> Batch:
        indices, seed = request
        with torch.random.fork_rng(devices=[]):  # the transforms draw from the global generator
            torch.default_generator.manual_seed(seed)
            x, y = _stack(self.data.train, indices, self._change)
            return self._mix(x, y) if self._mix else (x, y)


class _Testing(_Batches):
    """Test batches by their first sample."""

    def __init__(self, data: ImageFiles, size: int):
        declare_missing_operators()
        from torchvision.transforms import v2

        self.data, self.size = data, size
        self._change = v2.Compose(
            [
                v2.Resize(round(data.image_size * 256 / 224)),
                v2.CenterCrop(data.image_size),
                v2.PILToTensor(),
            ]
        )

    def make(self, start: int) -> Batch:
        stop = min(start + self.size, self.data.test_size)
        return _stack(self.data.test, range(start, stop), self._change)


def _stack(samples: Sequence, indices: Iterable[int], change: Callable[[Any], Tensor]) -> Batch:
    """Make a normalised batch of changed images, uint8, and their labels."""
    chosen = (samples[i] for i in indices)
    images, labels = zip(*((change(image), label) for image, label in chosen), strict=True)
    mean, deviation = (torch.tensor(c).view(3, 1, 1) for c in (_MEAN, _DEVIATION))
    x = torch.stack(images).to(torch.float32).div_(255).sub_(mean).div_(deviation)
    return x, torch.tensor(labels, dtype=torch.int64)


def _to(device: str, batch: Batch | str) -> Batch:
    if isinstance(batch, str):
        raise TrainingFailed(batch)
    x, y = (part.to(device, non_blocking=True) for part in batch)
    return x, y


def imagenet(
    path: Folder,
    image_size: Count = 224,
    auto_augment: bool = False,
    mixup: NotNegative = 0.0,
    loaders: Whole = 4,
) -> ImageFiles:
    """Load ImageNet-1K, or any other set of images in one of its two layouts.

    Args:
        path: a folder with ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG`` (torchvision's
            ImageFolder; ``test`` will do where there is no ``val``), or with ``train-*.parquet``
            and ``validation-*.parquet``, or ``train/*.parquet`` and ``validation/*.parquet``, at
            any depth, of columns ``image`` and ``label`` (the hub's ``ILSVRC/imagenet-1k``).
        image_size: pixels, of square crops.
        auto_augment: AutoAugment besides random crops and flips.
        mixup: alpha of MixUp; 0: none.
        loaders: helper processes that decode, for each process; 0: none.

    Raises:
        UserError: if there is neither, or if the two parts differ in their classes.
    """
    root = Path(path).expanduser()
    if any(entry.is_dir() for entry in root.glob("train/*")):
        train, test, classes = _load_folders(root)
    elif any(root.rglob("*.parquet")):
        train, test, classes = _load_parquet(root)
    else:
        raise UserError(f"dataset.path={path} holds no pictures: give {folder_with('imagenet')}")
    return ImageFiles(train, test, classes, image_size, auto_augment, mixup, loaders)


def _load_folders(root: Path) -> tuple[Sequence, Sequence, int]:
    """Return training samples, test samples and the number of classes."""
    declare_missing_operators()
    from torchvision.datasets import ImageFolder

    test_names = ("val", "validation", "test")  # ImageNet's test has no classes
    test_name = next((name for name in test_names if (root / name).is_dir()), "val")
    try:
        train, test = (ImageFolder(root / part, loader=_read_file) for part in ("train", test_name))
    except FileNotFoundError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"dataset.path={root} must hold {LAYOUTS['imagenet']}: {reason}") from error
    if train.classes != test.classes:
        unmatched = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(
            f"dataset.path={root}: train and {test_name} differ in their class folders,"
            f" {', '.join(unmatched[:3])} for instance"
        )
    return train, test, len(train.classes)


def _read_file(path: str) -> Any:
    return read_picture(Path(path), path)


class _Rows(Dataset):
    """Rows of a table of the hub, decoded when they are needed; ``name`` is for messages."""

    def __init__(self, table: Any, name: str):
        self.table, self.name = table, name

    def __len__(self) -> int:
        return len(self.table)

    @property
    def targets(self) -> list[int]:
        return self.table["label"][:]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.table[int(index)]
        return read_picture(content(row["image"]), f"row {index} of {self.name}"), row["label"]


def _load_parquet(root: Path) -> tuple[Sequence, Sequence, int]:
    """Return training samples, test samples and the number of classes."""
    splits = {"train": "train", "test": "validation"}
    tables = load_parquet(root, splits, {"image", "label"})
    where = f"dataset.path={root}"
    train, test = (keep_encoded(tables[name], "image", where) for name in ("train", "test"))
    labels, test_labels = set(train.unique("label")), set(test.unique("label"))
    if {type(label) for label in labels | test_labels} != {int}:
        raise UserError(f"{where}: the column label does not hold whole numbers")
    named = getattr(train.features["label"], "num_classes", None)
    if not 0 <= min(labels) <= max(labels) < (named or len(train)):
        raise UserError(
            f"{where}: train has labels from {min(labels)} to {max(labels)}, which cannot be the"
            f" classes of {len(train):,} pictures: number them from 0 on"
        )
    classes = named or max(labels) + 1
    if not 0 <= min(test_labels) <= max(test_labels) < classes:
        raise UserError(f"{where}: validation has labels that train has not")
    return _Rows(train, f"train in {where}"), _Rows(test, f"validation in {where}"), classes
