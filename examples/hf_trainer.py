"""SignMuon in the Trainer of transformers.

pip install . 'transformers[torch]'
torchrun --nproc_per_node=2 examples/hf_trainer.py

With a folder behind it, each epoch ends with a checkpoint there, and a run resumes from it.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common import BytesSent, make_data, make_model, report

import dlion

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from dlion.frameworks.transformers import KeepWorkers
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed: type pip install . 'transformers[torch]'")


class Classifier(torch.nn.Module):
    """A model as Trainer wants it, which computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}


class Count(TrainerCallback):
    """Counts what a step of training sends, for the report alone."""

    def on_step_begin(self, *_, **__) -> None:
        sent.start()

    def on_step_end(self, *_, **__) -> None:
        sent.stop()


folder = sys.argv[1] if len(sys.argv) > 1 else None
sent = BytesSent()
model = Classifier()
arguments = TrainingArguments(
    output_dir=folder or tempfile.mkdtemp(),
    per_device_train_batch_size=32,
    num_train_epochs=2,
    ddp_find_unused_parameters=False,  # or each step sends which are used
    use_cpu=True,
    save_strategy="epoch" if folder else "no",
    report_to="none",
    disable_tqdm=True,
)
dist.is_initialized() or dist.init_process_group("gloo")
optimizer = dlion.SignMuon(dlion.param_groups(model), lr=1e-2)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
data = [{"x": x, "labels": y} for x, y in make_data()]
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    optimizers=(optimizer, schedule),
    callbacks=[KeepWorkers(), Count()],  # DistributedDataParallel sends nothing
)
last = get_last_checkpoint(folder) if folder and Path(folder).exists() else None
trainer.train(resume_from_checkpoint=last)
report(model.net, sent.count)
# a DistributedDataParallel keeps gloo's threads, which can abort Python as it ends
trainer.model_wrapped = model
trainer.accelerator.free_memory()
dist.destroy_process_group()
