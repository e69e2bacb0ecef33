"""Distributed Lion between replicas of a model that FSDP2 shards: 2 nodes of 2 processes.

pip install .
torchrun --nproc_per_node=4 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from common import backward, bytes_sent, make_data, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlion.optim import DLion

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = make_model()
fully_shard(model, mesh=mesh["shard"])  # averages gradients between the two processes of a node
optimizer = DLion(model.parameters(), lr=3e-3, mesh=mesh["replicate"])  # votes between nodes

x, y = make_data().tensors
x, y = x[dist.get_rank() :: 4], y[dist.get_rank() :: 4]


def step() -> None:
    batch = torch.randint(len(x), (32,))
    loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(200):
    step()

fsdp, hsdp = make_model(), make_model()
fully_shard(fsdp, mesh=mesh["shard"])  # sends nothing to the other node
fully_shard(hsdp, mesh=mesh)  # averages between nodes too
inside = bytes_sent(lambda: backward(fsdp))
dense = bytes_sent(lambda: backward(hsdp)) - inside
sent = bytes_sent(step) - inside
accuracy = (model(x).argmax(1) == y).float().mean()
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.1%}, {sent:,} bytes sent to the other node; HSDP: {dense:,}")
dist.destroy_process_group()
