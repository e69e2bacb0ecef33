"""The record of a run: metrics.jsonl, a line per measurement, and at the end summary.json.

If it fails instead, failure.txt says why.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.files import write_atomically

METRICS, SUMMARY, FAILURE = "metrics.jsonl", "summary.json", "failure.txt"
CONFIG = ".hydra/config.yaml"
_SILENT = 900  # seconds without a line after which a run counts as stopped


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


class RunRecord:
    """Writes the record of one run. The one place where a run is recorded."""

    def __init__(self, directory: Path, resumed_at: int | None = None):
        """``resumed_at``: keep the rows up to that step, and what is written goes behind them."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FAILURE).unlink(missing_ok=True)
        if (directory / METRICS).exists():
            kept = [r for r in load_run(directory).metrics if r["step"] <= (resumed_at or 0)]
            lines = "".join(json.dumps(_finite(row)) + "\n" for row in kept)
            write_atomically(directory / METRICS, lines)
        self._metrics = (directory / METRICS).open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Add one measurement; it is on disk, in the operating system's hands, on return."""
        self._metrics.write(json.dumps(_finite(row)) + "\n")
        self._metrics.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json: all of it or, whatever happens, nothing."""
        self._metrics.close()
        write_atomically(self.directory / SUMMARY, json.dumps(_finite(summary), indent=2) + "\n")


def record_config(directory: Path, config: Any) -> None:
    """Write what was asked of Hydra to ``.hydra``, as it would do itself.

    It would do so before anybody can look whether another run is there, whose settings were lost.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = HydraConfig.instance().cfg
    folder = (directory / CONFIG).parent
    folder.mkdir(parents=True, exist_ok=True)
    overrides = hydra.hydra.overrides.task
    for name, part in (("config", config), ("hydra", hydra), ("overrides", overrides)):
        write_atomically(folder / f"{name}.yaml", OmegaConf.to_yaml(part))


def record_failure(directory: Path, reason: str) -> None:
    """Note why a run failed, if nobody has (of several processes, the first knows best)."""
    with contextlib.suppress(OSError):  # a full disk, which is then the reason
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / FAILURE).exists():
            write_atomically(directory / FAILURE, reason.strip() + "\n")


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        directory: where it is.
        metrics: the rows, oldest first.
        summary: None while the run is not finished.
        config: the resolved configuration, None where it is not known.
        failure: why it failed, None if it is not known to have failed.
        silence: seconds since its last line, or since it began without one.
    """

    directory: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    config: dict[str, Any] | None
    failure: str | None
    silence: float

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def status(self) -> str:
        """finished | failed | running | stopped (no line for 15 minutes: killed, or very slow)."""
        if self.finished:
            return "finished"
        if self.failure is not None:
            return "failed"
        return "running" if self.silence < _SILENT else "stopped"


def holds_run(directory: Path) -> bool:
    """Whether a run was recorded there, finished or not."""
    return any((directory / name).exists() for name in (METRICS, SUMMARY))


def load_run(directory: Path) -> Run:
    """Read a run. A last line that was being written when the run died is left out.

    Raises:
        UserError: if its summary or configuration is damaged.
    """
    metrics, rows = [], directory / METRICS
    for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []:
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError:
            break
    summary_file, config_file = directory / SUMMARY, directory / CONFIG
    with _named_if_damaged(summary_file):
        summary = json.loads(summary_file.read_text("utf-8")) if summary_file.exists() else None
    with _named_if_damaged(config_file):
        config = _load_config(config_file)
    failure, latest = directory / FAILURE, rows if rows.exists() else config_file
    return Run(
        directory,
        metrics,
        summary,
        config,
        failure.read_text("utf-8").strip() if failure.exists() else None,
        time.time() - latest.stat().st_mtime if latest.exists() else math.inf,
    )


@contextlib.contextmanager
def _named_if_damaged(file: Path) -> Iterator[None]:
    """Our own files are written at once: what cannot be read was edited, or copied in part."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is damaged ({reason}): copy it again, or leave it out") from error


def _load_config(file: Path) -> dict[str, Any] | None:
    """The configuration, with what it looks up in itself: a recipe's rate, say."""
    if not file.exists():
        return None
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from omegaconf.resolvers import oc

    loaded = OmegaConf.load(file)
    if not isinstance(loaded, DictConfig):
        return None
    config = OmegaConf.to_container(loaded, resolve=False)
    OmegaConf.clear_resolver("oc.env")  # a run may be anybody's: it does not read our environment
    try:
        for group in config:
            with contextlib.suppress(OmegaConfBaseException):  # what needs a running Hydra stays
                if OmegaConf.is_config(loaded[group]):
                    config[group] = OmegaConf.to_container(loaded[group], resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env)
    return config


def directories_with(path: Path, *files: str) -> set[Path]:
    """The directories at or below ``path`` from which one of these files can be reached by name.

    Raises:
        UserError: if the path is not a directory.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give the output directories of runs")
    return {
        found.parents[len(Path(name).parts) - 1] for name in files for found in path.rglob(name)
    }


def find_runs(paths: list[Path]) -> list[Run]:
    """All runs at or below the given directories, sorted by directory.

    Raises:
        UserError: if a path does not exist or holds no run.
    """
    directories: set[Path] = set()
    for path in paths:
        found = directories_with(path, METRICS, FAILURE)
        if not found:
            raise UserError(f"{path} holds no run: give a directory with a {METRICS} below it")
        directories |= found
    return [load_run(directory) for directory in sorted(directories)]
