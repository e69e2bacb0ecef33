"""Put the tables that commands print into READMEs.

A README names the command in a comment on a line of its own, and the table stands on the next line:

    <!-- table: dlion table results/mnist5k -->
    | ... |

All such tables are replaced by what their commands print now. Only ``dlion table``,
``dlion board`` and ``dlion methods`` are run, in the working directory.
"""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

from dlion.errors import UserError
from dlion.suite.arguments import Parser, errors_end_the_command
from dlion.suite.files import write_atomically

MARK = re.compile(r"^<!-- table: (?P<command>.*) -->\n(?P<table>(?:\|.*\n)*)", re.MULTILINE)
COMMANDS = ("table", "board", "methods")  # modules beside this one, with make_table


def refresh(text: str) -> str:
    """Return the text of a README with all its tables as they are printed now.

    Raises:
        UserError: if a command is not one that prints a table.
    """

    def printed(mark: re.Match[str]) -> str:
        first, *_ = mark[0].splitlines()
        return f"{first}\n{_run(mark['command'])}"

    return MARK.sub(printed, text)


def _run(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{command}: {error}") from error
    match words:
        case ["dlion", name, *arguments] if name in COMMANDS:
            return str(import_module(f"dlion.suite.compare.{name}").make_table(arguments))
    allowed = " and ".join(f"dlion {name}" for name in COMMANDS)
    raise UserError(f"{command} prints no table: only {allowed} may be named")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m dlion.suite.compare.readme", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="README")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit with 1 if a table differs"
    )
    options = parser.parse_args(arguments)
    different = []
    for file in options.files:
        text = file.read_text("utf-8")
        refreshed = refresh(text)
        if refreshed != text:
            different.append(file)
            if not options.check:
                write_atomically(file, refreshed)
    for file in different:
        print(f"{file} {'differs' if options.check else 'is refreshed'}")
    if options.check and different:
        sys.exit(1)


if __name__ == "__main__":
    with errors_end_the_command():
        main()
