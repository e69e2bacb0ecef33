"""Checkpoints: all that a run needs to go on to the bit, on any spread of its workers.

    checkpoint/step-00000400/
        state.json                what run it is, how far, and size and SHA-256 of the other files
        common.safetensors        parameters, and optimizer state that is equal everywhere
        worker-00000.safetensors  a worker's momentum or residuals, its part of the exchange, its
                                  BatchNorm statistics

State is copied, which takes as much memory again, and written while training goes on. A directory
gets its name when all is in it and on the disk. Files are read as tensors and JSON: no content is
ever executed. Random draws depend on seed, worker and step, so there is none to save.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlion.errors import TrainingFailed, UserError
from dlion.exchange import Channel
from dlion.files import write_atomically
from dlion.optim import DistributedOptimizer

_DECISIVE = (
    *("batch_size", "accumulate", "precision", "seed", "bucket_cap_mb", "threads", "nonfinite"),
    *("participation", "local_steps", "local_lr"),
)
FOLDER, STATE, COMMON = "checkpoint", "state.json", "common.safetensors"


@dataclass
class Progress:
    """How far a run is: totals over all workers, since its first step.

    Attributes:
        step: done.
        since: the step of the latest row of metrics.
        seconds: of training.
        sent_bytes, received_bytes, nic_bytes: of all workers or interfaces together.
        skipped: steps of workers in which a gradient was left out, as it was not finite.
    """

    step: int = 0
    since: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    nic_bytes: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on a disk."""

    directory: Path
    progress: Progress


def identity(config: Any, workers: int) -> dict[str, Any]:
    """What must be equal for a run to go on to the bit; where it runs may change."""
    keys = ("optimizer", "model", "dataset", "schedule")
    facts = {key: {k: v for k, v in config[key].items() if k != "source"} for key in keys}
    facts["dataset"] = {k: v for k, v in facts["dataset"].items() if k not in ("path", "loaders")}
    for key in _DECISIVE:
        facts[key] = config[key]
    facts["faults"] = dict(config.faults)
    return json.loads(json.dumps({**facts, "workers": workers}, default=list))


class Checkpoints:
    """Writes the checkpoints of one run and reads them back.

    Args:
        directory: of the run.
        run: its :func:`identity`.
        keep: how many to keep, the latest ones.
        timeout: seconds that process 0 waits for the other processes' parts.
        more: state of local worker i besides the optimizer's, as views by name.
    """

    def __init__(
        self,
        directory: Path,
        run: dict[str, Any],
        keep: int,
        optimizer: DistributedOptimizer,
        more: Callable[[int], dict[str, Tensor]],
        control: Channel,
        timeout: float,
    ):
        self.directory, self.run, self.keep = directory / FOLDER, run, keep
        self.optimizer, self.more, self.control = optimizer, more, control
        self.timeout = timeout
        self._written: Future[None] | None = None
        if control.workers.rank == 0:
            for begun in self.directory.glob("step-*.part"):  # by a process that died
                shutil.rmtree(begun, ignore_errors=True)
        control.barrier()

    def save(self, progress: Progress, losses: Tensor) -> None:
        """Begin to write a checkpoint; every process calls it after the same step.

        Args:
            losses: ``[k]``, sums since the latest row of metrics.

        Raises:
            TrainingFailed: if the one before it could not be written.
        """
        self.wait()
        files = {
            _name(worker): self._own(i) | {"losses": losses[i : i + 1]}
            for i, worker in enumerate(self.control.workers.ids)
        }
        if self.control.workers.rank == 0:
            files[COMMON] = self.optimizer.common_state()
        copies = {
            file: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        self._written = written = Future()
        # a process that fails does not wait for it: others' parts may never come
        Thread(target=_run, args=(written, self._write, progress, copies), daemon=True).start()

    def look(self) -> None:
        """Raise what went wrong in writing, without waiting for it."""
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self) -> None:
        """Until this process has written its part; process 0: all have."""
        if self._written is not None:
            self._written.result()
            self._written = None

    def _write(self, progress: Progress, files: dict[str, dict[str, Tensor]]) -> None:
        final = self.directory / f"step-{progress.step:08}"
        part = final.with_suffix(".part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            for name, tensors in files.items():
                _write(part / name, tensors)
            if COMMON in files:
                self._complete(part, final, progress)
        except (OSError, SafetensorError) as error:
            if COMMON in files:
                shutil.rmtree(part, ignore_errors=True)
            raise TrainingFailed(
                f"the checkpoint of step {progress.step} could not be written ({error}); those"
                " before it are whole: mend that, and the same command with resume=auto goes on"
            ) from error

    def _complete(self, part: Path, final: Path, progress: Progress) -> None:
        """When all workers' files are there: list them, and give the directory its name."""
        files, until = {}, time.monotonic() + self.timeout
        for name in (COMMON, *map(_name, range(self.control.workers.count))):
            receipt = part / f"{name}.json"
            while not receipt.exists():
                if time.monotonic() > until:
                    raise OSError(
                        f"{name} did not come in {self.timeout} s; do all processes see {part}?"
                    )
                time.sleep(0.005)
            files[name] = json.loads(receipt.read_text("utf-8"))
            receipt.unlink()
        state = {"run": self.run, "progress": asdict(progress), "files": files}
        write_atomically(part / STATE, json.dumps(state, indent=1) + "\n")
        _sync(part)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        _sync(self.directory)
        for old in _directories(self.directory)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self, checkpoint: Checkpoint) -> tuple[Progress, Tensor]:
        """Put everything back. Returns the progress and the losses ``[k]``."""
        _copy(load_file(checkpoint.directory / COMMON), self.optimizer.common_state())
        losses = torch.zeros(self.control.workers.local, dtype=torch.float64)
        for i, worker in enumerate(self.control.workers.ids):
            tensors = load_file(checkpoint.directory / _name(worker))
            losses[i] = tensors.pop("losses")[0]
            _copy(tensors, self._own(i))
        for group in self.optimizer.param_groups:
            group["steps"] = checkpoint.progress.step
        return checkpoint.progress, losses

    def _own(self, i: int) -> dict[str, Tensor]:
        return self.optimizer.worker_state(i) | self.more(i)


def find(directory: Path, run: dict[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """The latest good checkpoint of a run, and a sentence about each later one that is not.

    Args:
        directory: of the run, or of one checkpoint.

    Raises:
        UserError: if there are checkpoints and none is good.
    """
    one = (directory / STATE).exists() or directory.name.startswith("step-")
    candidates = [directory] if one else _directories(directory / FOLDER)
    complaints = []
    for candidate in candidates:
        try:
            return _read(candidate, run), complaints
        except (OSError, ValueError) as error:
            complaints.append(f"{candidate}: {error}")
    if complaints:
        raise UserError(
            f"no checkpoint can be used ({'; '.join(complaints)}): give another with resume=PATH,"
            " or another output_dir to start anew"
        )
    return None, complaints


def _read(directory: Path, run: dict[str, Any]) -> Checkpoint:
    """Check a checkpoint, down to the last byte."""
    try:
        state = json.loads((directory / STATE).read_text("utf-8"))
        of, files = dict(state["run"]), {name: (*row,) for name, row in state["files"].items()}
        progress = Progress(**state["progress"])
        if not all(len(row) == 2 for row in files.values()) or progress.step < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{STATE} is damaged") from error
    if of != run:
        odd = sorted(key for key in run if of.get(key) != run[key])
        raise ValueError(f"it is of another run, with another {', '.join(odd) or 'setting'}")
    if set(files) != {COMMON, *(_name(worker) for worker in range(run["workers"]))}:
        raise ValueError("its list of files is not that of its workers")
    for name, (size, digest) in files.items():
        file = directory / name
        if file.stat().st_size != size:
            raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {size}")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise ValueError(f"{name} is damaged")
    return Checkpoint(directory, progress)


def _directories(folder: Path) -> list[Path]:
    """Complete checkpoints, the latest first."""
    found = (p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".part")
    return sorted(found, reverse=True)


def _name(worker: int) -> str:
    return f"worker-{worker:05}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to the disk, then a receipt: size and SHA-256 of the file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    write_atomically(file.with_name(f"{file.name}.json"), json.dumps([file.stat().st_size, digest]))


def _run(result: Future[None], work: Callable[..., None], *args: Any) -> None:
    try:
        result.set_result(work(*args))
    except BaseException as error:
        result.set_exception(error)


def _sync(directory: Path) -> None:
    """Have the entries of a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(saved: dict[str, Tensor], views: dict[str, Tensor]) -> None:
    if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in views.items()}:
        raise UserError("the checkpoint holds other tensors than this model and optimizer")
    for name, view in views.items():
        view.copy_(saved[name])
