"""The core knows no extension: what it says of one is said of all."""

import re
from pathlib import Path

import dlion.core

WORDS = re.compile("overlap|fsdp|elastic|torchft|dense_group|nonfinite|stochastic", re.IGNORECASE)


def test_the_core_names_no_extension():
    where = []
    for file in sorted(Path(dlion.core.__file__).parent.glob("**/*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if WORDS.search(line):
                where.append(f"{file}:{number}: {line.strip()}")
    assert not where, "\n".join(where)
