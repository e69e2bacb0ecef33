"""Nothing but the table of the methods needs the rivals."""

import re
from pathlib import Path

import dlion


def test_only_the_table_of_methods_imports_the_rivals():
    library = Path(dlion.__file__).parent
    others = {path for path in library.rglob("*.py") if library / "rivals" not in path.parents}
    imports = re.compile(r"^ *(from|import) dlion\.rivals\b", re.MULTILINE)
    assert {path for path in others if imports.search(path.read_text())} == {
        library / "methods" / "__init__.py"
    }
