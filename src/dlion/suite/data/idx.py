"""MNIST's IDX files: an array of bytes behind a header with its shape."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from dlion.errors import UserError

_BYTES = 8  # the code of unsigned bytes
_MOST = 4 * 10**9  # bytes; a header may say anything


def find_idx(folder: Path, part: str, kind: str) -> Path | None:
    """Return the file of a part's images (``idx3``) or labels (``idx1``), packed or not, if any.

    The names are those of MNIST and its like: ``train-images-idx3-ubyte``, also with a dot before
    ``idx``, words in front, and ``.gz`` behind.

    Raises:
        UserError: if there are those of several sets.
    """
    what = {"idx3": "images", "idx1": "labels"}[kind]
    found = sorted(folder.rglob(f"*{part}-{what}[-.]{kind}-ubyte*"), key=lambda p: (p.suffix, p))
    found = [path for path in found if path.suffix in ("", ".gz", f".{kind}-ubyte")]
    if len({path.with_suffix("") if path.suffix == ".gz" else path for path in found}) > 1:
        raise UserError(
            f"{found[0]} and {found[-1]} are both there: give the folder of one set as dataset.path"
        )
    return found[0] if found else None


def read_idx(path: Path) -> np.ndarray:
    """Read an array of unsigned bytes.

    Raises:
        UserError: if the file is cut, too long, or something else.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            size = math.prod(shape)
            if (zeros, code) != (0, _BYTES) or size > _MOST:
                raise ValueError("its header does not describe unsigned bytes")
            content = file.read(size + 1)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise UserError(
            f"{path} is no IDX file that can be read ({error}): copy it again"
        ) from error
    if len(content) != size:
        raise UserError(
            f"{path} does not hold the {size:,} bytes that its header says: copy it again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
