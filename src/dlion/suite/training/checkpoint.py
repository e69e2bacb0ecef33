"""Checkpoints: all that a run needs to resume bit for bit, on any spread of its workers.

    checkpoint/step-00000400/
        state.json                the run's identity, steps, samples and progress, size and
                                  SHA-256 of the files, and a SHA-256 of all that
        common.safetensors        parameters, and optimizer state that is equal everywhere
        worker-00000.safetensors  a worker's momentum or residuals, its part of the exchange, its
                                  BatchNorm statistics and its losses since the latest metrics

State is copied, which takes as much memory again, and written while training continues. A directory
gets its name when all is in it and on the disk. Each file names itself and its step. Files are read
as tensors and JSON: no content is ever executed. What is called ``step-`` and digits is a
checkpoint, with ``.part`` behind it one that was being written, and nothing else is read or removed
here. Random draws depend on seed, worker and step alone: there is no generator to save.

The common file of an elastic run has what a worker gets that joins; others are of the workers that
share the folder.
"""

import contextlib
import hashlib
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Thread
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dlion.errors import TrainingFailed, UserError
from dlion.exchange import Channel
from dlion.suite.files import (
    load_tensors,
    opened_tensors,
    remove,
    sync,
    whole_file,
    write_atomically,
)
from dlion.suite.inside import check_inside, opened, read
from dlion.suite.settings import TRAITS, is_group, unrecorded, with_present_names
from dlion.suite.training.weights import weights_sha256
from dlion.values import show

_DECISIVE = [name for name, traits in TRAITS.items() if traits.bits]
FOLDER, STATE, COMMON = "checkpoint", "state.json", "common.safetensors"
CHANGING = "changing"  # the number of workers of an elastic run, in its identity
_WORKER = re.compile(r"worker-[0-9]{5,}\.safetensors")


@dataclass
class Progress:
    """Progress of a run: totals over all workers, since its first step.

    Attributes:
        step: number of steps done.
        last_row: the step of the latest row of metrics.
        seconds: of training.
        sent_bytes, received_bytes: of all workers together.
        nic_bytes: of all network interfaces together.
        skipped: steps of workers in which a gradient was left out, as it was not finite.
    """

    step: int = 0
    last_row: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    nic_bytes: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on a disk.

    Attributes:
        directory: where it is.
        progress: of the run when it was saved.
        steps: of the whole run, as it was planned then.
        samples: of its data, to train and to test on.
    """

    directory: Path
    progress: Progress
    steps: int
    samples: tuple[int, int]


def identity(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal to resume a run bit for bit, as JSON keeps them."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    config = unrecorded(_DECISIVE) | with_present_names(config)
    settings = {name: config[name] for name in _DECISIVE}
    for group in filter(is_group, _DECISIVE):
        without = TRAITS[group].without
        settings[group] = {key: v for key, v in config[group].items() if key not in without}
    if (config.get("elastic") or {}).get("lighthouse") is not None:
        settings["workers"] = CHANGING
    if (source := config.get("init_from")) is not None:
        settings["init_from"] = weights_sha256(source)
    return json.loads(json.dumps(settings))


def differences(now: dict[str, Any], before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two identities differ, with both values; ...: there is none.

    Those of groups are named KEY.NAME, or KEY where another component was chosen.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in before | now:
        value, other = now.get(key, ...), before.get(key, ...)
        if not isinstance(value, dict) or not isinstance(other, dict):
            found[key] = value, other
        elif other.get("name") != value.get("name"):
            found[key] = value.get("name", ...), other.get("name", ...)
        else:
            keys = sorted({*value, *other})
            found |= {f"{key}.{k}": (value.get(k, ...), other.get(k, ...)) for k in keys}
    return {key: (value, other) for key, (value, other) in found.items() if value != other}


def in_words(different: dict[str, tuple[Any, Any]], there: str = "in the run") -> str:
    """Say what :func:`differences` found: "seed is 1 here and 0 in the run"."""
    return ", ".join(
        f"{key} is {_shown(value)} here and {_shown(other)} {there}"
        for key, (value, other) in different.items()
    )


def as_before(different: dict[str, tuple[Any, Any]]) -> str:
    """Say what to type for the settings of the run that :func:`differences` compared with."""
    words = [
        shlex.quote(f"{'+' * (value is ...)}{key}={show(other)}")
        for key, (value, other) in different.items()
        if other is not ... and not _is_digest(other)
    ]
    return f"type {' '.join(words)}" if words else "type the settings of that run"


def _shown(value: Any) -> str:
    if value is ...:
        return "not set"
    return f"weights {value[:8]}" if _is_digest(value) else show(value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


class OfAnotherRun(ValueError):
    """A checkpoint of a run with other settings."""


class Checkpoints:
    """Writes the checkpoints of one run and reads them back.

    Args:
        directory: of the run.
        run: its :func:`identity`.
        steps: number of steps of the whole run.
        samples: number of them to train and to test on.
        control: of the run's workers.
        common_state: returns the state that is equal everywhere, as views by name.
        worker_state: returns the state of a local worker, as views by name.
        keep: how many checkpoints to keep, the latest ones.
        timeout: seconds that process 0 waits for the files of the other processes.
        needs_all: whether it fails if one does not come; otherwise the checkpoint lacks it, and
            workers may come while others write: :func:`forget_parts` is for who starts them.

    Attributes:
        hosted: the workers whose files this process writes.
        everyone: those whose files process 0 waits for.
        gone: those of them that have left since.
        first: whether this process is process 0.
    """

    def __init__(
        self,
        directory: Path,
        run: dict[str, Any],
        steps: int,
        samples: tuple[int, int],
        *,
        control: Channel,
        common_state: Callable[[], dict[str, Tensor]],
        worker_state: Callable[[int], dict[str, Tensor]],
        keep: int,
        timeout: float,
        needs_all: bool = True,
    ):
        self.directory, self.run = directory / FOLDER, run
        self.steps, self.samples = steps, samples
        workers = control.workers
        self.hosted: Sequence[int] = workers.ids
        self.everyone: Sequence[int] = range(workers.count)
        self.gone: Collection[int] = ()
        self.first = workers.rank == 0
        self.common_state, self.worker_state = common_state, worker_state
        self.keep, self.timeout, self.needs_all = keep, timeout, needs_all
        self._written: Future[None] | None = None
        if self.first and needs_all:
            forget_parts(directory)
        control.barrier()

    def save(self, progress: Progress) -> None:
        """Begin to write a checkpoint; every process calls it after the same step.

        Raises:
            TrainingFailed: if the one before it could not be written.
        """
        self.wait()
        files = {worker_file(w): self.worker_state(i) for i, w in enumerate(self.hosted)}
        if self.first:
            files[COMMON] = self.common_state()
        copies = {
            file: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        self._written = written = Future()
        # a daemon, as a process that fails must not wait: the others' files may never come
        work = written, self._write, progress, copies, [*map(worker_file, self.everyone)]
        Thread(target=_run, args=work, daemon=True).start()

    def raise_failure(self) -> None:
        """Raise the first error of writing so far, without waiting for the rest."""
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self) -> None:
        """Wait until this process has written its files; process 0 waits for those of all.

        Raises:
            TrainingFailed: if they could not be written; only a warning unless it ``needs_all``.
        """
        written, self._written = self._written, None
        try:
            if written is not None:
                written.result()
        except TrainingFailed as error:
            if self.needs_all:
                raise
            print(f"warning: {error}", file=sys.stderr, flush=True)

    def _write(
        self, progress: Progress, files: dict[str, dict[str, Tensor]], everyones: list[str]
    ) -> None:
        final = self.directory / f"step-{progress.step:08}"
        part = final.with_suffix(".part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            for name, tensors in files.items():
                _write(part / name, tensors, progress.step)
            if COMMON in files:
                self._complete(part, final, progress, everyones)
        except (OSError, SafetensorError) as error:
            if COMMON in files:
                remove(part)
            raise TrainingFailed(
                f"the checkpoint of step {progress.step} could not be written ({error}); those"
                " before it are whole: fix this; the same command with resume=auto resumes"
            ) from error

    def _complete(self, part: Path, final: Path, progress: Progress, everyones: list[str]) -> None:
        """Wait for all workers' files, list them in state.json, and give the directory its name."""
        files, deadline = {}, time.monotonic() + self.timeout
        for name in (COMMON, *everyones):
            receipt = f"{name}.json"
            while (found := read(part, receipt)) is None:
                if name in map(worker_file, self.gone):
                    break
                if time.monotonic() > deadline:
                    if not self.needs_all:
                        break
                    raise OSError(
                        f"{name} did not come in {self.timeout} s; do all processes see {part}?"
                    )
                time.sleep(0.005)
            else:
                files[name] = json.loads(found)
                remove(part / receipt)
        state = {
            "run": self.run,
            "steps": self.steps,
            "samples": self.samples,
            "progress": asdict(progress),
            "files": files,
        }
        state["sha256"] = _digest(state)
        write_atomically(part / STATE, json.dumps(state, indent=1) + "\n")
        sync(part)
        remove(final)
        part.rename(final)
        sync(self.directory)
        sync(self.directory.parent)
        forget_parts(self.directory.parent, progress.step)
        # later ones were of no use when this run went on, and must not count in place of good ones
        done = [path for path in _directories(self.directory) if _step_of(path) <= progress.step]
        for old in done[self.keep :]:
            remove(old)

    def load(self, checkpoint: Checkpoint) -> Progress:
        """Put all state back; return how far the run was."""
        copy_state(load_tensors(checkpoint.directory / COMMON), self.common_state())
        for i, worker in enumerate(self.hosted):
            file = checkpoint.directory / worker_file(worker)
            copy_state(load_tensors(file), self.worker_state(i))
        return checkpoint.progress


def forget_parts(directory: Path, before: float = math.inf) -> None:
    """Remove what processes that died have left of a run's checkpoints, of steps before one."""
    for part in (directory / FOLDER).glob("step-*.part"):
        step = _step_of(part.with_suffix(""))
        if step is not None and step < before:
            remove(part)


def find(
    directory: Path, run: dict[str, Any], hashed: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """Return the latest good checkpoint of a run, and a sentence about each later one that is not.

    Args:
        directory: of the run, or of one checkpoint.
        run: the run's :func:`identity`.
        hashed: compare each file's SHA-256, too, for which all of them are read.

    Raises:
        UserError: if there are checkpoints and none is good.
    """
    one = not (directory / FOLDER).is_dir() and (
        (directory / STATE).exists() or _step_of(directory) is not None
    )
    candidates = [directory] if one else _directories(directory / FOLDER)
    complaints, others = [], set[str]()
    for candidate in candidates:
        try:
            check_inside(directory, "" if one else f"{FOLDER}/{candidate.name}")
            return _read(candidate, run, hashed), complaints
        except OfAnotherRun as error:
            if str(error) not in others:
                complaints.append(f"{candidate} {error}")
            others.add(str(error))
        except (OSError, ValueError) as error:
            complaints.append(f"{candidate}: {error}")
    if len(complaints) == len(others) == 1:
        raise UserError(f"{complaints[0]}, or start a new run in another output_dir without resume")
    if complaints:
        raise UserError(
            f"no checkpoint can be used ({'; '.join(complaints)}): give another with resume=PATH,"
            " or another output_dir to start again"
        )
    return None, complaints


def has_checkpoint(directory: Path) -> bool:
    """Whether a run's directory holds a checkpoint, good or not."""
    return bool(_directories(directory / FOLDER))


def saved_identity(directory: Path) -> dict[str, Any] | None:
    """Return the :func:`identity` of the run that has checkpoints in a directory."""
    for candidate in _directories(directory / FOLDER):
        with contextlib.suppress(OSError, ValueError):
            return _read_state(candidate)[0]
    return None


def last_saved(directory: Path) -> float:
    """Return when the run in a directory saved its last checkpoint, in seconds since 1970."""
    return (directory / FOLDER).stat().st_mtime


def _read(directory: Path, run: dict[str, Any], hashed: bool) -> Checkpoint:
    """Check a checkpoint; ``hashed``: down to the last byte.

    Raises:
        OSError: if a file is missing.
        ValueError: saying what is damaged, or that it is of another run.
    """
    saved_run, files, checkpoint = _read_state(directory)
    if saved_run != run:
        different = differences(run, saved_run)
        if "workers" in different and CHANGING in (run["workers"], saved_run.get("workers")):
            come = saved_run.get("workers") == CHANGING
            raise ValueError(
                f"its workers {'come and go' if come else 'do not change'}: type"
                f" elastic={'true' if come else 'false'}"
            )
        raise OfAnotherRun(
            f"is of a run with other settings ({in_words(different)}): {as_before(different)} to"
            " resume it"
        )
    if run["workers"] == CHANGING:
        expected = {COMMON, *filter(_WORKER.fullmatch, files)}
    else:
        expected = {COMMON, *map(worker_file, range(run["workers"]))}
    if set(files) != expected:
        raise ValueError("its list of files is not that of its workers")
    for name, (size, digest) in files.items():
        file = directory / name
        if file.stat().st_size != size:
            raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if hashed and _sha256(file) != digest:
            raise ValueError(f"{name} is damaged")
        try:
            with opened_tensors(file) as tensors:
                names_itself = tensors.metadata()
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged") from error
        if names_itself != _metadata(name, checkpoint.progress.step):
            raise ValueError(f"{name} is the file of another worker or step")
    return checkpoint


def _read_state(directory: Path) -> tuple[dict[str, Any], dict[str, Any], Checkpoint]:
    """Read state.json: the identity of its run, its files' size and SHA-256, and the rest.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is missing, damaged, or of another step than the folder's name says.
    """
    content = read(directory, STATE)
    if content is None:
        raise ValueError(f"{STATE} is missing")
    try:
        state = json.loads(content)
        if state.pop("sha256") != _digest(state):
            raise ValueError
        run = unrecorded(_DECISIVE) | with_present_names(state["run"])
        progress = Progress(**state["progress"])
        files = {name: (size, digest) for name, (size, digest) in state["files"].items()}
        trained_on, tested_on = state["samples"]
        checkpoint = Checkpoint(directory, progress, state["steps"], (trained_on, tested_on))
        numbers = [(getattr(progress, field.name), field.type) for field in fields(Progress)]
        numbers += [(number, int) for number in (checkpoint.steps, *checkpoint.samples)]
        if any(type(n) is not kind or n < 0 for n, kind in numbers):
            raise ValueError
        if progress.step < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{STATE} is damaged") from error
    if _step_of(directory) not in (None, progress.step):
        raise ValueError(f"it is of step {progress.step}, unlike its name")
    run.pop("local_betas", None)  # earlier settings, which sgd does not have
    if (inner := run.pop("local_optimizer", "sgd")) != "sgd":
        raise ValueError(f"local steps of {inner} are those of optimizer=diloco today")
    return run, files, checkpoint


def _digest(state: dict[str, Any]) -> str:
    """Return the SHA-256 of the rest of state.json, independent of its layout."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _directories(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the latest first."""
    found = [path for path in folder.glob("step-*") if _step_of(path) is not None and path.is_dir()]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(directory: Path) -> int | None:
    """Return the step in a checkpoint's name; None: it is not called as one."""
    match = re.fullmatch("step-([0-9]+)", directory.name)
    return int(match[1]) if match else None


def worker_file(worker: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker:05}.safetensors"


def _metadata(name: str, step: int) -> dict[str, str]:
    """Return the identity of a file, so that none can take another's place."""
    return {"file": name, "step": str(step)}


def _write(file: Path, tensors: dict[str, Tensor], step: int) -> None:
    """Write tensors to the disk, then a receipt: size and SHA-256 of the file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with whole_file(file) as part:
        save_file(contiguous, part, _metadata(file.name, step))
    receipt = json.dumps([file.stat().st_size, _sha256(file)])
    write_atomically(file.with_name(f"{file.name}.json"), receipt)


def _sha256(file: Path) -> str:
    with opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _run(result: Future[None], work: Callable[..., None], *args: Any) -> None:
    try:
        result.set_result(work(*args))
    except BaseException as error:
        result.set_exception(error)


def copy_state(saved: dict[str, Tensor], views: dict[str, Tensor]) -> None:
    """Copy saved tensors into those of the run."""
    if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in views.items()}:
        raise UserError("the checkpoint holds other tensors than this model and optimizer")
    for name, view in views.items():
        view.copy_(saved[name])
