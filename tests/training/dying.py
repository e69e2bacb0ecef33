"""A model whose process 1 dies once, as it has just begun to write its second checkpoint."""

import os
import signal
from pathlib import Path

from dlion.suite.training.checkpoint import Checkpoints
from tests.launch import faulty


def model(data, **options):
    save, marker, saved = Checkpoints.save, Path(os.environ["MARKER"]), []

    def save_and_die(self, progress):
        saved.append(progress)
        if len(saved) == 2 and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, progress)

    Checkpoints.save = save_and_die
    return faulty.model(data, **options)
