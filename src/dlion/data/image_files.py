"""Images that stay in their files and are decoded by helper processes: ImageNet and its like."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from dlion.data.base import Batch, Images, split_off
from dlion.data.parquet import keep_encoded, load_parquet
from dlion.data.torchvision_ops import declare_missing_operators
from dlion.errors import UserError
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
        return DataLoader(
            dataset,
            batch_size=None,  # a request is a batch
            sampler=requests,
            num_workers=self.loaders,
            persistent_workers=self.loaders > 0,
            timeout=_PATIENCE if self.loaders else 0,
            pin_memory=device == "cuda",
        )


class _Training(Dataset):
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

    def __getitem__(self, request: tuple[list[int], int]) -> Batch:
        indices, seed = request
        with torch.random.fork_rng(devices=[]):  # the transforms draw from the global generator
            torch.default_generator.manual_seed(seed)
            samples = (self.data.train[i] for i in indices)
            x, y = _stack((self._change(image), label) for image, label in samples)
            return self._mix(x, y) if self._mix else (x, y)


class _Testing(Dataset):
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

    def __getitem__(self, start: int) -> Batch:
        stop = min(start + self.size, self.data.test_size)
        samples = (self.data.test[i] for i in range(start, stop))
        return _stack((self._change(image), label) for image, label in samples)


def _stack(samples: Iterable[tuple[Tensor, int]]) -> Batch:
    """Make a normalised batch of uint8 images and their labels."""
    images, labels = zip(*samples, strict=True)
    mean, deviation = (torch.tensor(c).view(3, 1, 1) for c in (_MEAN, _DEVIATION))
    x = torch.stack(images).to(torch.float32).div_(255).sub_(mean).div_(deviation)
    return x, torch.tensor(labels, dtype=torch.int64)


def _to(device: str, batch: Batch) -> Batch:
    x, y = (part.to(device, non_blocking=True) for part in batch)
    return x, y


def imagenet(
    path: Folder | None = None,
    image_size: Count = 224,
    auto_augment: bool = False,
    mixup: NotNegative = 0.0,
    loaders: Whole = 4,
) -> ImageFiles:
    """Load ImageNet-1K, or any other set of images in one of its two layouts.

    Args:
        path: a folder with ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG`` (torchvision's
            ImageFolder), or with ``train-*.parquet`` and ``validation-*.parquet``, or
            ``train/*.parquet`` and ``validation/*.parquet``, at any depth, of columns ``image`` and
            ``label`` (the hub's ``ILSVRC/imagenet-1k``).
        image_size: pixels, of square crops.
        auto_augment: AutoAugment besides random crops and flips.
        mixup: alpha of MixUp; 0: none.
        loaders: helper processes that decode, for each process; 0: none.

    Raises:
        UserError: if there is neither, or if the two parts differ in their classes.
    """
    if path is None:
        raise UserError(
            "ImageNet must be on a disk: type dataset.path=DIR with train/CLASS/*.JPEG and"
            " val/CLASS/*.JPEG, or with the hub's parquet files"
        )
    root = Path(path).expanduser()
    has_class_folders = any(entry.is_dir() for entry in root.glob("train/*"))
    load = _load_folders if has_class_folders else _load_parquet
    train, test, classes = load(root)
    return ImageFiles(train, test, classes, image_size, auto_augment, mixup, loaders)


def _load_folders(root: Path) -> tuple[Sequence, Sequence, int]:
    """Return training samples, test samples and the number of classes."""
    declare_missing_operators()
    from torchvision.datasets import ImageFolder

    try:
        train, test = ImageFolder(root / "train"), ImageFolder(root / "val")
    except FileNotFoundError as error:
        raise UserError(f"dataset.path={root}: {error}") from error
    if train.classes != test.classes:
        unmatched = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(
            f"dataset.path={root}: train and val differ in their class folders,"
            f" {', '.join(unmatched[:3])} for instance"
        )
    return train, test, len(train.classes)


class _Rows(Dataset):
    """Rows of a table of the hub, decoded when they are needed."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.table[int(index)]
        return Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"), row["label"]


def _load_parquet(root: Path) -> tuple[Sequence, Sequence, int]:
    """Return training samples, test samples and the number of classes."""
    splits = {"train": "train", "test": "validation"}
    tables = load_parquet(root, splits, {"image", "label"})
    train, test = (keep_encoded(tables[name], "image") for name in ("train", "test"))
    labels = train.features["label"]
    classes = getattr(labels, "num_classes", None) or max(train.unique("label")) + 1
    if max(test.unique("label")) >= classes:
        raise UserError(f"dataset.path={root}: validation has labels that train has not")
    return _Rows(train), _Rows(test), classes
