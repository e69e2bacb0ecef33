"""``python`` for scripts of a shell: it runs what it is given in a copy of the fork server."""

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.support.fork_server import VARIABLE, Fork, connect  # noqa: E402

server = connect(os.environ[VARIABLE])
sys.exit(Fork(server, sys.argv[1:], dict(os.environ), Path.cwd(), 1, 2).wait() % 256)
