"""Tables in the parquet layout of the Hugging Face hub: from a folder, or from the hub itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.hub import use_the_cache_if_offline


def load_parquet(path: str | Path, splits: Mapping[str, str], columns: set[str]) -> dict[str, Any]:
    """Tables of the files ``PREFIX-*.parquet`` below a folder, at any depth.

    Args:
        splits: name of a table -> prefix of its files.
        columns: what each table must have.

    Raises:
        UserError: if there is no such folder, file or column.
    """
    from datasets import disable_progress_bars, load_dataset

    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"dataset.path={path} is not a folder: give that of the parquet files")
    files = {
        split: [str(p) for p in sorted(folder.rglob(f"{prefix}-*.parquet"))]
        for split, prefix in splits.items()
    }
    for split, found in files.items():
        if not found:
            raise UserError(
                f"dataset.path={path} holds no {splits[split]}-*.parquet: give a folder in the"
                " layout of the hub"
            )
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
