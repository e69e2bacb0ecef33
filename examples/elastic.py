"""Distributed Lion with workers that come and go, on torchft: kill one, start another, at any time.

pip install '.[elastic]'
dlion lighthouse &
python examples/elastic.py 127.0.0.1:29510 &
python examples/elastic.py 127.0.0.1:29510
"""

import hashlib
import sys

import torch

import dlion

if len(sys.argv) < 2:
    print("error: type python examples/elastic.py LIGHTHOUSE:PORT [NAME]", file=sys.stderr)
    sys.exit(2)
STEPS = 300
torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)  # points around ten centres, which are the classes
centres, y = torch.randn(10, 64, generator=draws), torch.randint(10, (5000,), generator=draws)
x = centres[y] + 2 * torch.randn(5000, 64, generator=draws)

model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
try:
    manager = dlion.join(sys.argv[1], name=sys.argv[2] if len(sys.argv) > 2 else "")
except dlion.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
optimizer = dlion.DLion(model.parameters(), lr=1e-3, weight_decay=0.01, manager=manager)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
manager.register_state_dict_fn("schedule", schedule.load_state_dict, schedule.state_dict)
present = 0

while True:
    optimizer.zero_grad()  # asks who is there; a new worker gets parameters and schedule here
    step, workers = manager.current_step(), optimizer.workers
    if step == STEPS:
        break
    if workers.count != present:
        present = workers.count
        print(f"step {step}: worker {workers.rank} of {present}", flush=True)
    # what a worker sees follows from the step and its number among those present
    draws = torch.Generator().manual_seed(step * 1000 + workers.rank)
    batch = torch.randint(4000, (32,), generator=draws)
    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()
    if optimizer.committed:  # else a worker has left meanwhile, and the step is taken again
        schedule.step()

accuracy = (model(x[4000:]).argmax(1) == y[4000:]).float().mean().item()
flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
print(f"accuracy {accuracy:.1%}, parameters {hashlib.sha256(flat.numpy()).hexdigest()[:16]}")
