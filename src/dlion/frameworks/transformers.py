"""The Trainer of transformers: checkpoints with every worker's state."""

import shutil
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dlion.frameworks import WorkerFiles, ours, silence
from dlion.frameworks.accelerate import accumulates


class KeepWorkers(TrainerCallback):
    """Let a Trainer save and load every worker's state, in files of its checkpoint folders.

    DistributedDataParallel, in which the Trainer wraps the model, sends no gradients any more::

        trainer = Trainer(..., callbacks=[KeepWorkers()])
        trainer.train(resume_from_checkpoint=True)

    Earlier checkpoints that ``save_total_limit`` does not allow are removed here, once the files of
    all workers are there: during training the Trainer's own arguments show no such limit.

    A resumed run whose checkpoint has no optimizer state at all (``save_only_model``) is warned of.

    Raises:
        ValueError: where training begins, if the workers' own state is not found.

    Args:
        resume_from: the folder given to ``trainer.train(resume_from_checkpoint=...)``, where that
            is not in ``output_dir``, nor ``TrainingArguments.resume_from_checkpoint``.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = resume_from
        self._limit: int | None = None
        self._files: WorkerFiles | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Silence DistributedDataParallel; read the workers' state of a resumed run."""
        for one in ours([optimizer]):
            self._files = WorkerFiles(one)
            one.schedule.accumulates = accumulates
            silence(one)
            if state.global_step and not one.param_groups[0]["steps"]:
                warnings.warn(
                    f"the checkpoint of step {state.global_step} has no optimizer state"
                    " (save_only_model=True): parameters continue, momenta begin at zero",
                    stacklevel=2,
                )
            if not args.save_only_model and args.save_total_limit is not None:
                self._limit, args.save_total_limit = args.save_total_limit, None
            if self._files.awaited:
                told = [self.resume_from, args.resume_from_checkpoint]
                folders = [Path(path) for path in told if isinstance(path, str | Path)]
                folder = (folders or [_folder(args, state)])[0]
                if not folder.exists():
                    raise ValueError(
                        f"the workers' own state is not in {folder}: name the folder that the run"
                        " resumes from, KeepWorkers(resume_from=DIR)"
                    )
                self._files.load(folder)

    def on_save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Write each worker's state into the checkpoint that was just saved."""
        for one in ours([] if args.save_only_model else [optimizer]):
            folder = _folder(args, state)
            self._files.save(folder)
            if self._limit is not None:
                one.channel.barrier()  # all have written theirs
                if args.should_save:
                    _rotate(folder, self._limit, state.best_model_checkpoint)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the limit back; of one checkpoint alone the best one remains, as in the Trainer."""
        if self._limit is not None:
            args.save_total_limit, self._limit = self._limit, None
            best = state.best_model_checkpoint
            if args.should_save and args.save_total_limit == 1 and best is not None:
                _rotate(Path(best), 1, best)


def _folder(args: Any, state: Any) -> Path:
    name, root = f"checkpoint-{state.global_step}", Path(args.output_dir)
    if not state.is_hyper_param_search:
        return root / name
    trials = [*root.glob(f"*/{name}")]  # the Trainer does not say which is of this trial
    return max(trials, key=lambda folder: folder.stat().st_mtime)


def _rotate(newest: Path, limit: int, best: str | None) -> None:
    """Remove the oldest checkpoints beside the newest, until there are no more than ``limit``."""
    kept = {newest, Path(best or newest)}
    others = [path for path in newest.parent.glob("checkpoint-*") if path not in kept]
    others.sort(key=lambda path: (path.stat().st_mtime, len(path.name), path.name))
    for path in others[: max(0, len(others) + len(kept) - max(limit, len(kept)))]:
        shutil.rmtree(path, ignore_errors=True)
