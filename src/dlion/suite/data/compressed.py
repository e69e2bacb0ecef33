"""Compressed files, recognised by their first bytes, not their names."""

import bz2
import gzip
import lzma
import shutil
import zlib
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.files import naming_full_disk

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_BEGINNINGS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd"}


def compression(file: Path) -> str | None:
    """Return how a file is compressed: gzip, bz2, xz or zstd; None: it is not."""
    with file.open("rb") as opened:
        start = opened.read(6)
    return next((kind for begin, kind in _BEGINNINGS.items() if start.startswith(begin)), None)


def bare_name(file: Path) -> Path:
    """Return a path without the suffix of its compression."""
    return file.with_suffix("") if file.suffix.lower() in SUFFIXES else file


def unpack(file: Path, target: Path) -> None:
    """Write the contents of a compressed file.

    Raises:
        UserError: if it is damaged.
    """
    try:
        with (
            naming_full_disk(target),
            _reader(file) as source,
            target.open("wb") as written,
        ):
            shutil.copyfileobj(source, written, 1 << 20)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{file} is compressed and damaged ({error}): copy it again") from error


def _reader(file: Path) -> Any:
    kind = compression(file)
    if kind == "zstd":
        import pyarrow

        return pyarrow.input_stream(str(file), compression="zstd")
    return {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[str(kind)](file, "rb")
