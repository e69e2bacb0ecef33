"""Command lines in one style: parsing, error messages and exit codes."""

import argparse
import contextlib
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from dlion.errors import RunFailed, UserError
from dlion.suite.files import is_stream, whole_file, write_atomically
from dlion.suite.terminal import in_one_line, interrupts_raised_again
from dlion.suite.units import parse_rate

DEFAULT_RUNS = Path("outputs")  # where train.py writes
PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    """A parser that refuses wrong arguments in one sentence, with exit code 2."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        options = super().parse_args(*args, **kwargs)
        for value in vars(options).values():
            if isinstance(value, Path) and re.match(r"\w{2,}:/", str(value)):
                self.error(f"{value} is an address: name a file or folder of this machine")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {in_one_line(message)}\n")


def make_parser(name: str, description: str | None, example: str) -> Parser:
    """Return the parser of ``dlion NAME``."""
    return Parser(
        prog=f"dlion {name}",
        description=description,
        epilog=f"example: dlion {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add RUNS, the argument of all commands that read runs."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        default=[DEFAULT_RUNS],
        metavar="RUNS",
        help="a directory of a run or above many, or a packed runs.jsonl; default: outputs",
    )


def beside(runs: list[Path], name: str) -> Path:
    """Return the path of that name in the first folder of RUNS, or beside its packed file."""
    return (runs[0].parent if runs[0].is_file() else runs[0]) / name


@contextlib.contextmanager
def errors_end_the_command() -> Iterator[None]:
    """Print an error as one line and exit: 2 if the input was wrong, 1 otherwise, 130 at Ctrl-C."""
    try:
        with interrupts_raised_again():
            yield
        sys.stdout.flush()
    except UserError as error:
        _leave(f"error: {in_one_line(str(error))}", 2)
    except RunFailed as error:
        _leave(f"error: {in_one_line(str(error))}", 1)
    except ModuleNotFoundError as error:
        _leave(f"error: {error.name} is not installed: type pip install 'dlion[suite]'", 1)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            _drop_output()
            sys.exit(1)
        if place := error.filename2 or error.filename:
            sentence = f"{place} could not be read or written ({reason}): name another place"
            _leave(f"error: {in_one_line(sentence)}", 2)
        _drop_output()
        _leave(f"error: {reason}", 1)
    except KeyboardInterrupt as interrupt:
        _leave(": ".join(["error: interrupted", *map(str, interrupt.args)]), 130)


def _drop_output() -> None:
    """Drop printed output that Python would write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _leave(sentence: str, code: int) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def output_file(typed: Path | None, default: Path) -> Iterator[Path]:
    """Give the path of the file that a command writes; then print its name.

    A link that was typed is followed. What is no regular file stays: the bytes are written into
    it, and nothing more is printed, as it may be /dev/stdout.

    Args:
        typed: with ``-o``.
        default: where nothing was.

    Raises:
        UserError: if it is a folder.
    """
    file = typed or default
    if file.is_dir():
        raise UserError(f"-o {file} is a folder: type -o {file / default.name}")
    if typed is None or not (typed.is_symlink() or is_stream(typed)):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file
        print(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, f"part{file.suffix or default.suffix}")
        yield part
        try:
            if is_stream(typed):
                sys.stdout.flush()
                with part.open("rb") as whole, file.open("ab", buffering=0) as stream:
                    shutil.copyfileobj(whole, stream)
                return
            with whole_file(Path(os.path.realpath(file))) as target:
                shutil.copyfile(part, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
    print(file)


def of_kind(*suffixes: str) -> Callable[[str], Path]:
    """Return a parser of names of files, which refuses the suffix of another kind of file."""

    def parse(text: str) -> Path:
        file = Path(text)
        suffix = file.suffix.lower()
        if suffix[1:].isalpha() and suffix not in suffixes:  # and not the .1 of lr0.1
            raise argparse.ArgumentTypeError(
                f"{text} is not a format of this command: choose {', '.join(suffixes)}"
            )
        return file

    return parse


def picture(text: str) -> Path:
    """Parse the name of a picture, PNG if it has no suffix."""
    file = Path(text)
    if file.suffix in PICTURES or is_stream(file):
        return file
    if file.suffix[1:].isalpha():  # and not the .1 of lr0.1
        raise argparse.ArgumentTypeError(f"{text} is no picture: choose {', '.join(PICTURES)}")
    return file.with_name(f"{file.name}.png")


def add_printed_output(parser: argparse.ArgumentParser, *suffixes: str) -> None:
    """Add ``-o`` of a command whose result is printed without it."""
    parser.add_argument(
        "-o",
        "--output",
        type=of_kind(*suffixes, ".txt"),
        metavar="FILE",
        help="write it there instead of printing it",
    )


def print_or_write(text: str, file: Path | None, name: str) -> None:
    """Print a result, or write it to a file and print the file's name.

    Args:
        file: as typed behind ``-o``.
        name: of the file that is proposed where a folder was typed.
    """
    if file is None:
        print(text, end="")
    else:
        with output_file(file, Path(name)) as path:
            write_atomically(path, text)


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers, ``1e7`` and 7B among them, from ``least`` to ``most``."""

    def parse(text: str) -> int:
        thousands = "KMBT".find(text[-1:].upper()) + 1 if text else 0
        value = round(_float(text[:-1]) * 1000**thousands, 3) if thousands else _float(text)
        fits = least <= value <= most and abs(value) < 2**63
        if not (fits and value == int(value)):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number {_limits(least, most)}")
        return int(value)

    return parse


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers from ``least`` to ``most``."""

    def parse(text: str) -> float:
        value = _float(text)
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text} is not a number {_limits(least, most)}")
        return value

    return parse


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _limits(least: float, most: float) -> str:
    return f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"


def link(text: str) -> int | None:
    """Parse the rate of a link, bits per second; None for ``loopback``, which is not shaped."""
    if text == "loopback":
        return None
    try:
        return parse_rate(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{error}, or loopback") from None
