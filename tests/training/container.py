"""A slow model on a machine of the name HOST_NAME, in a container: its launcher is process 1."""

import os
import socket

from tests.training import slow


def model(data, **options):
    if "RANK" in os.environ:  # not in the launcher, which builds it too
        socket.gethostname = lambda: os.environ["HOST_NAME"]
        os.getppid = lambda: 1
    return slow.model(data, **options)
