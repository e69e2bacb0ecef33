"""What the commands of this package have in common on the command line."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from dlion.errors import UserError


def make_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of ``python -m dlion.compare.NAME``."""
    prog = f"python -m dlion.compare.{name}"
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"example: {prog} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@contextlib.contextmanager
def user_errors_end_the_command() -> Iterator[None]:
    """Print a UserError as one line and exit with code 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
