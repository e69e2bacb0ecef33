"""CONTRIBUTING's limits hold: lines of each package, and of what a reader of the step needs."""

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
LIBRARY = "the library without `rivals` and `elastic`"


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def test_packages_keep_to_their_lines():
    source = ROOT / "src/dlion"
    elsewhere = sum(lines(source / each) for each in ("suite", "rivals", "elastic"))
    limits = re.findall(r"^\| (.+?) \| ([\d,]+)", PAGE, re.MULTILINE)
    assert {name for name, _ in limits} >= {"`core`", LIBRARY}
    for name, limit in limits:
        taken = lines(source) - elsewhere if name == LIBRARY else lines(source / name.strip("`"))
        assert taken <= int(limit.replace(",", "")), f"{name} has {taken} lines"


def test_the_way_of_a_bit_is_read_in_700_lines():
    walk = PAGE.partition("<!-- walk -->")[2].partition("<!-- end -->")[0]
    stops = re.findall(r"^\d+\. `src/(.+?)\.py`: (.+?)\. ", walk, re.MULTILINE)
    read = 0
    for path, names in stops:
        module = importlib.import_module(path.replace("/", "."))
        for name in re.findall(r"`(.+?)`", names):
            found = module
            for part in name.split("."):
                found = inspect.getattr_static(found, part)
            read += len(inspect.getsource(inspect.unwrap(found)).splitlines())
    assert len(stops) == 9 and 400 < read < 700, read
