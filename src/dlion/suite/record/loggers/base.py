"""Base class of loggers, their view of a run, and the guard that contains their errors."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"(^|_)(key|token|password|secret)s?($|_)", re.IGNORECASE)


@dataclass(frozen=True)
class Recording:
    """Facts of a run for the logger that shows it.

    Attributes:
        config: the resolved configuration.
        directory: of the run.
        rows: those of metrics.jsonl when the run is resumed, oldest first.
        group: a name that runs share which differ in their seed alone.
        online: False where no server can be reached, as on an emulated network.
    """

    config: dict[str, Any]
    directory: Path
    rows: list[dict[str, Any]]
    group: str
    online: bool = True

    @property
    def name(self) -> str:
        """A short name for people."""
        return (
            f"{self.config['optimizer']['name']}-n{self.config['workers']}-s{self.config['seed']}"
        )


class Logger:
    """Shows nothing. The other loggers extend it.

    Settings are keyword arguments; the :class:`Recording` comes before them.
    """

    def __init__(self, recording: Recording, /):
        pass

    @classmethod
    def check(cls, **settings: Any) -> None:
        """Raise UserError if something is missing that these settings need."""

    def log(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Show summary.json and end; None: the run stopped before its last step."""


class FaultTolerant(Logger):
    """Hands everything to a logger until that fails, which becomes one warning."""

    def __init__(self, name: str, make: Callable[[], Logger]):
        self._name = name
        self._logger: Logger | None = self._safely(make)

    def log(self, row: dict[str, Any]) -> None:
        if self._logger is not None:
            self._safely(self._logger.log, row)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if self._logger is not None:
            self._safely(self._logger.finish, summary)
        self._logger = None  # a run that has ended ends once more when it is closed

    def _safely(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except (Exception, SystemExit) as error:
            self._logger = None
            warn(f"logger={self._name} is off: {first_line(error)}")
            return None


def warn(sentence: str) -> None:
    """Print a warning."""
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the name of the exception."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def without_secrets(node: Any) -> Any:
    """Return a configuration without values whose names mark them as secret."""
    if isinstance(node, dict):
        return {k: without_secrets(v) for k, v in node.items() if not _SECRET.search(str(k))}
    return [without_secrets(v) for v in node] if isinstance(node, list) else node


_CURVES = {
    "train/loss": "train_loss",
    "test/loss": "test_loss",
    "test/accuracy": "test_accuracy",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "seconds_per_step": "seconds_per_step",
    "sent_bits_per_parameter": "sent_bits_per_parameter",
}


def curves(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row that are drawn against steps, by the name of the curve."""
    return {name: row[key] for name, key in _CURVES.items() if row.get(key) is not None} | {
        "sent_gigabytes": row["sent_bytes"] / 1e9
    }
