"""Tables in the parquet layout of the Hugging Face hub: from a folder, or from the hub itself.

``datasets`` is imported inside the functions, as it takes seconds that most runs can do without.
"""

import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.data.folders import LeftOut, files_below
from dlion.suite.data.hub import check_cache, use_the_cache_if_offline
from dlion.suite.terminal import in_one_line


def load_parquet(
    path: str | Path,
    splits: Mapping[str, str],
    columns: set[str],
    left_out: LeftOut | None = None,
) -> dict[str, Any]:
    """Load the files ``SPLIT-*.parquet`` or ``SPLIT/*.parquet`` below a folder, at any depth.

    The first is the hub's layout, the second that of its own parquet copies (the branch
    ``refs/convert/parquet``). ``SPLIT_*.parquet`` and ``SPLIT.parquet`` will do, too.

    Args:
        path: the folder.
        splits: the split of the hub for each name that a table shall have.
        columns: those that each table must have.
        left_out: counts the files that are not taken.

    Returns:
        The tables, by the names in ``splits``.

    Raises:
        UserError: if the folder, a file or a column is missing, or if a split lies in several
            folders, as it does where a data set has several configurations.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"dataset.path={path} is not a folder: give that of the parquet files")
    left_out = LeftOut() if left_out is None else left_out
    files = find_splits(folder, {name: (split,) for name, split in splits.items()}, left_out)
    for name, split in splits.items():
        if name not in files:
            raise UserError(
                f"dataset.path={path} holds no {split}-*.parquet and no {split}/*.parquet: give a"
                " folder in the layout of the hub"
            )
    tables = load_files(files, path)
    check_columns(tables, columns, f"dataset.path={path}")
    return tables


def find_splits(
    folder: Path,
    splits: Mapping[str, Sequence[str]],
    left_out: LeftOut,
    any_name: bool = False,
) -> dict[str, list[Path]]:
    """Return the parquet files of each split below a folder.

    Those whose names are a split's and numbers (``train-00000-of-00001``), or that lie in a folder
    of its name, go before others that begin with its name (``train_noisy``).

    Args:
        folder: where they are.
        splits: names that the files of each split may have, in the order of preference.
        left_out: counts the files of no split.
        any_name: where no file is of the first split, it has all that are of no other.

    Raises:
        UserError: if a split lies in several folders, as it does where a data set has several
            configurations.
    """
    there, taken = files_below(folder, {".parquet"}, left_out), {}
    for part, names in splits.items():
        found = (_of_split(there, name) for name in names)
        if files := next(filter(None, found), None):
            taken[part] = files
    first = next(iter(splits))
    used = {file for files in taken.values() for file in files}
    if first not in taken and any_name:
        rest = [file for file in there if file not in used]
        taken = {first: rest, **taken} if rest else {}
        used |= set(rest)
    for part, files in taken.items():
        parents = sorted({str(file.parent.relative_to(folder)) for file in files})
        if len(parents) > 1:
            raise UserError(
                f"dataset.path={folder} holds parquet files of {part} in"
                f" {' and in '.join(parents)}: leave one of these folders there, or give it"
            )
    left_out["parquet files of other splits"] += len(there) - len(used)
    return taken


def _of_split(files: list[Path], name: str) -> list[Path]:
    """Return the files of a split by their names."""
    numbered = re.compile(rf"{name}([-_.]?\d+)?([-_]of[-_]\d+)?", re.IGNORECASE)
    exact = [file for file in files if numbered.fullmatch(file.stem)]
    exact += [f for f in files if f not in exact and f.parent.name.lower() == name]
    return sorted(exact) or [f for f in files if re.match(rf"{name}[-_]", f.stem, re.IGNORECASE)]


def class_names(table: Any, column: str) -> list[str]:
    """Return the names of the classes whose numbers a column holds; none if it names none."""
    return list(getattr(table.features[column], "names", None) or ())


def load_files(files: Mapping[str, list[Path]], path: str | Path) -> dict[str, Any]:
    """Load the parquet files of each table.

    Raises:
        UserError: naming the folder ``path`` if one cannot be read.
    """
    from datasets import load_dataset

    be_quiet()
    names = {table: [escape(str(file)) for file in parts] for table, parts in files.items()}
    try:
        _check_numbering(itertools.chain(*files.values()))
        return load_dataset("parquet", data_files=names)
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets have many, all about the files
        check_cache(error)
        first, *_, last = 2 * str(error.__cause__ or error).strip().splitlines()
        reason = first if first == last else f"{first} ... {last}"
        raise UserError(
            f"dataset.path={path} holds parquet files that do not fit together ({reason}): copy"
            " them again, or leave those of one kind there"
        ) from error


def _check_numbering(files: Iterable[Path]) -> None:
    """Refuse files that give the names of classes other numbers: one numbering would be lost."""
    from datasets import Features
    from pyarrow.parquet import read_schema

    known: dict[str, tuple[list[str], Path]] = {}
    for file in files:
        for column, kind in Features.from_arrow_schema(read_schema(file)).items():
            names = getattr(kind, "names", None)
            first, there = known.setdefault(column, (names, file)) if names else (names, file)
            if names != first:
                raise UserError(
                    f"{file} numbers the classes in {column} as {', '.join(names[:3])} ..., but"
                    f" {there} as {', '.join(first[:3])} ...: write both with the same ClassLabel"
                )


def saved_tables(folder: Path) -> dict[str, Any] | None:
    """Return the tables by split that ``save_to_disk`` wrote into a folder; None: it is none.

    A table without splits is ``train``.

    Raises:
        UserError: if they are damaged.
    """
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    from datasets import load_from_disk

    be_quiet()
    try:
        loaded = load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets have many, all about the files
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{folder} is of save_to_disk, but could not be read ({reason}): write it again"
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def be_quiet() -> None:
    """Let ``datasets`` show no progress, and log nothing that its errors repeat."""
    from datasets import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)


def open_hub(name: str, config: str | None = None, **options: Any) -> Any:
    """Call ``datasets.load_dataset``; read the hub's own parquet copy of data sets with scripts."""
    from datasets import load_dataset

    use_the_cache_if_offline()
    try:
        return load_dataset(name, config, **options)
    except RuntimeError as error:  # datasets has no class of its own for this one
        if "scripts are no longer supported" not in str(error):
            raise
        return load_dataset(name, revision="refs/convert/parquet", **options)


def load_hub(name: str, columns: set[str], config: str | None = None) -> dict[str, Any]:
    """Load the tables of a data set on the hub, or of its copy in the cache.

    Returns:
        The tables by split.

    Raises:
        UserError: if it is in neither, or lacks a column.
    """
    from datasets import disable_progress_bars

    disable_progress_bars()
    try:
        tables = open_hub(name, config)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if isinstance(error, ConnectionError):
            reason = "no connection, and no copy in the cache"
        raise UserError(
            f"the hub's {name} could not be loaded ({reason}): type dataset.path=DIR with a folder"
            " of its parquet files"
        ) from error
    check_columns(tables, columns, f"the hub's {name}")
    return tables


def check_columns(tables: Mapping[str, Any], columns: set[str], where: str) -> None:
    """Refuse tables that lack a column; ``where`` names them in the message."""
    for table in tables.values():
        present = set(table.column_names)
        if not present >= columns:
            raise UserError(
                f"{where} has the columns {', '.join(sorted(present))}:"
                f" {' and '.join(sorted(columns))} are needed"
            )


def keep_encoded(table: Any, column: str, where: str) -> Any:
    """Return a table that gives its pictures as they are stored, for :func:`content`.

    Raises:
        UserError: naming the table's place if the column holds something else.
    """
    from datasets import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lists of pixels in 64 bits
            return table.cast_column(column, Image(decode=False))
    except Exception as error:  # pyarrow and datasets have many
        raise UserError(
            f"{where}: the column {column} holds {table.features[column]}, not pictures: store"
            ' {"bytes": ...} of each file there'
        ) from error


def content(cell: Any, folder: Path) -> bytes | Path:
    """Return the file of a picture as it is stored, empty where there is none.

    ``folder``: that of the data set, where a path in a cell begins and which it may not leave.

    Raises:
        UserError: if it does, or names no regular file.
    """
    stored, path = (cell["bytes"], cell["path"]) if cell else (None, None)
    if stored is not None or not path:
        return stored or b""
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise UserError(
            f"dataset.path={folder} names the picture {in_one_line(path)}, which is not below that"
            " folder: copy it there"
        )
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is no picture, but a folder, a pipe or a device: leave it out")
    return file


@dataclass(frozen=True)
class NamedPictures:
    """Pictures of :func:`keep_encoded`'s table, each with a name for messages.

    Attributes:
        table, column: where they are.
        part: how a message calls the table.
        folder: in which paths in the table begin.
    """

    table: Any
    column: str
    part: str
    folder: Path = Path()

    def __iter__(self) -> Iterator[tuple[str, bytes | Path]]:
        for row, cell in enumerate(self.table[self.column]):
            yield f"row {row} of {self.part}", content(cell, self.folder)
