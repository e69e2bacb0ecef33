"""Loggers show a run while it trains. A logger may break; the run continues without it."""

from dataclasses import replace
from typing import Any

from dlion.errors import UserError
from dlion.suite.config import instantiate
from dlion.suite.record.loggers.base import FaultTolerant, Logger, Recording, without_secrets
from dlion.suite.record.loggers.csv_table import CsvLogger
from dlion.suite.record.loggers.tensorboard import TensorBoardLogger
from dlion.suite.record.loggers.wandb_run import WandbLogger
from dlion.suite.record.loggers.wandb_server import why_not_sync
from dlion.suite.settings import SPECIAL, locate

__all__ = [
    "CsvLogger",
    "Logger",
    "Recording",
    "TensorBoardLogger",
    "WandbLogger",
    "check_logger",
    "make_logger",
    "why_not_sync",
]


def make_logger(node: Any, recording: Recording) -> Logger:
    """Return the logger that a node of ``conf/logger`` describes.

    It sees no value whose name says that it is secret. Where it fails, it warns and does no more.
    """
    shown = replace(recording, config=without_secrets(recording.config))
    return FaultTolerant(node.name, lambda: instantiate(node, shown))


def check_logger(node: Any) -> None:
    """Check the requirements of a logger on this machine, before any process starts.

    Raises:
        UserError: one sentence about what is missing or wrong.
    """
    settings = {key: value for key, value in node.items() if key not in SPECIAL}
    logger = locate(node["_target_"], "logger")
    if not (isinstance(logger, type) and issubclass(logger, Logger)):
        raise UserError(
            f"logger._target_={node['_target_']} is no logger: give a subclass of"
            " dlion.suite.record.loggers.Logger"
        )
    logger.check(**settings)
