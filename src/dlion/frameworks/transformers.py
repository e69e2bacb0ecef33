"""The Trainer of transformers: checkpoints with every worker's state."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dlion.frameworks import ours, silence


class KeepWorkers(TrainerCallback):
    """Let a Trainer save and load every worker's state, in files of its checkpoint folders.

    DistributedDataParallel, in which the Trainer wraps the model, sends no gradients any more::

        trainer = Trainer(..., callbacks=[KeepWorkers()])
        trainer.train(resume_from_checkpoint=True)

    Args:
        resume_from: the folder given to ``trainer.train(resume_from_checkpoint=...)``, where that
            is not in ``output_dir``, nor ``TrainingArguments.resume_from_checkpoint``.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = resume_from

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Silence DistributedDataParallel; read the workers' state of a resumed run."""
        for one in ours([optimizer]):
            one.workers_apart = True
            silence(one)
            if one._awaits is not None:
                told = [self.resume_from, args.resume_from_checkpoint]
                folders = [Path(path) for path in told if isinstance(path, str | Path)]
                one.load_workers((folders or [_folder(args, state)])[0])

    def on_save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Write each worker's state into the checkpoint that was just saved."""
        for one in ours([] if args.save_only_model else [optimizer]):
            one.save_workers(_folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
