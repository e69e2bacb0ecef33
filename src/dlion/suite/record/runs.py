"""The record of a run: how it is written during the run, and how it is read again.

A run has a directory. ``metrics.jsonl`` has a line per measurement and, with an ``event``, for each
worker that has joined or left; ``summary.json`` is written at
the end, beside the trained model; if the run fails instead, ``failure.txt`` says why. ``.hydra``
has the configuration.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dlion.errors import TrainingFailed, UserError
from dlion.suite.files import leads_to, whole_file, write_atomically
from dlion.suite.inside import LARGE, Refused, append, check_inside, read
from dlion.suite.record.configs import read_yaml, resolve
from dlion.suite.terminal import printable

METRICS, SUMMARY, FAILURE = "metrics.jsonl", "summary.json", "failure.txt"
CONFIG, OVERRIDES = ".hydra/config.yaml", ".hydra/overrides.yaml"
MODEL, PRETRAINED = "model.safetensors", "model"  # a file, or a folder of save_pretrained
TOKENIZER = "tokenizer"  # the folder of a model's tokenizer, beside MODEL
INPUT = "input.json"  # what makes the input of a model, where MODEL does not say it
OWN = (  # all that a run writes, which reference/files.md lists
    *(METRICS, f"{METRICS}.damaged", "metrics.csv", SUMMARY, FAILURE, "profile.json", ".lock"),
    *(".hydra", "checkpoint", MODEL, PRETRAINED, TOKENIZER, "tensorboard", "wandb", "wandb_id"),
)
# links that wandb makes, and does not write through
OF_WANDB = ("latest-run", "debug.log", "debug-internal.log", "debug-core.log")
_SILENT = 900  # seconds without a line after which a run counts as stopped


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with None for NaN and infinity, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


class RunRecord:
    """Writes the record of one run. The one place where a run is recorded.

    Attributes:
        rows: the measurements that were there and are kept, oldest first.
    """

    def __init__(self, directory: Path, resumed_at: int | None = None, step: int | None = None):
        """Open the record.

        Args:
            directory: of the run; it is made if it does not exist.
            resumed_at: the step at which the run resumes. Rows of later steps, which are about to
                be measured again, are dropped; damaged lines are set aside and named.
            step: the latest step whose events are kept; None: ``resumed_at``.

        Raises:
            TrainingFailed: if it cannot be written, as all methods do.
        """
        self.directory, self._file = directory, directory / METRICS
        self.rows: list[dict[str, Any]] = []
        with _written(self._file):
            directory.mkdir(parents=True, exist_ok=True)
            forget(directory, FAILURE, SUMMARY)  # of an earlier attempt, or of fewer steps
            if self._file.exists():
                rows, damaged = read_rows(directory)
                last = {True: step or resumed_at or 0, False: resumed_at or 0}
                kept = [row for row in rows if row["step"] <= last["event" in row]]
                self.rows = [row for row in kept if "event" not in row]
                _set_aside(self._file, damaged)
                write_atomically(self._file, "".join(map(_line, kept)))
            self._metrics = append(self._file)

    def append(self, row: dict[str, Any]) -> None:
        """Add one measurement; it is on disk, in the operating system's hands, on return."""
        with _written(self._file):
            self._metrics.write(_line(row))
            self._metrics.flush()
            if not leads_to(self._file, self._metrics.fileno()):
                self._write_again()

    @property
    def replaced(self) -> bool:
        """Whether another process has made a record in place of this one."""
        return self._file.exists() and not leads_to(self._file, self._metrics.fileno())

    def close(self) -> None:
        """Let another process record from here on."""
        self._metrics.close()

    def sync(self) -> None:
        """Put all rows on the disk itself, before something counts on them."""
        with _written(self._file):
            os.fsync(self._metrics.fileno())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json: all of it or nothing."""
        self.sync()
        self._metrics.close()
        file = self.directory / SUMMARY
        with _written(file):
            write_atomically(file, json.dumps(finite(summary), indent=2) + "\n")

    def _write_again(self) -> None:
        """Write all rows to a new file, as the open one was removed or moved."""
        print(
            f"warning: {self._file} was removed or moved while the run writes to it: it is made"
            " again with all rows; what else was there is lost",
            file=sys.stderr,
            flush=True,
        )
        self._metrics.seek(0)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, self._metrics.read())
        self._metrics.close()
        self._metrics = append(self._file)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row)) + "\n"


@contextlib.contextmanager
def _written(file: Path) -> Iterator[None]:
    """Name the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise TrainingFailed(
            f"{error.filename or file} could not be written ({error.strerror}): fix this; the"
            " same command with resume=auto resumes"
        ) from error


def _set_aside(file: Path, damaged: dict[int, bytes]) -> None:
    """Keep damaged lines in a file beside the one that they were found in, and name them."""
    if not damaged:
        return
    aside = file.with_name(f"{file.name}.damaged")
    before = read(file.parent, aside.name, LARGE) or b""
    with whole_file(aside) as part:
        part.write_bytes(before + b"".join(line + b"\n" for line in damaged.values()))
    print(
        f"left out: damaged lines of {file}, now in {aside.name}: {', '.join(map(str, damaged))}",
        file=sys.stderr,
        flush=True,
    )


def record_config(directory: Path, config: Any) -> None:
    """Write the composed settings to ``.hydra``, in the files that Hydra itself would write.

    Hydra would write them before anybody can look whether another run is in that directory, and
    that run's settings would be lost.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.instance().cfg
    folder = (directory / CONFIG).parent
    overrides = hydra.hydra.overrides.task
    with _written(folder):
        check_inside(directory, folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("config", config), ("hydra", hydra), ("overrides", overrides)):
            write_atomically(folder / f"{name}.yaml", OmegaConf.to_yaml(part))


def record_failure(directory: Path, reason: str) -> None:
    """Write why a run failed, unless it is written already.

    Several processes may fail one after the other; the first one knows the cause.
    """
    with contextlib.suppress(OSError):  # a full disk, which is then the reason, or no run is there
        if not (directory / FAILURE).exists():
            write_atomically(directory / FAILURE, reason.strip() + "\n")


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        directory: where it is; for a packed run, the file and the run's name behind it.
        metrics: the measurements, oldest first.
        summary: None while the run is not finished.
        config: the resolved configuration, None where it is not known.
        failure: why it failed, None if it is not known to have failed.
        silence: seconds since its last line, or since it began without one.
        overrides: what was typed; in a sweep, one value for each key.
        study: of a packed run, the name of the directory that holds the packed file.
        damaged_rows: number of lines of metrics.jsonl that could not be read.
        events: lines about workers that have joined or left, oldest first.
    """

    directory: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    config: dict[str, Any] | None
    failure: str | None = None
    silence: float = math.inf
    overrides: list[str] = field(default_factory=list)
    study: str | None = None
    damaged_rows: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

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


def forget(directory: Path, *names: str) -> None:
    """Remove files of an earlier attempt, where they are files."""
    for file in (directory / name for name in names):
        if file.is_file():
            file.unlink()


def check_own(directory: Path, names: Iterable[str] = OWN, **options: Any) -> None:
    """Refuse a directory in which a name that a run writes or reads leads elsewhere.

    ``options``: as for :func:`dlion.suite.inside.check_inside`.

    Raises:
        UserError: naming the link, pipe or device.
    """
    try:
        for name in names:
            links = OF_WANDB if name == "wandb" else ()
            check_inside(directory, name, links=links, **options)
    except Refused as error:
        raise UserError(
            f"{error}, which no run makes: remove it, or choose another directory"
        ) from error


def check_model(directory: Path) -> None:
    """Refuse a run whose model has files that lead elsewhere, or are larger than any.

    Raises:
        UserError: naming the first.
    """
    check_own(directory, (MODEL, PRETRAINED, TOKENIZER), limit=LARGE)
    if (file := directory / PRETRAINED / "adapter_config.json").exists():
        raise UserError(f"{file} asks for another model, which no run does: remove it")


def holds_run(directory: Path) -> bool:
    """Whether a run was recorded there, finished or not."""
    return any((directory / name).exists() for name in (METRICS, SUMMARY))


def load_run(directory: Path) -> Run:
    """Read the run in a directory; damaged lines of its metrics are left out.

    Raises:
        UserError: if its summary or configuration is damaged.
    """
    summary, config = None, None
    overrides: list[str] = []
    with named_if_damaged(directory / SUMMARY):
        if (text := read(directory, SUMMARY)) is not None:
            summary = json.loads(text)
            if not isinstance(summary, dict):
                raise ValueError("it is not an object")
    with named_if_damaged(directory / CONFIG):
        recorded = read_yaml(directory, CONFIG)
        config = resolve(recorded) if isinstance(recorded, dict) else None
    with named_if_damaged(directory / OVERRIDES):
        overrides = [str(override) for override in read_yaml(directory, OVERRIDES) or ()]
    with named_if_damaged(directory / FAILURE):
        failure = None if (directory / FAILURE).is_dir() else read(directory, FAILURE)
    with named_if_damaged(directory / METRICS):
        rows, damaged = read_rows(directory)
    return Run(
        directory=directory,
        metrics=[row for row in rows if "event" not in row],
        events=[row for row in rows if "event" in row],
        damaged_rows=len(damaged),
        summary=summary,
        config=config,
        failure=None if failure is None else failure.decode("utf-8", "replace").strip(),
        silence=_silence(directory),
        overrides=overrides,
    )


def read_rows(directory: Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Read the rows of a run, events too, and the damaged lines by number, from 1.

    A last line without its end was cut off when the run died, and is neither.

    Raises:
        OSError: if the file cannot be read, or is none.
    """
    rows, damaged = [], {}
    *lines, last = (read(directory, METRICS, LARGE) or b"").split(b"\n")
    for number, line in enumerate([*lines, last] if last.endswith(b"}") else lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise ValueError
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged[number] = line
    return rows, damaged


def _silence(directory: Path) -> float:
    """Return the seconds since the last line of a run, or since it was configured."""
    for name in (METRICS, CONFIG):
        if (directory / name).exists():
            return time.time() - (directory / name).stat().st_mtime
    return math.inf


@contextlib.contextmanager
def named_if_damaged(file: Path) -> Iterator[None]:
    """Name a file that is not as it was written.

    Runs write whole files or none: a file that cannot be read was edited, or copied in part.

    Raises:
        UserError: in that case.
    """
    try:
        yield
    except OSError as error:
        place, reason = error.filename or file, error.strerror or error
        raise UserError(
            f"{place} could not be read ({reason}): copy it again, or leave it out"
        ) from error
    except Exception as error:
        reason = printable(" ".join(str(error).split())[:200])
        raise UserError(f"{file} is damaged ({reason}): copy it again, or leave it out") from error
