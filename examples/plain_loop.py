"""Distributed Lion in a plain PyTorch loop: no DistributedDataParallel, no Hydra.

pip install .
torchrun --nproc_per_node=4 examples/plain_loop.py
"""

import os
import sys

import torch
import torch.distributed as dist

import dlion

if "RANK" not in os.environ:
    print("error: type torchrun --nproc_per_node=4 examples/plain_loop.py", file=sys.stderr)
    sys.exit(2)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

draws = torch.Generator().manual_seed(0)  # points around ten centres, which are the classes
centres, y = torch.randn(10, 64, generator=draws), torch.randint(10, (5000,), generator=draws)
x = centres[y] + 2 * torch.randn(5000, 64, generator=draws)
train_x, train_y = x[rank:4000:world], y[rank:4000:world]  # every worker has its own data

model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = dlion.DLion(model.named_parameters(), lr=1e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)

for _ in range(300):
    batch = torch.randint(len(train_x), (32,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
    optimizer.step()
    schedule.step()

accuracy = (model(x[4000:]).argmax(1) == y[4000:]).float().mean().item()
if rank == 0:
    sent = optimizer.channel.traffic.sent_bytes / 300
    print(f"accuracy {accuracy:.1%}, {sent / 1000:.1f} kB sent a step")
dist.barrier()
dist.destroy_process_group()
