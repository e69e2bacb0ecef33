"""Hugging Face accelerate: save_state() and load_state() with every worker's state."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import GradientState

from dlion.frameworks import WorkerFiles, ours, silence


def accumulates() -> bool:
    """Whether the backward pass at hand only accumulates gradients, in accelerate or a Trainer."""
    return not GradientState().sync_gradients


def keep_workers(accelerator: Accelerator) -> None:
    """Let an Accelerator save and load every worker's state; call it after ``prepare()``.

    ``save_state(DIR)`` then writes a file for each worker into DIR, and ``load_state(DIR)`` reads
    them, on any number of processes that host as many workers. DistributedDataParallel, in which
    ``prepare()`` wraps models, sends no gradients any more::

        optimizer = DLion(model.to(accelerator.device).parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        keep_workers(accelerator)

    Raises:
        ValueError: if no optimizer of this library has been prepared.
    """
    if not ours(accelerator._optimizers):
        raise ValueError(
            "keep_workers() found no optimizer of dlion: call it after accelerator.prepare()"
        )
    kept = []
    for optimizer in ours(accelerator._optimizers):
        kept.append(WorkerFiles(optimizer))
        optimizer.schedule.accumulates = accumulates
        silence(optimizer)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for index, files in enumerate(kept):
            files.save(Path(folder), f"optimizer_{index}")

    def load(models: list[Any], folder: str) -> None:
        for index, files in enumerate(kept):
            files.load(Path(folder), f"optimizer_{index}")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
