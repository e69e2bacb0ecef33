"""Distributed Lion in Lightning's Trainer.

pip install . lightning
torchrun --nproc_per_node=2 examples/lightning_trainer.py

With a folder behind it, each epoch ends with a checkpoint there, and a run resumes from it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import BytesSent, make_data, make_model, report
from torch.utils.data import DataLoader

from dlion.optim import DLion

try:
    import lightning

    from dlion.frameworks.lightning import KeepWorkers
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed: type pip install . lightning")


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DLion(self.parameters(), lr=3e-3)


class Count(lightning.Callback):
    """Counts what a step of training sends, for the report alone."""

    def on_train_batch_start(self, *_) -> None:
        sent.start()

    def on_train_batch_end(self, *_) -> None:
        sent.stop()


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
checkpoints = folder and lightning.pytorch.callbacks.ModelCheckpoint(
    folder, "{epoch}", save_top_k=-1
)
last = max(folder.glob("*.ckpt"), default=None) if folder else None
sent = BytesSent()
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy=KeepWorkers(),  # DistributedDataParallel sends nothing
    callbacks=[Count(), *([checkpoints] if checkpoints else [])],
    logger=False,
    default_root_dir=folder,
    enable_checkpointing=bool(folder),
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(make_data(), batch_size=32, shuffle=True), ckpt_path=last)
report(model.net, sent.count)
dist.destroy_process_group()
