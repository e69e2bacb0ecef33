"""The commands that the pages of this repository tell people to type."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

NO_PAGES = ("outputs", "runs", "wandb", "build", "dist")
SCRIPTS = ("train.py", "examples/*.py", "benchmarks/*.py")  # their docstrings have commands
SHELL, PYTHON = ("bash", "console", "sh", "shell"), ("python", "py")
PROGRAMS = (
    *("python", "python3", ".venv/bin/python", ".venv/bin/pip", "pip", "conda", "sudo", "dlion"),
    *("torchrun", "srun", "sbatch", "pytest", "ruff", "pyrefly", "sphinx-build", "pre-commit"),
    ".ci/run",
)
ALONE = (".ci/run", "pytest", "ruff")  # typed without arguments; other single words are names


class Command(NamedTuple):
    """What a page says to type, and where it says so.

    Attributes:
        text: one line for a shell, or a block of Python.
        python: whether it is Python.
    """

    page: str
    line: int
    text: str
    python: bool = False


def commands() -> list[Command]:
    """Return all commands of all pages, and of the docstrings of scripts."""
    found = []
    for path in pages():
        if path.is_relative_to(ROOT / "docs" / "tutorials"):
            continue  # typed word for word in tests/test_docs.py
        found += list(_of_markdown(path.relative_to(ROOT).as_posix(), path.read_text()))
    for pattern in SCRIPTS:
        for path in sorted(ROOT.glob(pattern)):
            lines = path.read_text().split('"""')[1].splitlines()
            name = path.relative_to(ROOT).as_posix()
            for number, line in _joined(lines):
                if _is_command(line.strip()):
                    found.append(Command(name, number, line.strip()))
    return found


def pages() -> list[Path]:
    """Return the pages of the repository."""

    def ours(path: Path) -> bool:
        first = path.relative_to(ROOT).parts[0]
        return not first.startswith(".") and first not in NO_PAGES

    return sorted(path for path in ROOT.rglob("*.md") if ours(path))


def _of_markdown(page: str, text: str) -> Iterator[Command]:
    fence, block, start = None, [], 0
    prose: list[str] = []  # with nothing where a block is, so that numbers of lines stay
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if fence is None:
                fence, block, start = line[3:].strip(), [], number + 1
            else:
                yield from _of_block(page, start, fence, block)
                fence = None
        elif fence is not None:
            block.append(line)
        prose.append("" if fence is not None or line.startswith("```") else line)
    for number, line in _joined(prose):
        if line.startswith("    ") and _is_command(line.strip()):
            yield Command(page, number, line.strip())
        elif not line.startswith("    "):
            for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
                if _is_command(code) and (len(code.split()) > 1 or code in ALONE):
                    yield Command(page, number, code)
                elif code.startswith("experiment="):
                    yield Command(page, number, f"python train.py {code}")


def _of_block(page: str, start: int, language: str, lines: list[str]) -> Iterator[Command]:
    if language in PYTHON:
        yield Command(page, start, "\n".join(lines), python=True)
    if language not in SHELL:
        return
    for number, line in _joined(lines):
        typed = line.strip()
        if language == "console":  # the rest is what is printed
            if not typed.startswith("$ "):
                continue
            typed = typed[2:]
        if typed and not typed.startswith("#"):
            for part in re.split(r"\s+(?:&&|;)\s+", typed):
                yield Command(page, start - 1 + number, part)


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of each line and its text, with the lines that a backslash joins to it."""
    joined, first = "", 0
    for number, line in enumerate(lines, 1):
        first = first or number
        joined += line if not joined else line.strip()
        if joined.endswith("\\"):
            joined = f"{joined[:-1].rstrip()} "
            continue
        yield first, joined
        joined, first = "", 0


def _is_command(text: str) -> bool:
    return text.split()[0] in PROGRAMS if text.split() else False


def words(text: str) -> list[str]:
    """Return a command's words, without comments, remarks, and what is optional or left open.

    ``a [b] c=... > file  # d`` becomes ``a c > file``, without its ``c``.
    """
    text = re.sub(r"\s{2,}\(.*\)$", "", text)
    text = re.sub(r"(?<=\s)\[(?:[^\[\]]|\[[^\]]*\])*\]", "", text)
    return [word for word in shlex.split(text, comments=True) if not word.endswith("...")]
