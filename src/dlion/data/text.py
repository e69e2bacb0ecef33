"""Real text on every machine: the source of the running Python's standard library."""

import sysconfig
from pathlib import Path

import torch

from dlion.data.base import TextData
from dlion.errors import UserError

# tests, what others installed, generated tables, and bundled programs
_LEFT_OUT = {
    "__pycache__",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_TEST_EVERY = 20  # files


def stdlib_text(context: int = 64, max_bytes: int | None = None) -> TextData:
    """Bytes of the standard library's Python files, about 9 MB; every 20th file is for the test.

    Args:
        context: bytes a model sees at once.
        max_bytes: use only so many bytes to train; None: all.
    """
    if context < 1:
        raise UserError(f"dataset.context={context} is not possible: give at least 1")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    train = b"".join(p.read_bytes() for i, p in enumerate(files) if i % _TEST_EVERY)[:max_bytes]
    test = b"".join(p.read_bytes() for p in files[::_TEST_EVERY])
    if len(train) <= context or len(test) <= context:
        raise UserError(
            f"the Python files under {root} hold fewer than dataset.context={context} bytes: give a"
            " smaller context or a larger dataset.max_bytes"
        )
    return TextData(_tokens(train), _tokens(test), vocabulary=256, context=context)


def _tokens(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
