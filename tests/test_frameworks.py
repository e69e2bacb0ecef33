"""What checkpoints of frameworks are called, and who can read them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlion.optim import DLion
from dlion.suite.data.torchvision_ops import declare_missing_operators
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group

pytestmark = pytest.mark.slow


def lightning_trainer(**settings: Any) -> Any:
    """A trainer of one process that keeps workers, and says nothing."""
    import lightning

    from dlion.frameworks.lightning import KeepWorkers

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=KeepWorkers(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def lightning_runs(folder: str) -> list[list[float]]:
    """Parameters and momenta after three epochs, and after two and one from ``last.ckpt``."""
    declare_missing_operators()
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

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
        trainer = lightning_trainer(
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_last="link")],
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


def finetuned(folder: str) -> list[list[float]]:
    """Parameters after three epochs, the last of them with a group more, and after two and one."""
    declare_missing_operators()
    import lightning
    from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.head(self.body(batch)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return DLion([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: Model) -> None:
            self.freeze(pl_module.body)

        def on_fit_start(self, trainer: lightning.Trainer, pl_module: Model) -> None:
            if trainer.ckpt_path:  # Lightning restores the groups, and leaves the body frozen
                self.make_trainable(pl_module.body)
            super().on_fit_start(trainer, pl_module)

        def finetune_function(self, pl_module: Model, epoch: int, optimizer: DLion) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=1e-3)

    def fit(from_file: str | None = None) -> list[float]:
        trainer = lightning_trainer(
            max_epochs=3,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1), Unfreeze()],
        )
        model, samples = Model(), torch.arange(24.0).view(8, 3).sin()
        trainer.fit(model, torch.utils.data.DataLoader(samples, 2), ckpt_path=from_file)
        return torch.cat([param.flatten() for param in model.parameters()]).tolist()

    os.environ["WORLD_SIZE"] = "1"
    ends = [fit(), fit(f"{folder}/epoch=1.ckpt")]
    dist.destroy_process_group()
    return ends


def test_lightning_resumes_after_a_group_was_unfrozen_and_added(tmp_path):
    whole, resumed = run_processes(1, finetuned, str(tmp_path / "run"))
    assert whole == resumed


def lightning_refusals() -> list[str]:
    """What it says: to clipping under autocast, and to an optimizer that is not ours."""
    declare_missing_operators()
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self, made: type[torch.optim.Optimizer]) -> None:
            super().__init__()
            self.layer, self.made = torch.nn.Linear(3, 2), made

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made(self.parameters(), lr=1e-2)

    def fit(made: type[torch.optim.Optimizer]) -> str:
        trainer = lightning_trainer(
            max_steps=2,
            precision="bf16-mixed",
            gradient_clip_val=0.5,
            enable_checkpointing=False,
        )
        try:
            trainer.fit(Model(made), torch.utils.data.DataLoader(torch.ones(8, 3), 2))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "trained"

    os.environ["WORLD_SIZE"] = "1"
    said = [fit(DLion), fit(torch.optim.AdamW)]
    dist.destroy_process_group()
    return said


def test_lightning_clips_under_autocast_and_refuses_what_would_train_alone():
    clipped, foreign = run_processes(1, lightning_refusals)
    assert clipped == "trained"
    assert "each process would train alone" in foreign


def test_the_last_checkpoint_of_lightning_may_be_a_link(tmp_path):
    whole, resumed = run_processes(1, lightning_runs, str(tmp_path / "run"))
    assert whole == resumed


def trainer_runs(root: str) -> tuple[list[list[float]], list[str], str]:
    """Ends of a run and of one that resumed; what a run that broke off leaves; a refusal."""
    declare_missing_operators()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dlion.frameworks.transformers import KeepWorkers

    join_process_group("gloo", 60)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # accelerate asks for them
    samples = torch.arange(192.0).view(64, 3).sin()
    data = [{"x": x, "labels": x[:1]} for x in samples]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    class BreakOff(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.run_name == "breaks" and state.global_step == 4:
                raise RuntimeError("broken off")

    def train(
        folder: str,
        breaks: bool = False,
        resume: str | None = None,
        overlap: bool = False,
        model_alone: bool = False,
    ) -> list[float]:
        arguments = TrainingArguments(
            output_dir=f"{root}/{folder}",
            run_name="breaks" if breaks else "goes on",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0,
            max_steps=6,
            save_steps=2,
            save_total_limit=1,
            save_only_model=model_alone,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        model = Model()
        optimizer = DLion(model.parameters(), lr=1e-2, overlap=overlap)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data,
            optimizers=(optimizer, schedule),
            callbacks=[BreakOff(), KeepWorkers()],
        )
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            trainer.model_wrapped = model
            trainer.accelerator.free_memory()
        momenta = [optimizer.state[param]["momentum"] for param in model.parameters()]
        return torch.cat([each.flatten() for each in (*model.parameters(), *momenta)]).tolist()

    ends = [train("straight")]
    with pytest.raises(RuntimeError, match="broken off"):
        train("broken", breaks=True)
    left = sorted(path.name for path in Path(root, "broken").iterdir())
    with pytest.raises(ValueError) as refused:
        train("broken", resume=f"{root}/broken/checkpoint-4")
    ends.append(train("broken", resume=f"{root}/broken/checkpoint-2", overlap=True))
    train("bare", model_alone=True)
    with pytest.warns(UserWarning, match="step 6 has no optimizer state"):
        train("bare", resume=f"{root}/bare/checkpoint-6")
    dist.destroy_process_group()
    return ends, left, str(refused.value)


def test_the_trainer_removes_no_checkpoint_before_the_next_is_whole(tmp_path):
    """It resumes to the bit, and with overlap and accumulation too."""
    (straight, resumed), left, refusal = run_processes(2, trainer_runs, str(tmp_path))
    assert straight == resumed
    assert left == ["checkpoint-2", "checkpoint-4"]
    assert refusal.endswith(
        f"resume from another checkpoint, such as {tmp_path}/broken/checkpoint-2"
    )
    for folder in ("straight", "broken"):
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["checkpoint-6"]
