"""The core knows no extension: what it says of one is said of all."""

import re
from pathlib import Path

import dlion.core

WORDS = re.compile("overlap|fsdp|elastic|torchft|dense_group|nonfinite|stochastic", re.IGNORECASE)
ALLOWED = {  # to become fewer
    ("__init__.py", "overlap"),
    ("__init__.py", "elastic"),
    ("optimizer.py", "elastic"),
}


def test_the_core_names_no_extension():
    found, where = set(), []
    for file in sorted(Path(dlion.core.__file__).parent.glob("**/*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for word in {each.lower() for each in WORDS.findall(line)}:
                found.add((file.name, word))
                if (file.name, word) not in ALLOWED:
                    where.append(f"{file}:{number}: {line.strip()}")
    assert not where, "\n".join(where)
    assert found == ALLOWED  # nothing is allowed that is gone
