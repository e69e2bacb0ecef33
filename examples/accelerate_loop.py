"""Distributed Lion with Hugging Face accelerate.

torchrun --nproc_per_node=2 examples/accelerate_loop.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from common import bytes_sent, make_data, make_model, report
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader

from dlion.optim import DLion

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = DLion(model.parameters(), lr=3e-3)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)

model, prepared, loader = accelerator.prepare(model, optimizer, loader)
model.register_comm_hook(None, noop_hook)  # accelerate insists on DistributedDataParallel


def step(x: torch.Tensor, y: torch.Tensor) -> None:
    prepared.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    prepared.step()


for _ in range(2):
    for x, y in loader:
        step(x, y)
report(model, bytes_sent(lambda: step(x, y)))
# a DistributedDataParallel keeps gloo's threads, which can abort Python as it ends
model, prepared, loader = accelerator.free_memory(model, prepared, loader)
dist.destroy_process_group()
