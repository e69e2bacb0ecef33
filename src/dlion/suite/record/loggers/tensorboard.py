"""TensorBoard's event files."""

import importlib.util
import json
from typing import Any

from dlion.errors import UserError
from dlion.suite.record.loggers.base import Logger, Recording, curves

FOLDER = "tensorboard"


class TensorBoardLogger(Logger):
    """Draws the curves of a run, and shows its settings, in TensorBoard.

    The event files are in ``tensorboard/`` in the run's directory: ``tensorboard --logdir DIR``
    shows all runs below DIR. A run that is resumed writes all its rows again, which take the place
    of those that earlier files hold.
    """

    def __init__(self, recording: Recording, /):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(recording.directory / FOLDER, purge_step=0)
        settings = json.dumps(recording.config, indent=2, default=str)
        self._writer.add_text("settings", f"```json\n{settings}\n```")
        for row in recording.rows:
            self.log(row)

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
