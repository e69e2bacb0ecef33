"""Files that are either complete or absent."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which gets its own name once it is whole and on the disk.

    Whatever happens, the file of that name is then the new one or the one before.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or, whatever happens, not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
