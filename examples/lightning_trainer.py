"""Distributed Lion in Lightning's Trainer.

torchrun --nproc_per_node=2 examples/lightning_trainer.py
"""

import lightning
import torch
import torch.distributed as dist
from common import BytesSent, make_data, make_model, report
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader

from dlion.optim import DLion


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning has wrapped the model in DistributedDataParallel, which is to send nothing
        self.trainer.strategy.model.register_comm_hook(None, noop_hook)
        return DLion(self.parameters(), lr=3e-3)


class Count(lightning.Callback):
    """Counts what a step of training sends, for the report alone."""

    def on_train_batch_start(self, *_) -> None:
        sent.start()

    def on_train_batch_end(self, *_) -> None:
        sent.stop()


sent = BytesSent()
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    callbacks=[Count()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(make_data(), batch_size=32, shuffle=True))
report(model.net, sent.count)
dist.destroy_process_group()
