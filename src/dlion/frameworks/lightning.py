"""Lightning: checkpoints with every worker's state."""

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from dlion.frameworks import WorkerFiles, ours


class KeepWorkers(DDPStrategy):
    """``ddp`` that sends no gradients, and keeps every worker's state beside each checkpoint.

    The files of ``x.ckpt`` are in the folder ``x.ckpt.workers``, and are removed with it::

        trainer = lightning.Trainer(strategy=KeepWorkers(), devices=2)
        trainer.fit(module, data, ckpt_path="x.ckpt")
    """

    _loads: Path | None = None

    def configure_ddp(self) -> None:
        """Wrap the model in a DistributedDataParallel that sends no gradients."""
        super().configure_ddp()
        self.model.register_comm_hook(None, noop_hook)

    def setup_optimizers(self, trainer: Any) -> None:
        """Set optimizers up whose workers' state is apart.

        Raises:
            ValueError: if none is of this library.
        """
        super().setup_optimizers(trainer)
        self._files: list[WorkerFiles] = []
        if self.optimizers and not ours(self.optimizers):
            raise ValueError(
                "KeepWorkers sends no gradients, and no optimizer is one of dlion's, so each"
                ' process would train alone: take strategy="ddp"'
            )
        for optimizer in ours(self.optimizers):
            if getattr(self.precision_plugin, "scaler", None) is None:
                optimizer._step_supports_amp_scaling = False  # or no gradient may be clipped
            self._files.append(WorkerFiles(optimizer))
            optimizer.schedule.accumulates = lambda: (
                not getattr(self.model, "require_backward_grad_sync", True)
            )

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write each worker's state beside the file, on every process."""
        if "optimizer_states" in checkpoint:
            for index, files in enumerate(self._files):
                files.save(_beside(filepath), f"optimizer_{index}")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Remember which file's neighbours are to be read."""
        self._loads = _beside(Path(checkpoint_path).resolve())  # last.ckpt may be a link
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Read each worker's state too."""
        super().load_optimizer_state_dict(checkpoint)
        for index, files in enumerate(self._files):
            if self._loads is not None and files.awaited:
                files.load(self._loads, f"optimizer_{index}")

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the workers' files too."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)


def _beside(filepath: Any) -> Path:
    return Path(f"{filepath}.workers")
