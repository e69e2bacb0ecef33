"""Files in folders that may come from anybody, such as those of a run.

All that opens a file of a run goes through here or through :mod:`dlion.suite.files`. What is a
link, a pipe or a device is refused; the folder itself may be reached by links.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

SMALL, LARGE = 1 << 24, 1 << 29  # bytes: of a summary or a page; of all measurements


class Refused(OSError):
    """A file that is none of a run's: a link, a pipe, a device, or larger than a bound."""

    def __init__(self, path: Path, reason: str):
        super().__init__(errno.EINVAL, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def _check(path: Path, mode: int, folder: bool = False) -> None:
    """Refuse what is no regular file and, unless ``folder``, no folder either."""
    if stat.S_ISLNK(mode):
        raise Refused(path, "it is a link")
    if not (stat.S_ISREG(mode) or (folder and stat.S_ISDIR(mode))):
        raise Refused(path, "it is not a regular file")


def check_inside(
    folder: Path,
    name: str = "",
    *,
    links: Collection[str] = (),
    below: bool = True,
    limit: int | None = None,
) -> None:
    """Refuse links, pipes and devices on the way from a folder to a name in it, and below that.

    It is for what a library opens by its path afterwards. What does not exist is no fault.

    Args:
        folder: which may be reached by links.
        name: in it; empty: all that it holds.
        links: names of what may be a link.
        below: whether what lies below ``name`` is looked at, too.
        limit: bytes that a file may have, unless it is one of tensors.

    Raises:
        Refused: naming the first.
    """
    for path in filter(lambda path: path.name not in links, _places(folder, name, below)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = path.lstat()
            _check(path, found.st_mode, folder=True)
            if limit is not None and path.suffix != ".safetensors" and found.st_size > limit:
                raise _too_large(path, limit)


def _places(folder: Path, name: str, below: bool) -> Iterator[Path]:
    """Yield the path of each part of a name, then all that is below."""
    yield from itertools.islice(
        itertools.accumulate(Path(name).parts, Path, initial=folder), 1, None
    )
    for top, folders, files in os.walk(folder / name) if below else ():
        yield from (Path(top, each) for each in (*folders, *files))


def open_inside(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a regular file below a folder; no part of ``name`` is a link.

    Raises:
        Refused: if it is something else, whose reader might wait for ever.
        OSError: if it cannot be opened.
    """
    path = folder
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, last = Path(name).parts
        for part in parents:
            path /= part
            _check(path, os.stat(part, dir_fd=at, follow_symlinks=False).st_mode, folder=True)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        path /= last
        with contextlib.suppress(FileNotFoundError):
            _check(path, os.stat(last, dir_fd=at, follow_symlinks=False).st_mode)
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=at)
    except Refused:
        raise
    except OSError as error:  # which names the last part alone
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(at)
    return _regular(path, descriptor)


def _regular(path: Path, descriptor: int) -> int:
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except Refused:
        os.close(descriptor)
        raise
    return descriptor


def opened(path: Path) -> BinaryIO:
    """Open a regular file that the user has named, perhaps by a link, to read it."""
    return os.fdopen(_regular(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)), "rb")


def append(path: Path) -> TextIO:
    """Open a text file of a run to write behind its end, and to read it; it may be new."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    return os.fdopen(open_inside(path.parent, path.name, flags), "a+", encoding="utf-8", newline="")


def read(folder: Path, name: str, limit: int = SMALL) -> bytes | None:
    """Return the contents of a file below a folder from elsewhere; None: it does not exist.

    Raises:
        Refused: if it is no regular file, or has more than ``limit`` bytes.
    """
    try:
        descriptor = open_inside(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as stream:
        return _bounded(stream, folder / name, limit)


def read_named(path: Path, limit: int = SMALL) -> bytes:
    """Return the contents of a file that the user has named, perhaps by a link.

    Raises:
        Refused: if it is no regular file, or has more than ``limit`` bytes.
    """
    with opened(path) as stream:
        return _bounded(stream, path, limit)


def _bounded(stream: BinaryIO, path: Path, limit: int) -> bytes:
    if os.fstat(stream.fileno()).st_size > limit:
        raise _too_large(path, limit)
    return stream.read(limit)


def _too_large(path: Path, limit: int) -> Refused:
    return Refused(path, f"it has more than {limit >> 20} MiB")
