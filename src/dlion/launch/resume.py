"""Where a run may be recorded, and the checkpoint that it goes on from."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from dlion.errors import UserError
from dlion.launch.environment import restarted
from dlion.record.runs import holds_run
from dlion.training.checkpoint import Checkpoint, find, identity


def check_output(config: DictConfig, output_dir: Path) -> None:
    """Refuse to write over another run.

    Raises:
        UserError: if the directory holds one.
    """
    if holds_another(config, output_dir):
        raise UserError(
            f"{output_dir} holds another run: choose another directory with output_dir=DIR, or type"
            " resume=auto to go on with it"
        )


def holds_another(config: DictConfig, output_dir: Path) -> bool:
    """Whether the directory holds a run that this one does not continue."""
    return resuming(config, output_dir) != "auto" and holds_run(output_dir)


def resuming(config: DictConfig, output_dir: Path) -> str | None:
    """Return ``resume``, or ``auto`` for a run that SLURM or torchrun has started again."""
    if restarted() and (config.resume is None or holds_run(output_dir)):
        return "auto"
    return config.resume


def latest_checkpoint(config: DictConfig, directory: Path) -> Checkpoint | None:
    """Return the latest usable checkpoint, and print which later ones cannot be used."""
    checkpoint, complaints = find(directory, identity(config))
    for complaint in complaints:
        print(f"left out: {complaint}", file=sys.stderr)
    return checkpoint


def checkpoint_to_resume(config: DictConfig, output_dir: Path, steps: int) -> Checkpoint | None:
    """Return the checkpoint to start from; None: start at step 0."""
    source = resuming(config, output_dir)
    if source is None:
        return None
    directory = output_dir if source == "auto" else Path(source).expanduser()
    checkpoint = latest_checkpoint(config, directory)
    if checkpoint is None and source != "auto":
        raise UserError(f"resume={config.resume} holds no checkpoint: give a run's directory")
    if checkpoint is not None and checkpoint.progress.step >= steps:
        raise UserError(
            f"{checkpoint.directory} is after step {checkpoint.progress.step}, nothing is left of"
            f" {steps} steps: type steps=N with more"
        )
    return checkpoint
