"""Files of data sets: which of a folder are taken, and which are left out and why."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from dlion.errors import UserError

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation")
_SET = re.compile(r"[-_ ]?(set|data|images)$")  # behind the name of a part
_HIDDEN = ("__MACOSX", "@eaDir")  # macOS' and Synology's, beside names that begin with a dot
# Of formats that Pillow knows: no pixels, or a program of its own would be started to draw them
_NO_PICTURES = ("BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF")

LeftOut = Counter[str]
"""The number of files or rows that a loader left out, by reason."""


def picture_suffixes() -> set[str]:
    """Return the suffixes of files that Pillow reads, in small letters."""
    from PIL import Image

    known = Image.registered_extensions()
    return {s for s, kind in known.items() if kind in Image.OPEN and kind not in _NO_PICTURES}


def files_below(
    folder: Path, suffixes: Collection[str], left_out: LeftOut | None = None
) -> list[Path]:
    """Return the files below a folder that have one of these suffixes, in any letter case, sorted.

    Hidden files and folders are left out. Links are followed, but not back to a folder that they
    lie in.
    """
    counts = LeftOut() if left_out is None else left_out
    return sorted(file for file in _walk(folder, (), counts) if _is_taken(file, suffixes, counts))


def folders_in(folder: Path, left_out: LeftOut | None = None) -> list[Path]:
    """Return the folders in a folder that are not hidden, and links to such, sorted."""
    counts = LeftOut() if left_out is None else left_out
    return sorted(p for p in folder.iterdir() if p.is_dir() and not _is_hidden(p, counts))


def classes_in(folder: Path, left_out: LeftOut) -> dict[str, list[Path]] | None:
    """Return the pictures below a folder by the name of their class, its folder; None: there are
    no pictures in folders.

    Names that differ in the Unicode form of their letters alone, as macOS and Linux write them, are
    those of one class.

    Raises:
        UserError: if a folder has none.
    """
    suffixes = picture_suffixes()
    found: dict[str, list[Path]] = {}
    for each in folders_in(folder, left_out):
        name = unicodedata.normalize("NFC", each.name)
        found.setdefault(name, []).extend(files_below(each, suffixes, left_out))
    classes = dict(sorted(found.items()))
    if not any(classes.values()):
        return None
    for name, files in classes.items():
        if not files:
            raise UserError(
                f"{folder / name} holds no pictures (.jpg, .png and others that Pillow reads): add"
                " some, or remove the folder"
            )
    beside = [p for p in folder.iterdir() if p.is_file()]
    left_out["beside the folders of classes"] += sum(_is_taken(p, suffixes) for p in beside)
    return classes


def find_parts(
    root: Path, test_names: Collection[str], left_out: LeftOut
) -> list[dict[str, list[Path]]] | None:
    """Return the pictures to train on and, if there are any, to test on, by class; None: neither.

    Args:
        root: a folder with a folder ``train`` (or ``training``) and one of ``test_names``, in any
            letter case, also with ``_set`` behind it, or with the classes themselves.
        test_names: the first that is there is taken.
        left_out: what is not taken is counted here.

    Raises:
        UserError: if a class has no pictures, or test pictures have no classes.
    """
    there, folders = folders_in(root), dict[str, Path]()
    for folder in there:
        folders.setdefault(_SET.sub("", folder.name.lower()), folder)
    train_folder = next((folders[name] for name in TRAIN_NAMES if name in folders), None)
    test_folder = next((folders[name] for name in test_names if name in folders), None)
    train = classes_in(train_folder, left_out) if train_folder else None
    if train is None:  # a class may be called train
        if folders.keys() <= {*TRAIN_NAMES, *test_names}:
            return None
        train, test_folder = classes_in(root, left_out), None
        _check_not_parts(root)
    else:
        for other in there:
            if other not in (train_folder, test_folder):
                found = files_below(other, picture_suffixes())
                left_out[f"in {other.name}/"] += len(found)
    test = classes_in(test_folder, left_out) if test_folder else None
    if test_folder and not test and files_below(test_folder, picture_suffixes()):
        raise UserError(
            f"{test_folder} holds pictures, but no folders of classes: sort them into such, or move"
            " it away to test on a tenth of the training pictures"
        )
    return [part for part in (train, test) if part] or None


def _check_not_parts(root: Path) -> None:
    """Refuse folders that all hold folders of the same names: these are the classes."""
    above = folders_in(root)
    inner = [{p.name for p in folders_in(folder)} for folder in above]
    shared = set.intersection(*inner) if len(inner) > 1 else set()
    if len(shared) > 1:
        raise UserError(
            f"{root} holds the folders {', '.join(p.name for p in above[:3])}, each with the"
            f" folders {', '.join(sorted(shared)[:3])}: if those are the classes, call the outer"
            " ones train and test"
        )


def describe(left_out: Mapping[str, int]) -> str:
    """Say how many files or rows were left out and why; nothing if there are none."""
    reasons = [f"{count:,} {reason}" for reason, count in sorted(left_out.items()) if count]
    return f"left out: {', '.join(reasons)}" if reasons else ""


def in_brackets(left_out: Mapping[str, int]) -> str:
    """Return :func:`describe` as a part of a sentence."""
    return f" ({text})" if (text := describe(left_out)) else ""


def check_classes(names: Collection[str], root: Path) -> None:
    """Refuse a data set with fewer than two classes.

    Raises:
        UserError: which says where the classes may be, if there is one folder only.
    """
    if len(names) > 1:
        return
    (only,) = names or ("none",)
    inside = folders_in(root / only) if (root / only).is_dir() else []
    hint = f", or type dataset.path={root / only}" if inside else ""
    raise UserError(
        f"dataset.path={root} has the class {only} only: give pictures of two classes or more{hint}"
    )


def _walk(folder: Path, above: tuple[str, ...], left_out: LeftOut) -> Iterator[Path]:
    """Yield the files below a folder; ``above``: the real paths of the folders it lies in."""
    real = os.path.realpath(folder)
    if any(Path(place).is_relative_to(real) for place in above):
        left_out["links back to a folder above"] += 1
        return
    for entry in folder.iterdir():
        if _is_hidden(entry, left_out):
            continue
        if entry.is_dir():
            yield from _walk(entry, (*above, real), left_out)
        else:
            yield entry


def _is_hidden(path: Path, left_out: LeftOut) -> bool:
    hidden = path.name.startswith(".") or path.name in _HIDDEN
    left_out["hidden"] += hidden
    return hidden


def _is_taken(file: Path, suffixes: Collection[str], left_out: LeftOut | None = None) -> bool:
    counts = LeftOut() if left_out is None else left_out
    if file.suffix.lower() not in suffixes:
        counts[f"of suffix {file.suffix.lower()}" if file.suffix else "without a suffix"] += 1
        return False
    if not file.is_file():
        counts["broken links" if file.is_symlink() else "neither files nor folders"] += 1
        return False
    return not _is_hidden(file, counts)
