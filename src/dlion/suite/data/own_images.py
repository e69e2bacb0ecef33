"""User-supplied pictures in the usual layouts: folders of classes, parquet, IDX files."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.suite.data.folders import (
    TEST_NAMES,
    LeftOut,
    check_classes,
    files_below,
    find_parts,
    in_brackets,
    picture_suffixes,
)
from dlion.suite.data.idx import find_idx, read_idx
from dlion.suite.data.image_data import ImageData
from dlion.suite.data.layouts import folder_with
from dlion.suite.data.parquet import (
    NamedPictures,
    class_names,
    find_splits,
    keep_encoded,
    load_files,
    saved_tables,
)
from dlion.suite.data.pictures import Levels, Source, check_varied, decode, levels_of
from dlion.values import Folder, Name, Pixels, did_you_mean

_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_FEWEST = 10  # pictures that a tenth can be taken of
_LOOKED_AT = 10_000  # training pictures, for their range of values


class Split(NamedTuple):
    """Training or test pictures before they are decoded.

    Attributes:
        pictures: a name for messages and the source of each.
        labels: numbers or names.
        names: the classes, of labels that are their numbers already.
    """

    pictures: Iterable[tuple[str, Source]]
    labels: Sequence[int] | Sequence[str]
    names: Sequence[str] = ()


def images(
    path: Folder,
    image_size: Pixels | None = None,
    augment: bool = True,
    flip: bool = False,
    levels: Levels | None = None,
    image_column: Name | None = None,
    label_column: Name | None = None,
) -> ImageData:
    """Load square pictures into memory, grey or in colour.

    Args:
        path: a folder with ``train/CLASS/*`` and ``test/CLASS/*`` (or ``val``), with ``CLASS/*``
            alone, with parquet files (``train-*`` and ``test-*``, or others), of ``save_to_disk``,
            or with MNIST's IDX files; or one parquet file. Where no part is for the test, a random
            tenth is taken.
        image_size: pixels to which pictures are cut and scaled; None: they are of one size already.
        augment: shift training pictures by up to an eighth of their size.
        flip: mirror every other training picture.
        levels: the values [BLACK, WHITE] of grey of more than 8 bits; None: the darkest and
            brightest of the training pictures, or all of 16 bits where they fill half of these.
        image_column, label_column: of parquet files; None: found by type and name.

    Raises:
        UserError: if the folder holds none of these, or a picture or a label is not one.
    """
    root, left_out = Path(path).expanduser(), LeftOut()
    one_table = root.suffix == ".parquet" and root.is_file()
    if not (root.is_dir() or one_table):
        raise UserError(f"dataset.path={path} is not a folder: give {folder_with('images')}")
    parts = None if one_table else _find_idx(root) or _find_folders(root, left_out)
    if parts is None or len(set(parts[0].labels)) < 2:  # its pictures may lie in a folder beside
        beside = LeftOut()
        if tables := _find_tables(root, image_column, label_column, beside):
            parts, left_out = tables, beside
    of_table = parts is not None and isinstance(parts[0].pictures, NamedPictures)
    columns = {"image_column": image_column, "label_column": label_column}
    for setting, column in () if of_table or parts is None else columns.items():
        if column is not None:
            raise UserError(
                f"dataset.{setting}={column} is of parquet files, which dataset.path={path} does"
                " not hold: leave it out"
            )
    if parts is None:
        lacking, left_out = "pictures", LeftOut()
        if files_below(root, picture_suffixes(), left_out):
            lacking, left_out = "folders of classes", LeftOut()
        raise UserError(
            f"dataset.path={path} holds no {lacking}{in_brackets(left_out)}: give"
            f" {folder_with('images')}"
        )
    present = sorted(set(parts[0].labels))
    check_classes([str(name) for name in present], root)
    names = parts[0].names  # the numbers of a ClassLabel stay
    numbers = {label: i for i, label in enumerate(range(len(names)) if names else present)}
    levels = levels or levels_of(_some(parts[0].pictures, len(parts[0].labels), _LOOKED_AT))
    tensors = [_load(part, numbers, image_size, path, levels) for part in parts]
    check_varied(tensors[0][0], f"dataset.path={path}")
    known = tuple(names or map(str, present))
    options = {"crop": augment, "flip": flip, "names": known, "left_out": left_out}
    options["levels"] = levels
    if len(tensors) == 2:
        (train_x, train_y), (test_x, test_y) = _alike(*tensors)
        return ImageData(train_x, train_y, test_x, test_y, len(known), **options)
    ((x, y),) = tensors
    if len(x) < _FEWEST:
        raise UserError(
            f"dataset.path={path} holds {len(x)} pictures, of which no tenth can be held out: give"
            f" {_FEWEST} or more, or a part for the test"
        )
    return ImageData(x, y, x[:0], y[:0], len(known), **options).hold_out()


def _some(
    pictures: Iterable[tuple[str, Source]], count: int, most: int
) -> Iterable[tuple[str, Source]]:
    """Return every n-th picture, at most so many."""
    return itertools.islice(pictures, 0, None, -(-count // most))


def _load(
    part: Split,
    numbers: dict[Any, int],
    image_size: int | None,
    path: str,
    levels: Sequence[float] | None,
) -> tuple[Tensor, Tensor]:
    """Return the pixels and labels of a part."""
    unknown = set(part.labels) - numbers.keys()
    if unknown:
        name = min(unknown)
        if part.names:
            raise UserError(
                f"dataset.path={path} has the label {name}, which is no number of its"
                f" {len(part.names)} classes: leave these rows out"
            )
        guess = did_you_mean(name, numbers) if isinstance(name, str) else ""
        raise UserError(
            f"dataset.path={path}: the test has the class {name}, which the training pictures do"
            f" not have{guess}"
        )
    x = decode(part.pictures, len(part.labels), image_size, keep_grey=True, levels=levels)
    return x, torch.tensor([numbers[label] for label in part.labels])


def _alike(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return both parts with the same number of channels."""
    (train_x, train_y), (test_x, test_y) = train, test
    if train_x.shape[-1] != test_x.shape[-1]:
        side = train_x.shape[-1]
        raise UserError(
            f"pictures for training have {side} pixels a side, those for the test"
            f" {test_x.shape[-1]}: type dataset.image_size={side} to scale them"
        )
    channels = max(train_x.shape[1], test_x.shape[1])
    train_x, test_x = (x.expand(-1, channels, -1, -1) for x in (train_x, test_x))
    return (train_x.contiguous(), train_y), (test_x.contiguous(), test_y)


def _find_idx(root: Path) -> list[Split] | None:
    """Return the parts that lie in MNIST's IDX files, if there are any."""
    parts: list[Split] = []
    for names in (("train",), ("t10k", "test")):
        for name in names:
            pictures, labels = (find_idx(root, name, kind) for kind in ("idx3", "idx1"))
            if pictures and labels:
                if names != ("train",) and not parts:
                    raise UserError(f"{pictures} has no files to train on beside it: add them")
                parts.append(_read_split(pictures, labels))
                break
            if pictures or labels:
                raise UserError(
                    f"{pictures or labels} lacks the"
                    f" {'labels' if pictures else 'images'} that belong to it"
                )
    return parts or None


def _read_split(pictures: Path, labels: Path) -> Split:
    pixels, numbers = read_idx(pictures), read_idx(labels)
    if pixels.ndim != 3 or numbers.ndim != 1 or len(pixels) != len(numbers):
        raise UserError(
            f"{pictures} and {labels} do not belong together: their shapes are"
            f" {pixels.shape} and {numbers.shape}"
        )
    if not pixels.size:
        raise UserError(f"{pictures} holds no pictures: copy it again")
    return Split([(f"{pictures}, number {i}", p) for i, p in enumerate(pixels)], numbers.tolist())


def _find_folders(root: Path, left_out: LeftOut) -> list[Split] | None:
    """Return the parts that lie in folders of classes, if there are any."""
    parts = find_parts(root, TEST_NAMES, left_out)
    return parts and [
        Split(
            [(str(file), file) for found in classes.values() for file in found],
            [name for name, found in classes.items() for _ in found],
        )
        for classes in parts
    ]


def _find_tables(
    root: Path, image_column: str | None, label_column: str | None, left_out: LeftOut
) -> list[Split] | None:
    """Return the parts that lie in parquet files, if there are any."""
    if saved := saved_tables(root):
        tables = _parts_of(saved, left_out)
    else:
        files = {"train": [root]}
        if root.is_dir():
            splits = {"train": ("train",), "test": TEST_NAMES}
            files = find_splits(root, splits, left_out, any_name=True)
        if not files:
            return None
        tables = load_files(files, root)
    root = root if root.is_dir() else root.parent
    where = f"dataset.path={root}"
    features = tables["train"].features
    image = _column("image_column", image_column, features, _may_be_pictures, (), where)
    label = _column("label_column", label_column, features, _may_be_labels, _LABEL_NAMES, where)
    return [_read_table(table, split, image, label, root) for split, table in tables.items()]


def _parts_of(saved: dict[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """Return the tables to train and, if there is one, to test on; rows of others are counted."""
    train = "train" if "train" in saved else next(iter(saved))
    parts = {"train": train, "test": next((n for n in TEST_NAMES if n in saved), train)}
    for name in saved.keys() - parts.values():
        left_out[f"rows of {name}"] += len(saved[name])
    return {part: saved[name] for part, name in parts.items() if part == "train" or name != train}


def _column(
    setting: str,
    typed: str | None,
    features: Any,
    fits: Callable[[Any], bool],
    names: Sequence[str],
    where: str,
) -> str:
    """Return the column that was typed, or the only one that fits, by name if several do.

    One of a usual name may hold floats, which pandas makes of whole numbers.
    """
    floats = {name for name in names if "float" in str(getattr(features.get(name), "dtype", ""))}
    fitting = [name for name, kind in features.items() if fits(kind) or name in floats]
    found = [typed] if typed else fitting
    found = [name for name in found if name in names] or found
    if len(found) == 1 and found[0] in features:
        return found[0]
    raise UserError(
        f"{where} has the columns {', '.join(features)}: type dataset.{setting}=NAME with that of"
        f" the {setting.removesuffix('_column')}s"
    )


def _may_be_pictures(kind: Any) -> bool:
    """Tell whether a column's type can hold encoded pictures."""
    struct = isinstance(kind, dict) and "bytes" in kind
    return (
        struct
        or type(kind).__name__ == "Image"
        or getattr(kind, "dtype", "") in ("binary", "large_binary")
    )


def _may_be_labels(kind: Any) -> bool:
    """Tell whether a column's type can hold numbers or names of classes."""
    return str(getattr(kind, "dtype", "")).startswith(
        ("int", "uint", "bool", "string", "large_string")
    )


def _read_table(table: Any, split: str, image: str, label: str, root: Path) -> Split:
    where = f"dataset.path={root}"
    labels = [_label(value) for value in table[label][:]]
    if None in labels:
        raise UserError(
            f"{where}: row {labels.index(None)} of {split} has no label in the column {label}:"
            " leave it out"
        )
    if {type(value) for value in labels} not in ({int}, {str}):
        raise UserError(
            f"{where}: the column {label} of {split} does not hold whole numbers or names alone:"
            " type dataset.label_column=NAME with that of the labels"
        )
    names = class_names(table, label)
    table = keep_encoded(table, image, where)
    return Split(NamedPictures(table, image, f"{split} in {where}", root), labels, names)


def _label(value: Any) -> Any:
    """Return a label as a name or a whole number, where it is one."""
    if isinstance(value, bool):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
