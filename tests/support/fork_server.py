"""A Python that has imported everything, and forks a copy of itself for each command it is given.

Starting ``python train.py`` takes seconds, nearly all of them imports and compiled kernels that are
loaded; a copy starts at once. It goes through the script or the module that was named, so its exit
code, its output and its files are those of the command. The server has no threads, as a fork would
not copy them. What torchrun starts is forked as well, from a server of its own.

One server is there for all processes of a test session. It imports when it is first asked.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "DLION_FORK_SERVER"  # says where it listens
MESSAGE = 1 << 20  # bytes, at most, of a request
IMPORTED = (  # what commands import sooner or later
    *("dlion.suite.launch.cli", "dlion.suite.launch.runner", "matplotlib.pyplot"),
    *("dlion.suite.compare.plot", "dlion.suite.compare.publish", "dlion.suite.compare.report"),
    *("datasets", "sklearn.datasets", "timm", "torch.nn.parallel.distributed"),
    *("accelerate", "lightning", "torch.distributed.fsdp", "wandb.sdk.launch"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
)


class Fork:
    """A process that a server has started, with the methods of subprocess.Popen that are needed."""

    def __init__(
        self,
        server: socket.socket,
        arguments: Sequence[str],
        env: dict[str, str],
        cwd: Path,
        stdout: int,
        stderr: int,
    ):
        self._report, report = os.pipe()
        request = json.dumps({"arguments": arguments, "env": env, "cwd": str(cwd)}).encode()
        socket.send_fds(server, [request], [stdout, stderr, report])
        os.close(report)
        self.pid = self._read_number(timeout=300)
        self._returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            self._returncode = self._read_number(timeout)
            os.close(self._report)
        return self._returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def _read_number(self, timeout: float | None) -> int:
        readable, _, _ = select.select([self._report], [], [], timeout)
        if not readable:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            if not byte:
                raise RuntimeError("the fork server has died")
            line += byte
        return int(line)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends for requests: that of the asker, and that of a server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def connect(path: str) -> socket.socket:
    """Return an end for requests to the server that listens at a path."""
    asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asker.connect(path)
    return asker


class Server:
    """Forks for all who ask.

    Args:
        owner: with whose end all ends; it may ask.
        listener: where others come; their copies end when they do.
        prepare: is called with the arguments of each command before the fork.
    """

    def __init__(
        self,
        owner: socket.socket,
        listener: socket.socket | None = None,
        prepare: Callable[[list[str]], None] = lambda _: None,
    ):
        self._owner, self._listener, self._prepare = owner, listener, prepare
        self._selector = selectors.DefaultSelector()
        for place in filter(None, (owner, listener)):
            self._selector.register(place, selectors.EVENT_READ)
        self._copies: dict[int, tuple[int, int, socket.socket]] = {}  # pidfd: pid, report, asker

    def serve(self) -> dict:
        """Fork for each request; return it in the copy.

        A request is ``{"arguments": [...], "env": {...}, "cwd": "..."}`` with three descriptors:
        standard output, standard error, and where to report the copy's process id and later its
        exit status. A copy leads a process group of its own. A variable ``EXECUTABLE`` says what it
        takes for Python's: what it starts with that may be a copy too.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._copies:
                    self._report(key.fd)
                elif key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                elif not (received := socket.recv_fds(key.fileobj, MESSAGE, 3))[0]:
                    self._leave(key.fileobj)
                else:
                    request = json.loads(received[0])
                    self._prepare(request["arguments"])
                    if self._fork(key.fileobj, received[1]):
                        return request

    def _fork(self, asker: socket.socket, descriptors: list[int]) -> bool:
        """Return whether this is the copy."""
        stdout, stderr, report = descriptors
        pid = os.fork()
        if pid == 0:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for key in [*self._selector.get_map().values()]:
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            reports = [report for _, report, _ in self._copies.values()]
            for descriptor in (*descriptors, *self._copies, *reports):
                os.close(descriptor)
            return True
        os.close(stdout)
        os.close(stderr)
        os.setpgid(pid, pid)
        os.write(report, f"{pid}\n".encode())
        descriptor = os.pidfd_open(pid)
        self._copies[descriptor] = pid, report, asker
        self._selector.register(descriptor, selectors.EVENT_READ)
        return False

    def _report(self, descriptor: int) -> None:
        """Say how a copy has ended."""
        pid, report, _ = self._copies.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # of an asker who has left
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(report)

    def _leave(self, asker: socket.socket) -> None:
        """End the copies of an asker who has left; all, if it is the owner."""
        for descriptor, (_, _, whose) in self._copies.items():
            if asker in (whose, self._owner):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if asker is self._owner:
            os._exit(0)
        self._selector.unregister(asker)
        asker.close()


def prepare(arguments: list[str]) -> None:
    """Do what this command and others will need."""
    warm_up()
    if "train.py" in arguments:
        from tests.support.compositions import compose_files_of

        compose_files_of(arguments)


@functools.cache
def warm_up() -> None:
    """Import and compile what commands need, without starting a thread."""
    import torch

    torch.set_num_threads(1)
    from dlion.suite.data.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    for name in IMPORTED:
        importlib.import_module(name)
    from hydra import compose, initialize_config_dir
    from hydra.core.plugins import Plugins

    from dlion.methods import METHODS
    from dlion.suite.launch.check import check
    from dlion.workers import Workers
    from tests.support.compositions import remember_compositions

    remember_compositions()
    Plugins.instance()  # looks through all of Hydra's plugins
    compose_once()
    tables = importlib.import_module("dlion.suite.data.digits")
    tables._table = functools.cache(tables._table)  # which takes a second
    for load in (tables.mnist5k, tables.digits):
        load()
    with torch.device("meta"):  # which imports much of torch's compiler
        torch.nn.init.trunc_normal_(torch.ones(2, 2) * 2)
    for method in METHODS.values():  # loads compiled kernels
        params = [torch.nn.Parameter(torch.zeros(8, 8))]
        method.cls(params, workers=Workers(local=2), **method.options).prepare()
    with (
        initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"),
        tempfile.TemporaryDirectory() as directory,
    ):
        overrides = ["dataset=digits", f"output_dir={directory}"]
        check(compose("config", overrides=overrides), Path(directory), None)
    for each in [*weakref.finalize._registry]:  # torch forgets a thousand operators at its end
        each.atexit = False
    gc.freeze()  # what is shared with the copies is not looked through again


def compose_once() -> None:
    """Let Hydra compose no configuration to read its mode, which only recipes and users give."""
    from hydra._internal.hydra import Hydra

    read = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> object:
        given = any("experiment" in word or "hydra" in word for word in overrides)
        return read(self, config_name, overrides) if given else None

    Hydra.get_mode = get_mode


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    request = Server(owner, listener, prepare).serve()
    if request["arguments"][:2] == ["-m", "torch.distributed.run"]:
        asker, requests = pair()
        if os.fork() == 0:  # before torchrun has threads
            asker.close()
            request = Server(requests).serve()
        else:
            requests.close()
            fork_for_torchrun(asker)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = os.environ.get("EXECUTABLE", sys.executable)
    os.chdir(request["cwd"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    import torch

    torch.set_num_threads(1)  # it makes a pool after a fork, which two threads may not do at once
    try:
        run(*request["arguments"])
    except SystemExit as leaving:
        _end(leaving.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def fork_for_torchrun(server: socket.socket) -> None:
    """Let torchrun in this process start copies, which a server makes, instead of new Pythons."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def popen(self: SubprocessHandler, args: Sequence[str], env: dict[str, str]) -> Fork:
        out, err = (file.fileno() if file else None for file in (self._stdout, self._stderr))
        assert args[0] == sys.executable
        return Fork(server, args[1:], env, Path.cwd(), out or 1, err or 2)

    SubprocessHandler._popen = popen
    dynamic_rendezvous.get_method_name = lambda depth=2: ""  # looks through all that is imported


def run(first: str, *rest: str) -> None:
    """Run a script, a module behind ``-m`` or code behind ``-c``, as ``python`` does."""
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        first, *rest = rest
    if first == "-m":
        sys.argv, sys.path[0] = list(rest), str(Path.cwd())
        sys.modules.pop(rest[0], None)  # which python would not have imported
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _end(code: object) -> NoReturn:
    """End this copy as Python ends, but leave the memory, which takes long, to the kernel."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
