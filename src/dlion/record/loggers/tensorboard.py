"""TensorBoard's event files."""

import importlib.util
import json
from typing import Any

from dlion.errors import UserError
from dlion.record.loggers.base import Logger, Recording, curves

FOLDER = "tensorboard"


class TensorBoardLogger(Logger):
    """Draws the curves of a run, and shows its settings, in TensorBoard.

    The event files are in ``tensorboard/`` in the run's directory: ``tensorboard --logdir DIR``
    shows all runs below DIR. What a run measures again after it was resumed takes the place of what
    it had measured before.
    """

    def __init__(self, recording: Recording, /):
        from torch.utils.tensorboard import SummaryWriter

        done = recording.rows[-1]["step"] if recording.rows else 0
        self._writer = SummaryWriter(recording.directory / FOLDER, purge_step=done + 1)
        if not done:
            settings = json.dumps(recording.config, indent=2, default=str)
            self._writer.add_text("settings", f"```json\n{settings}\n```")

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "logger=tensorboard needs the package tensorboard: type `pip install tensorboard`,"
                " or logger=csv"
            )

    def log(self, row: dict[str, Any]) -> None:
        for name, value in curves(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._writer.close()
