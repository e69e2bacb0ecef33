"""A Python that has imported everything, and forks a copy of itself for each run of train.py.

Starting ``python train.py`` takes seconds, nearly all of them imports and compiled kernels that are
loaded; a copy starts at once. It goes through train.py itself and ends as any Python would, so its
exit code, its output and its files are those of the command. The server has no threads, as a fork
would not copy them.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MESSAGE = 1 << 20  # bytes, at most, of a request


def serve(requests: socket.socket) -> dict:
    """Fork for each request; return it in the copy. The server itself ends when the asker does.

    A request is ``{"argv": [...], "env": {...}}`` with three descriptors: standard output, standard
    error, and where to report the copy's process id and later its exit status.
    """
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                message, descriptors, *_ = socket.recv_fds(requests, MESSAGE, 3)
                if not message:
                    os._exit(0)
                stdout, stderr, report = descriptors
                pid = os.fork()
                if pid == 0:
                    os.dup2(stdout, 1)
                    os.dup2(stderr, 2)
                    os.closerange(3, max(descriptors) + 1)  # of this run, and of others
                    return json.loads(message)
                os.close(stdout)
                os.close(stderr)
                os.write(report, f"{pid}\n".encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))
            else:
                pid, report = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
                os.close(report)


def warm_up() -> None:
    """Import and compile what runs need, without starting a thread."""
    import torch

    torch.set_num_threads(1)
    from hydra import compose, initialize_config_dir

    from dlion.launch.check import check

    methods = sorted(path.stem for path in (ROOT / "conf" / "optimizer").glob("*.yaml"))
    with (
        initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"),
        tempfile.TemporaryDirectory() as directory,
    ):
        for method in methods:
            overrides = [f"optimizer={method}", "dataset=digits", f"output_dir={directory}"]
            check(compose("config", overrides=overrides), Path(directory), None)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    request = serve(requests)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["train.py", *request["argv"]]
    sys.path[0] = str(ROOT)
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
