"""Commands of dlion.suite.compare, run in this process."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from dlion.suite.arguments import errors_end_the_command


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys) -> Callable[..., Ended]:
    """Call the main function of a command with arguments, as its process would."""

    def run(main: Callable[[list[str]], None], *arguments: object) -> Ended:
        capsys.readouterr()
        code = 0
        try:
            with errors_end_the_command():
                main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run
