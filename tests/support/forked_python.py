"""``python`` for scripts of a shell: it runs what it is given in a copy of the fork server.

Signals of SLURM are passed on to the copy, which ends with this process at the latest.
"""

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.support.fork_server import VARIABLE, Fork, connect  # noqa: E402

server = connect(os.environ[VARIABLE])
copy = Fork(server, sys.argv[1:], dict(os.environ), Path.cwd(), 1, 2)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(copy.pid, number))
sys.exit(copy.wait() % 256)
