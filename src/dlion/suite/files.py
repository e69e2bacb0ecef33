"""Files and folders that are either complete or absent."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dlion.suite.inside import check_inside, opened

_UNFINISHED = re.compile(r"(.+)\.dlion-[0-9a-f]{8}\.(part|old)")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which gets its own name once it is whole and on the disk.

    Whatever happens, the file of that name is then the new one or the one before. A link of that
    name is replaced, not followed, as it may stand in a folder from elsewhere; the path that is
    given is that of a new file, whose name nobody can foresee.

    Raises:
        FileExistsError: if a device, a pipe, a socket or a folder has the name.
    """
    with contextlib.suppress(FileNotFoundError):
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISLNK(mode)):
            raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    part = _unfinished(path)
    with _naming(path, part):
        try:
            new = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            mode = stat.S_IMODE(os.fstat(new).st_mode)  # safetensors makes its files private
            os.close(new)
            yield part
            part.chmod(mode)
            sync(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _unfinished(path: Path, kind: str = "part") -> Path:
    return path.with_name(f"{path.name}.dlion-{secrets.token_hex(4)}.{kind}")


def remove_unfinished(folder: Path) -> None:
    """Remove the parts of files and folders that killed processes have left in a folder.

    A folder that was put aside for a new one, which did not get there, has its name again.
    """
    for path in [*folder.iterdir()]:
        if (found := _UNFINISHED.fullmatch(path.name)) is None:
            continue
        if found[2] == "old" and not os.path.lexists(path.with_name(found[1])):
            path.rename(path.with_name(found[1]))
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


@contextlib.contextmanager
def _naming(path: Path, part: Path) -> Iterator[None]:
    """Name a path, in place of its unfinished part, in an error of the operating system."""
    with naming_full_disk(path):
        try:
            yield
        except OSError as error:
            if str(part) not in str(error.filename):
                raise
            named = str(error.filename).replace(str(part), str(path))
            raise OSError(error.errno, error.strerror, named) from error


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Name a path in an error of the operating system that names no file, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give the path of a folder to fill, which gets its own name once it is whole and on the disk.

    Its files lie in it directly. A folder that had the name is replaced.

    Raises:
        Refused: if a link, or what is no folder, has the name.
    """
    check_inside(path.parent, path.name)
    part, old = _unfinished(path), _unfinished(path, "old")
    part.mkdir()
    try:
        yield part
        mode = stat.S_IMODE(part.stat().st_mode) & 0o666
        for file in part.iterdir():
            if file.is_file():
                file.chmod(mode)
            sync(file)
        sync(part)
        if path.exists():
            path.rename(old)
        part.rename(path)
    finally:
        if old.exists() and not path.exists():  # the new one did not get there
            old.rename(path)
        for folder in (part, old):
            shutil.rmtree(folder, ignore_errors=True)


def is_stream(path: Path) -> bool:
    """Whether a file is to be written in place: a device, a pipe, or where this process prints.

    ``/dev/stdout`` leads to whatever that is, perhaps a regular file that has text already.
    """
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    printed = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            printed.append(os.fstat(descriptor))
    return not (stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode)) or any(
        os.path.samestat(there, stream) for stream in printed
    )


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_argument(path: Path) -> str:
    """Return a path as it is typed behind a command, to which -x would be an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def sha256_of(files: Iterable[Path]) -> str:
    """Return the SHA-256 of files, one behind the other."""
    digest = hashlib.sha256()
    for file in files:
        with opened(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def opened_tensors(file: Path) -> Iterator[Any]:
    """Open a file of safetensors.

    Raises:
        OSError: with the file's name, where safetensors says that what may not be read is absent.
        SafetensorError: if it is damaged.
    """
    from safetensors import safe_open

    with opened(file), safe_open(file, "pt") as tensors:
        yield tensors


def load_tensors(file: Path) -> dict[str, Any]:
    """Return the tensors of a file of safetensors by name.

    Raises:
        OSError, SafetensorError: as :func:`opened_tensors`.
    """
    with opened_tensors(file) as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def sha256_of_tensors(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the contents of safetensors files, one behind the other.

    It is that of the tensors and the metadata by name: the files order their metadata at random.
    """
    import torch

    digest = hashlib.sha256()
    for file in files:
        with opened_tensors(file) as stored:
            digest.update(json.dumps(stored.metadata(), sort_keys=True).encode())
            for name in sorted(stored.keys()):
                tensor = stored.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
                digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or not at all, even if the process dies."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
