"""Distributed Lion with Hugging Face accelerate.

pip install . accelerate
torchrun --nproc_per_node=2 examples/accelerate_loop.py

With a folder behind it, each epoch ends with a checkpoint there, and a run resumes from it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import bytes_sent, make_data, make_model, report
from torch.utils.data import DataLoader

from dlion.optim import DLion

try:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from dlion.frameworks.accelerate import keep_workers
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed: type pip install . accelerate")

# the order of samples depends on seed and epoch alone, so that a resumed run has the same
sampling = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
accelerator = Accelerator(cpu=True, dataloader_config=sampling)
model = make_model().to(accelerator.device)  # before the optimizer is made
optimizer = DLion(model.parameters(), lr=3e-3)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)

model, prepared, loader = accelerator.prepare(model, optimizer, loader)
keep_workers(accelerator)  # its checkpoints hold every worker's state; gradients are not averaged


def step(x: torch.Tensor, y: torch.Tensor) -> None:
    prepared.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    prepared.step()


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
done = len([*folder.glob("epoch*")]) if folder else 0
if done:
    accelerator.load_state(str(folder / f"epoch{done}"))
for epoch in range(done, 2):
    loader.set_epoch(epoch)
    for x, y in loader:
        step(x, y)
    if folder:
        accelerator.save_state(str(folder / f"epoch{epoch + 1}"))
x, y = next(iter(loader))
report(model, bytes_sent(lambda: step(x, y)))
# a DistributedDataParallel keeps gloo's threads, which can abort Python as it ends
model, prepared, loader = accelerator.free_memory(model, prepared, loader)
dist.destroy_process_group()
