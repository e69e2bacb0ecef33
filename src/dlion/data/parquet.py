"""Tables in the parquet layout of the Hugging Face hub: from a folder, or from the hub itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlion.data.hub import use_the_cache_if_offline
from dlion.errors import UserError


def load_parquet(path: str | Path, splits: Mapping[str, str], columns: set[str]) -> dict[str, Any]:
    """Tables of the files ``SPLIT-*.parquet`` or ``SPLIT/*.parquet`` below a folder, at any depth.

    The first is the hub's layout, the second that of its own parquet copies (the branch
    ``refs/convert/parquet``).

    Args:
        splits: name of a table -> split of the hub.
        columns: what each table must have.

    Raises:
        UserError: if there is no such folder, file or column, or if a split lies in several
            folders, as it does where a data set has several configurations.
    """
    from datasets import disable_progress_bars, load_dataset

    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"dataset.path={path} is not a folder: give that of the parquet files")
    files: dict[str, list[str]] = {}
    for name, split in splits.items():
        found = sorted({*folder.rglob(f"{split}-*.parquet"), *folder.rglob(f"{split}/*.parquet")})
        homes = sorted({str(file.parent.relative_to(folder)) for file in found})
        if not found:
            raise UserError(
                f"dataset.path={path} holds no {split}-*.parquet and no {split}/*.parquet: give a"
                " folder in the layout of the hub"
            )
        if len(homes) > 1:
            raise UserError(
                f"dataset.path={path} holds parquet files of {split} in {' and in '.join(homes)}:"
                " leave one of these folders there"
            )
        files[name] = [str(file) for file in found]
    disable_progress_bars()
    try:
        tables = load_dataset("parquet", data_files=files)
    except Exception as error:  # pyarrow and datasets have many, all about the files
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"dataset.path={path} holds parquet files that cannot be read ({reason}): copy them"
            " again"
        ) from error
    check_columns(tables, columns, f"dataset.path={path}")
    return tables


def open_hub(name: str, config: str | None = None, **options: Any) -> Any:
    """``datasets.load_dataset``; of data sets that are scripts, the hub's own parquet copy."""
    from datasets import load_dataset

    use_the_cache_if_offline()
    try:
        return load_dataset(name, config, **options)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        return load_dataset(name, revision="refs/convert/parquet", **options)


def load_hub(name: str, columns: set[str], config: str | None = None) -> dict[str, Any]:
    """The tables of a data set on the hub, or of its copy in the cache.

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
            f"the hub's {name} cannot be had ({reason}): type dataset.path=DIR with a folder of its"
            " parquet files"
        ) from error
    check_columns(tables, columns, f"the hub's {name}")
    return tables


def check_columns(tables: Mapping[str, Any], columns: set[str], where: str) -> None:
    """Refuse tables that lack a column."""
    for table in tables.values():
        found = set(table.column_names)
        if not found >= columns:
            raise UserError(
                f"{where} has the columns {', '.join(sorted(found))}:"
                f" {' and '.join(sorted(columns))} are needed"
            )
