"""Output directory of a run, the checkpoint to resume from, and the command that resumes it."""

import glob
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dlion.errors import UserError
from dlion.suite.files import remove_unfinished, write_atomically
from dlion.suite.inside import read
from dlion.suite.launch.environment import detect, is_first, job_name, restarted
from dlion.suite.locks import holding, is_held
from dlion.suite.record.runs import (
    CONFIG,
    METRICS,
    SUMMARY,
    Run,
    check_own,
    holds_run,
    load_run,
    read_rows,
)
from dlion.suite.terminal import in_one_line, printable
from dlion.suite.training.checkpoint import (
    Checkpoint,
    as_before,
    differences,
    find,
    has_checkpoint,
    identity,
    in_words,
    last_saved,
    saved_identity,
)
from dlion.suite.training.schedule import share_of_rate

_LOCK = ".lock"
_JOB = ".hydra/torchrun.txt"
_PATIENCE = 1.0  # seconds that the processes of a killed launcher may take to end


@contextmanager
def alone_in(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of a directory; it is made, and removed at the end if nothing is in it.

    The first process of a run holds it, and so do those that it forks. :mod:`dlion.suite.locks`
    says what that is worth on network file systems.

    Raises:
        UserError: if another run is in there, or nothing can be written there.
    """
    with ExitStack() as stack:
        with _named_if_not_writable("output_dir", output_dir):
            made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
        stack.callback(_remove_empty, made)
        with _named_if_not_writable("output_dir", output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
            check_own(output_dir)
            stack.enter_context(holding(output_dir / _LOCK, _PATIENCE))
            remove_unfinished(output_dir)
        yield


def check_place(output_dir: Path, sweep: Path | None) -> None:
    """Refuse links in the directory of a run and, if it is of a sweep, on the way there.

    Raises:
        UserError: naming the first.
    """
    if sweep is not None:
        name = os.path.relpath(output_dir, sweep)
        check_own(sweep, [name], below=False)
    check_own(output_dir)


def make_sweep_dir(directory: Path) -> None:
    """Make the directory of a sweep, and try whether files can be written there.

    Raises:
        UserError: if not.
    """
    with _named_if_not_writable("hydra.sweep.dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        check_own(directory, ("multirun.yaml", ".submitit"))
        tempfile.TemporaryFile(dir=directory).close()


@contextmanager
def _named_if_not_writable(setting: str, directory: Path) -> Iterator[None]:
    try:
        for path in (directory, *directory.parents):
            if path.is_symlink() and not path.exists():
                raise UserError(
                    f"{setting}={directory}: {path} is a link to {path.readlink()}, which is not"
                    " there: make that folder, or remove the link"
                )
        yield
    except BlockingIOError:
        raise UserError(
            f"{directory} is in use by another run: wait for its end, or choose another directory"
            f" with {setting}=DIR"
        ) from None
    except OSError as error:
        raise UserError(
            f"{setting}={directory} is not writable ({error.strerror}): choose another directory"
            f" with {setting}=DIR"
        ) from error


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):  # not empty, or gone
        for path in directories:
            path.rmdir()


def check_output(config: DictConfig, output_dir: Path) -> None:
    """Refuse to write over another run.

    Raises:
        UserError: if the directory holds one.
    """
    if resuming(config, output_dir) != "auto" and holds_run(output_dir):
        raise UserError(
            f"{output_dir} holds another run: choose another directory with output_dir=DIR, or type"
            " resume=auto to resume it"
        )


def holds_another(config: DictConfig, output_dir: Path) -> bool:
    """Whether the directory holds a run that is finished, is running, or is not to be continued."""
    if resuming(config, output_dir) == "auto":
        another = (output_dir / SUMMARY).exists()
    else:
        another = holds_run(output_dir)
    return another or in_use(output_dir)


def in_use(output_dir: Path) -> bool:
    """Whether a run is in a directory now."""
    return is_held(output_dir / _LOCK)


def resuming(config: DictConfig, output_dir: Path) -> str | None:
    """Return ``resume``, or ``auto`` for a run that SLURM or torchrun has started again."""
    there = holds_run(output_dir)
    if (restarted() and (config.resume is None or there)) or (there and _of_this_job(output_dir)):
        return "auto"
    return config.resume


def note_job(output_dir: Path) -> None:
    """Write down which of torchrun's jobs a run is of, for the job's later attempts."""
    if (name := job_name()) is not None:
        write_atomically(output_dir / _JOB, name)


def _of_this_job(output_dir: Path) -> bool:
    return (read(output_dir, _JOB) or b"").decode(errors="replace") == job_name()


def choose_output_dir(config: DictConfig, settings: DictConfig) -> Path:
    """Return the directory of a single run.

    Where ``resume=auto`` is typed and no directory, it is that of the newest unfinished run of the
    same settings.

    Args:
        config: what Hydra composed, in which ``output_dir`` may refer to the time.
        settings: made of it, without such references.

    Raises:
        UserError: if the run does not exist, or its processes could find different ones.
    """
    template = OmegaConf.to_container(config, resolve=False)["output_dir"]
    if settings.resume != "auto" or settings.evaluate is not None or "${now:" not in template:
        return Path(settings.output_dir)
    if detect() is not None:
        raise UserError(
            "resume=auto needs the run's directory where torchrun or SLURM starts the processes:"
            " type output_dir=DIR"
        )
    top, _, below = template.partition("${now:")
    top = OmegaConf.merge(config, {"output_dir": top}).output_dir  # other settings may stand in it
    wanted = identity(settings)
    folder, _, prefix = top.rpartition("/")
    depth = below.count("/")
    places = Path(folder or ".").glob(f"{glob.escape(prefix)}*" + depth * "/*")
    saved = {path: of for path in places if (of := saved_identity(path)) is not None}
    latest = sorted(saved, key=last_saved)
    runs = [path for path in latest if saved[path] == wanted]
    for path in reversed(runs):
        if not (path / SUMMARY).exists() and not in_use(path):
            print(printable(f"going on with {path}, the newest unfinished run of these settings"))
            return path
    others = ""
    if runs:
        others = f" ({runs[-1]} {'is in use' if in_use(runs[-1]) else 'is finished'})"
    elif latest:
        others = f" (in {latest[-1]}, {in_words(differences(wanted, saved[latest[-1]]), 'there')})"
    raise UserError(
        f"resume=auto finds no unfinished run of these settings with a checkpoint in {top}{others}:"
        " type output_dir=DIR for a run elsewhere, or start again without resume=auto"
    )


def resume_command(output_dir: Path, sweep: Path | None = None) -> str | None:
    """Return the command that resumes a run, or its sweep; None: nothing was saved.

    It is what was typed with the directory and ``resume=auto``, quoted for a shell. What torchrun
    or SLURM was given is not known here.
    """
    if sweep is None and not has_checkpoint(output_dir):
        return None
    key = "output_dir=" if sweep is None else "hydra.sweep.dir="
    resumes = [f"{key}{sweep or output_dir}", "resume=auto"]
    if detect() is not None:
        return f"the same command with {shlex.join(resumes)}"
    typed = [word for word in sys.argv[1:] if not word.startswith("resume=")]
    if any(word.startswith(key) and "${" not in word for word in typed):
        resumes = resumes[1:]  # the directory as it was typed, with Hydra's own quotes
    else:
        typed = [word for word in typed if not word.startswith(key)]
    return shlex.join([sys.orig_argv[0], sys.argv[0], *typed, *resumes])


def finished_run(config: DictConfig, output_dir: Path) -> Run | None:
    """Return the finished run in a directory; None if there is something left to do.

    Raises:
        UserError: if it had other settings, or its summary is damaged.
    """
    run = load_run(output_dir)
    if run.summary is None:
        return None
    if different := _different(config, run):
        raise UserError(
            f"{output_dir} is finished, with other settings ({in_words(different)}):"
            f" {as_before(different)}, or choose another directory with output_dir=DIR"
        )
    if config.steps is None:
        recorded = run.config or {}
        more = (recorded.get("steps"), recorded.get("epochs")) != (None, config.epochs)
    else:
        more = config.steps != run.summary.get("steps")
    if {"test_accuracy", "test_loss"} - set(run.summary):
        raise UserError(
            f"{output_dir / SUMMARY} is damaged (it lacks the result): copy it again; or remove it"
            " and the newest folder in checkpoint, and resume=auto resumes from the one before"
        )
    if not more and is_first():
        print(f"{output_dir} is finished; nothing is left to do")
    return None if more else run


def result_of(run: Run) -> float | None:
    """Return the test accuracy of a finished run or, without one, the test loss."""
    assert run.summary is not None
    accuracy, loss = run.summary["test_accuracy"], run.summary["test_loss"]
    return loss if accuracy is None else accuracy


def _different(config: DictConfig, run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the settings that decide about a run and differ from those of a recorded one.

    Raises:
        UserError: if those are damaged.
    """
    if run.config is None:
        return {}
    now = identity(config)
    try:
        return differences(now, identity(run.config))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{run.directory / CONFIG} is damaged: choose another directory with output_dir=DIR"
        ) from error


def latest_checkpoint(
    config: DictConfig, directory: Path, hashed: bool = True
) -> Checkpoint | None:
    """Return the latest usable checkpoint, and print which later ones cannot be used.

    ``hashed``: as for :func:`dlion.suite.training.checkpoint.find`.
    """
    checkpoint, complaints = find(directory, identity(config), hashed)
    for complaint in complaints if is_first() else ():
        print(in_one_line(f"left out: {complaint}"), file=sys.stderr)
    return checkpoint


def checkpoint_to_resume(config: DictConfig, output_dir: Path, steps: int) -> Checkpoint | None:
    """Return the checkpoint to start from; None: start at step 0.

    Of several processes only the first reads all files to the last byte, and the others resume
    from what it has chosen (:func:`dlion.suite.launch.runner.work`).

    Raises:
        UserError: if there is none where one must be, or it cannot lead to so many steps.
    """
    source = resuming(config, output_dir)
    if source is None:
        return None
    directory = output_dir if source == "auto" else Path(source).expanduser()
    checkpoint = latest_checkpoint(config, directory, hashed=is_first())
    if checkpoint is not None and checkpoint.progress.step >= steps:  # unless it is damaged
        checkpoint = latest_checkpoint(config, directory)
    if checkpoint is None:
        if source != "auto":
            raise UserError(f"resume={config.resume} holds no checkpoint: give a run's directory")
        if holds_run(output_dir) and (different := _different(config, load_run(output_dir))):
            raise UserError(
                f"{output_dir} holds a run without a checkpoint, with other settings"
                f" ({in_words(different)}): choose another directory with output_dir=DIR"
            )
        if is_first():
            print(f"nothing to resume in {output_dir}: starting at step 0", flush=True)
        return None
    if checkpoint.progress.step >= steps:
        raise UserError(
            f"{checkpoint.directory} is after step {checkpoint.progress.step}, nothing is left of"
            f" {steps} steps: type steps=N with more"
        )
    _check_schedule(config, checkpoint, steps)
    _check_round(config, checkpoint)
    if source == "auto" and is_first():
        _note_missing_rows(output_dir, checkpoint.progress.last_row)
    return checkpoint


def _check_schedule(config: DictConfig, checkpoint: Checkpoint, steps: int) -> None:
    """Refuse another number of steps if the learning rate would have been another one so far."""
    planned, now = (share_of_rate(config.schedule, n) for n in (checkpoint.steps, steps))
    if any(planned(step) != now(step) for step in range(checkpoint.progress.step)):
        raise UserError(
            f"{checkpoint.directory} is of a run of {checkpoint.steps} steps, and the schedule of"
            f" {steps} has other learning rates from the beginning: type"
            f" steps={checkpoint.steps} (schedule=constant can be extended)"
        )


def _check_round(config: DictConfig, checkpoint: Checkpoint) -> None:
    """Refuse to extend a run whose end has cut a round of local steps short."""
    turns, done = config.optimizer.get("local_steps", 1), checkpoint.progress.step
    if done == checkpoint.steps and done % turns:
        raise UserError(
            f"{checkpoint.directory} is of a run whose last round of optimizer.local_steps={turns}"
            f" was cut short after step {done}, unlike in a longer run: start again with"
            " another output_dir"
        )


def _note_missing_rows(output_dir: Path, last_row: int) -> None:
    rows, _ = read_rows(output_dir)
    latest = max((row["step"] for row in rows), default=0)
    if latest < last_row:
        print(
            f"warning: {output_dir / METRICS} has lost the rows after step {latest}, up to that of"
            f" step {last_row}",
            file=sys.stderr,
        )
