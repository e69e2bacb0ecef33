"""Files that are either complete or absent."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or, whatever happens, not at all."""
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
