"""What checkpoints of frameworks are called, and who can read them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlion.optim import DLion
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.launch.local import run_processes

pytestmark = pytest.mark.slow


def lightning_runs(folder: str) -> list[list[float]]:
    """Parameters and momenta after three epochs, and after two and one from ``last.ckpt``."""
    declare_missing_operators()
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dlion.frameworks.lightning import KeepWorkers

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 2)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return DLion(self.parameters(), lr=1e-2)

    def fit(epochs: int, last: str | None = None) -> list[float]:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            strategy=KeepWorkers(),
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_last="link")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model, samples = Model(), torch.arange(24.0).view(8, 3).sin()
        trainer.fit(model, torch.utils.data.DataLoader(samples, 2), ckpt_path=last)
        (optimizer,) = trainer.optimizers
        momenta = [optimizer.state[param]["momentum"] for param in model.parameters()]
        return torch.cat([each.flatten() for each in (*model.parameters(), *momenta)]).tolist()

    os.environ["WORLD_SIZE"] = "1"
    whole = fit(3)
    shutil.rmtree(folder)
    fit(2)
    assert Path(folder, "last.ckpt").is_symlink()
    ends = [whole, fit(3, "last")]
    Model.load_from_checkpoint(next(Path(folder).glob("epoch=*.ckpt")))  # as it reads by default
    dist.destroy_process_group()
    return ends


def test_the_last_checkpoint_of_lightning_may_be_a_link(tmp_path):
    whole, resumed = run_processes(1, lightning_runs, str(tmp_path / "run"))
    assert whole == resumed
