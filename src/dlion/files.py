"""Files that are whole or not there."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file: all of it or, whatever happens, nothing."""
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
