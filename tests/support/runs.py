"""Real commands that tests start, disturb and compare: train.py and whatever else Python runs."""

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.conftest import ROOT
from tests.support.fork_server import VARIABLE, Fork, connect, pair

# the beginning of a line for a shell, where ``python`` would be typed
FORKED_PYTHON = shlex.quote(sys.executable)
if sys.platform == "linux":
    FORKED_PYTHON += f" -S {shlex.quote(str(ROOT / 'tests' / 'support' / 'forked_python.py'))}"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
# these are read when a command goes on; others may be read by what the server imports before
_READ_LATE = re.compile(
    "FAULT|MARKER|HOST_NAME|SLURM_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|COLUMNS"
    "|RUST_LOG|CUDA_VISIBLE_DEVICES|MYSQL_UNIX_PORT|GLOO_SOCKET_IFNAME|PYTHONPATH"
    "|BREAKS|CUTS|NAN|PATIENCE|STOPS|STORE|STRAYS|EXECUTABLE|WANDB_(API_KEY|BASE_URL|MODE)"
    "|[A-Z]+_TOKEN|AWS_SECRET_ACCESS_KEY|https?_proxy"
)


def until(what: Callable[[], Any], said: Callable[[], object] = str, seconds: float = 120) -> Any:
    """Wait until a condition holds; return what it returned, or fail with what was ``said``."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)
    return found


class _Process(Protocol):
    """What a run needs of its process, as subprocess.Popen has it."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def poll(self) -> int | None: ...


def start_fork_server() -> None:
    """Start the server of all processes of a test session, which ends with this one."""
    if sys.platform != "linux" or VARIABLE in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    os.environ[VARIABLE] = str(Path(folder.name) / "fork_server")
    ours, theirs = pair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[VARIABLE])
        listener.listen()
        numbers = theirs.fileno(), listener.fileno()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", *map(str, numbers)],
            cwd=ROOT,
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_take_ctrl_c,
        )
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        server.wait(timeout=60)
        folder.cleanup()

    atexit.register(end)


@functools.cache
def _fork_server() -> socket.socket:
    """Return this process's end for requests to the server."""
    return connect(os.environ[VARIABLE])


def _take_ctrl_c() -> None:
    """Undo what a shell does to its background jobs: they, and what they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A Python command in the background, as a user would type it.

    It runs in a copy of a Python that has imported everything (see fork_server.py), unless ``env``
    has variables that may change what is imported.
    """

    def __init__(
        self, arguments: Sequence[str], env: dict[str, str] | None = None, cwd: Path = ROOT
    ):
        """Start it.

        Args:
            arguments: ``python``'s: a script, or ``-m`` and a module, and what these are given.
            env: variables that are set for it, besides those of the tests.
            cwd: where it runs.
        """
        self._arguments = arguments
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the run
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: _Process
        env, files = env or {}, (self._stdout, self._stderr)
        if sys.platform == "linux" and all(map(_READ_LATE.fullmatch, env)):
            numbers = [file.fileno() for file in files]
            self._process = Fork(_fork_server(), arguments, os.environ | env, cwd, *numbers)
        else:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                preexec_fn=_take_ctrl_c,
            )
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return os.pread(self._stdout.fileno(), 1 << 24, 0).decode(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed there so far."""
        return os.pread(self._stderr.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for its end; kill it if it does not come.

        Raises:
            subprocess.TimeoutExpired: in that case.
        """
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return subprocess.CompletedProcess(self._arguments, returncode, self.stdout, self.stderr)

    def kill(self) -> None:
        """End it at once, if it has not ended, and wait until it is gone."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now: the server reaps
                self.send_signal(signal.SIGKILL)
            self._process.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def workers(self, timeout: float = 120) -> list[int]:
        """Return the process ids of train.py's workers, once it has trained for a step."""

        def begun() -> bool:
            there = _alive(self.pid)  # before what it has printed is read
            printed = any(line.startswith("output") for line in self.stdout.splitlines())
            assert there or printed, self.stderr
            return printed

        until(begun, lambda: f"the run does not begin: {self.stderr}", timeout)
        return self.children()

    def children(self) -> list[int]:
        """Return the ids of the processes that it has started and that are there."""
        found = subprocess.run(["pgrep", "-P", str(self.pid)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


def start(*overrides: str, env: dict[str, str] | None = None, under: Sequence[str] = ()) -> Run:
    """Start train.py in the background; ``under``: Python's arguments of what is to start it."""
    return Run([*under, "train.py", *overrides], env)


def train(
    *overrides: str,
    code: int | None = None,
    env: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end, and expect the exit code ``code`` unless it is None."""
    done = start(*overrides, env=env, under=under).wait()
    assert code in (None, done.returncode), done.stderr
    return done


def python(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python command to its end."""
    return Run([str(argument) for argument in arguments], env, cwd).wait()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_gone(pids: list[int]) -> None:
    until(lambda: not any(map(_alive, pids)), lambda: f"some of {pids} are still there", 60)


def wait_for_step(directory: Path, step: int, seconds: float = 120) -> None:
    """Wait until there is a checkpoint of that step, or a later one."""
    until(lambda: latest_step(directory) >= step, lambda: f"no step {step} in {directory}", seconds)


def latest_step(directory: Path) -> int:
    """Return the step of the latest checkpoint of a run; 0 if there is none."""
    found = (directory / "checkpoint").glob("step-????????")
    return max((int(p.name.removeprefix("step-")) for p in found), default=0)


def record(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return summary and rows of a run, without what differs between any two runs."""
    summary = json.loads((directory / "summary.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in (summary, *rows):
        for key in (
            "seconds",
            "seconds_per_step",
            "processes",
            "commit",
            "machine",
            "versions",
            "date",
        ):
            row.pop(key, None)
    return summary, rows
