"""Python commands, as they are typed, in forks of one process that has imported everything.

A start costs a tenth of a second instead of the seconds that importing torch takes.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """What became of a command: its exit code, and what it printed to stdout and stderr."""

    code: int | None
    printed: str


class Running:
    """A command that runs.

    Attributes:
        process: where it runs.
        log: the file that gets what it prints.
    """

    def __init__(
        self, command: list[str], directory: Path, log: Path, env: dict[str, str] | None = None
    ):
        """Start it.

        Args:
            command: ``python``'s arguments, a script or ``-m`` and a module first.
            directory: where it runs.
            env: variables that are set for it.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        self.log = log
        log.write_text("")
        self.process = context.Process(target=_run, args=(command, directory, log, env or {}))
        self.process.start()

    def wait(self, seconds: float = 180) -> Done:
        """Wait until it ends."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return Done(self.process.exitcode, self.log.read_text(errors="replace"))


def _run(command: list[str], directory: Path, log: Path, env: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(directory)
    os.environ |= env
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
