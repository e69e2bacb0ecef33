"""Files that are either complete or absent."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which gets its own name once it is whole and on the disk.

    Whatever happens, the file of that name is then the new one or the one before.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch()
    mode = part.stat().st_mode  # as the umask wants it, which not all libraries heed
    try:
        yield part
        part.chmod(mode)
        sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give the path of a folder to fill, which gets its own name once it is whole and on the disk.

    Its files lie in it directly. A folder that had the name is replaced.
    """
    part, old = (path.with_name(f"{path.name}.{kind}") for kind in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            file.chmod(part.stat().st_mode & 0o666)  # as the umask wants it
            sync(file)
        sync(part)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        try:
            part.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or, whatever happens, not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
