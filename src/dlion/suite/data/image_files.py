"""Images that stay in their files and are decoded by helper processes: ImageNet and its like."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from dlion.errors import TrainingFailed, UserError
from dlion.suite.data.base import Batch, Images, numbers_of, split_off
from dlion.suite.data.folders import (
    LeftOut,
    check_classes,
    files_below,
    find_parts,
    in_brackets,
    picture_suffixes,
)
from dlion.suite.data.inputs import PictureInput
from dlion.suite.data.layouts import LAYOUTS, folder_with
from dlion.suite.data.parquet import class_names, content, keep_encoded, load_parquet
from dlion.suite.data.pictures import Levels, Source, check_varied, levels_of, read_picture
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.machine import cores, die_with
from dlion.values import Folder, NotNegative, Pixels, Whole

_TEST_NAMES = ("val", "valid", "validation", "test", "testing")  # ImageNet's test has no classes
_LOOKED_AT = 16  # training pictures, whether they differ
_MEASURED = 256  # training pictures, for their range of values
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
        names: of the classes, in the order of their numbers.
        left_out: number of files or rows that were not taken, by reason.
        recorded: of the model that the images are for; None: ImageNet's mean and deviation.
        numbers: of each class in a model that counts otherwise; empty: as here.
        levels: as in :class:`PictureInput`; the samples are read with them.
    """

    train: Sequence[tuple[Any, int]]
    test: Sequence[tuple[Any, int]]
    classes: int
    image_size: int = 224
    auto_augment: bool = False
    mixup: float = 0.0
    loaders: int = 0
    names: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    recorded: PictureInput | None = None
    numbers: Sequence[int] = ()
    levels: Sequence[float] | None = None
    # their helper processes stay for the next evaluation
    _test_loaders: dict[tuple[tuple[int, ...], str], DataLoader] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    test_batch_size = 128

    @property
    def channels(self) -> int:  # type: ignore[override]
        return self.input.channels

    @cached_property
    def input(self) -> PictureInput:
        source = self.recorded or PictureInput(
            3, self.image_size, _MEAN, _DEVIATION, scale=255.0, center_crop=True
        )
        names = tuple(self.names)
        return replace(source, image_size=self.image_size, names=names, levels=self.levels)

    def like(self, source: PictureInput) -> Self:
        return replace(self, recorded=source)

    def numbered_as(self, names: Sequence[str]) -> Self:
        numbers = numbers_of(self.names, names)
        return replace(self, numbers=numbers, names=names, classes=len(names))

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
        return self._take(self._loader(_Training(self), samplings, device), device)

    def test_batches(self, starts: Iterable[int], device: str = "cpu") -> Iterator[Batch]:
        key = tuple(starts), device
        if key not in self._test_loaders:
            dataset = _Testing(self, self.test_batch_size)
            self._test_loaders[key] = self._loader(dataset, key[0], device)
        return self._take(self._test_loaders[key], device)

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
            timeout=self.patience if loaders else 0,
            pin_memory=device == "cuda",
            collate_fn=_as_it_is,
        )

    def _take(self, loader: DataLoader, device: str) -> Iterator[Batch]:
        """Yield the batches of a loader, on a device.

        Raises:
            TrainingFailed: about a picture that cannot be read, or helper processes that died, or
                gave none for ``patience`` seconds.
        """
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader"):
                    raise
                raise TrainingFailed(
                    f"the {loader.num_workers} helper processes of dataset.loaders give no batch"
                    f" ({error}): type fewer, or dataset.loaders=0, or a longer timeout="
                ) from error
            yield _to(device, batch)


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

    def __getitem__(self, request: Any) -> Any:
        try:
            batch = self.make(request)
        except UserError as error:
            return str(error)
        if get_worker_info() is None:
            return batch
        try:
            return [part.share_memory_() for part in batch]
        except RuntimeError:  # /dev/shm is full: Docker's has 64 MB
            return [part.numpy() for part in batch]  # which go through a pipe

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
            x, y = _stack(self.data, self.data.train, indices, self._change)
            return self._mix(x, y) if self._mix else (x, y)


class _Testing(_Batches):
    """Test batches by their first sample."""

    def __init__(self, data: ImageFiles, size: int):
        declare_missing_operators()
        from torchvision.transforms import v2

        self.data, self.size = data, size
        self.cut = v2.Compose(
            [
                v2.Resize(round(data.image_size * 256 / 224)),
                v2.CenterCrop(data.image_size),
                v2.PILToTensor(),
            ]
        )

    def make(self, start: int) -> Batch:
        stop = min(start + self.size, self.data.test_size)
        return _stack(self.data, self.data.test, range(start, stop), self.cut)


def _stack(
    data: ImageFiles, samples: Sequence, indices: Iterable[int], change: Callable[[Any], Tensor]
) -> Batch:
    """Make a normalised batch of changed images, uint8, and their labels."""
    chosen = (samples[i] for i in indices)
    images, labels = zip(*((change(image), label) for image, label in chosen), strict=True)
    x = data.input.normalise(data.input.in_its_colours(torch.stack(images)))
    numbers = [data.numbers[label] for label in labels] if data.numbers else labels
    return x, torch.tensor(numbers, dtype=torch.int64)


def _as_it_is(batch: Any) -> Any:
    """Let arrays be arrays, in place of torch's collation."""
    return batch


def _to(device: str, batch: Any) -> Batch:
    if isinstance(batch, str):
        raise TrainingFailed(batch)
    x, y = (torch.as_tensor(part).to(device, non_blocking=True) for part in batch)
    return x, y


def imagenet(
    path: Folder,
    image_size: Pixels = 224,
    auto_augment: bool = False,
    mixup: NotNegative = 0.0,
    levels: Levels | None = None,
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
        levels: the values [BLACK, WHITE] of grey of more than 8 bits; None: the darkest and
            brightest of 256 training pictures, or all of 16 bits where they fill half of these.
        loaders: helper processes that decode, for each process; 0: none.

    Raises:
        UserError: if there is neither, or if the two parts differ in their classes.
    """
    root, left_out = Path(path).expanduser(), LeftOut()
    parts = find_parts(root, _TEST_NAMES, left_out) if root.is_dir() else None
    if parts:
        train, test, names = _of_folders(parts, root)
    elif root.is_dir() and files_below(root, {".parquet"}):
        train, test, names = _load_parquet(root, left_out)
    else:
        found = LeftOut()
        if root.is_dir():
            files_below(root, picture_suffixes(), found)
        raise UserError(
            f"dataset.path={path} holds no pictures in folders of classes{in_brackets(found)}: give"
            f" {folder_with('imagenet')}"
        )
    check_classes(names, root)
    some = range(0, len(train), -(-len(train) // _MEASURED))
    levels = levels or levels_of(map(train.source, some))
    train.levels = test.levels = levels
    data = ImageFiles(
        train, test, len(names), image_size, auto_augment, mixup, loaders, names, left_out
    )
    data = replace(data, levels=levels)
    _check_varied(data, f"dataset.path={path}")
    return data


def _check_varied(data: ImageFiles, where: str) -> None:
    """Look at a few training pictures, and at all of them if these are equal."""
    cut = _Testing(data, 1).cut
    step = max(1, data.train_size // _LOOKED_AT)
    order = [*range(0, data.train_size, step), *range(data.train_size)]
    first = cut(data.train[0][0])
    if not any(not torch.equal(cut(data.train[i][0]), first) for i in order):
        check_varied(first.expand(data.train_size, -1, -1, -1), where)


class _Samples(Dataset):
    """Pictures and labels, decoded when they are needed.

    Attributes:
        targets: the labels.
        levels: as in :class:`PictureInput`.
    """

    targets: list[int]
    levels: Sequence[float] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        name, source = self.source(index)
        return read_picture(source, name, levels=self.levels), self.targets[index]

    def source(self, index: int) -> tuple[str, Source]:
        """Return a picture's name for messages, and where it is."""
        raise NotImplementedError


class _Files(_Samples):
    """Pictures of the folders of classes."""

    def __init__(self, classes: Mapping[str, list[Path]], numbers: Mapping[str, int]):
        self.files = [file for found in classes.values() for file in found]
        self.targets = [numbers[name] for name, found in classes.items() for _ in found]

    def source(self, index: int) -> tuple[str, Source]:
        return str(self.files[index]), self.files[index]


def _of_folders(
    parts: list[dict[str, list[Path]]], root: Path
) -> tuple[_Samples, _Samples, tuple[str, ...]]:
    """Return training samples, test samples and the names of the classes."""
    if len(parts) < 2:
        raise UserError(
            f"dataset.path={root} must hold {LAYOUTS['imagenet']}: there is no part to test on"
        )
    train, test = parts
    if train.keys() != test.keys():
        unmatched = sorted(train.keys() ^ test.keys())
        raise UserError(
            f"dataset.path={root}: the two parts differ in their class folders,"
            f" {', '.join(unmatched[:3])} for instance"
        )
    numbers = {name: i for i, name in enumerate(train)}
    return _Files(train, numbers), _Files(test, numbers), tuple(train)


class _Rows(_Samples):
    """Rows of a table of the hub; ``name`` is for messages."""

    def __init__(self, table: Any, name: str, folder: Path):
        self.table, self.name, self.folder = table, name, folder
        self.targets = table["label"][:]

    def source(self, index: int) -> tuple[str, Source]:
        return f"row {index} of {self.name}", content(self.table[int(index)]["image"], self.folder)


def _load_parquet(root: Path, left_out: LeftOut) -> tuple[_Samples, _Samples, tuple[str, ...]]:
    """Return training samples, test samples and the names of the classes."""
    splits = {"train": "train", "test": "validation"}
    tables = load_parquet(root, splits, {"image", "label"}, left_out)
    where = f"dataset.path={root}"
    train, test = (keep_encoded(tables[name], "image", where) for name in ("train", "test"))
    labels, test_labels = set(train.unique("label")), set(test.unique("label"))
    if {type(label) for label in labels | test_labels} != {int}:
        raise UserError(f"{where}: the column label does not hold whole numbers")
    named = getattr(train.features["label"], "num_classes", None)
    if not 0 <= min(labels) <= max(labels) < (named or len(train)):
        raise UserError(
            f"{where}: train has labels from {min(labels)} to {max(labels)}, which do not fit the"
            f" classes of {len(train):,} pictures: number them from 0 on"
        )
    names = class_names(train, "label") or [str(i) for i in range(max(labels) + 1)]
    classes = len(names)
    if not 0 <= min(test_labels) <= max(test_labels) < classes:
        raise UserError(f"{where}: validation has labels that train has not")
    parts = (_Rows(train, f"train in {where}", root), _Rows(test, f"validation in {where}", root))
    return *parts, tuple(names)
