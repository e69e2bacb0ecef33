"""A worker of tests/optim/test_elastic.py: trains a small model, and says what it has after steps.

python -m tests.optim.elastic_worker LIGHTHOUSE NAME METHOD OPTIONS STEPS PAUSE MIN_WORKERS
"""

import hashlib
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dlion
from dlion.elastic import of
from dlion.exchange.transport import Gloo
from dlion.methods import METHODS


def model(width: int = 40) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, width), torch.nn.ReLU(), torch.nn.Linear(width, 5)
    return torch.nn.Sequential(*layers)


def loss(net: torch.nn.Module, step: int, worker: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1000 * step + worker)
    x, y = torch.randn(8, 20, generator=draws), torch.randint(5, (8,), generator=draws)
    return torch.nn.functional.cross_entropy(net(x), y)


def clip(net: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def sha256(net: torch.nn.Module) -> str:
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in net.parameters()]
    flat = torch.nn.utils.parameters_to_vector(parts).detach()
    assert flat.isfinite().all()
    return hashlib.sha256(flat.numpy()).hexdigest()


def own_state(optimizer: dlion.DistributedOptimizer) -> list[torch.Tensor]:
    return [rows.clone() for bucket in optimizer.buckets for rows in bucket.own.values()]


def fail() -> None:
    raise RuntimeError("gloo: Connection closed by peer")


def main(
    lighthouse: str, name: str, method: str, options: str, steps: str, pause: str, least: str
) -> None:
    torch.set_num_threads(1)
    net, entry, group = model(int(os.environ.get("WIDTH", 40))), METHODS[method], None
    kwargs = {**entry.options, **json.loads(options)}
    place, together = 0, 1
    if "STORE" in os.environ:  # the process is one of several that are a worker
        store, *numbers = os.environ["STORE"].split(",")
        place, together = map(int, numbers)
        dist.init_process_group("gloo", f"file://{store}", rank=place, world_size=together)
        group = dist.group.WORLD
        if "DENSE" in os.environ:
            kwargs["dense_group"] = group
        elif "APART" not in os.environ:
            fully_shard(net)
    dlion.__version__ = os.environ.get("VERSION", dlion.__version__)
    # nobody is to wait for as long as that
    limits = {
        "timeout": float(os.environ.get("TIMEOUT", 600)),
        "patience": float(os.environ.get("PATIENCE", 60)),
    }
    manager = dlion.join(lighthouse, int(least), name, group=group, **limits)
    optimizer = entry.cls(net.parameters(), manager=manager, **kwargs)
    stops = [os.environ["STOPS"]] if "STOPS" in os.environ else []

    def stop(at: str) -> None:
        """Stop this process as it connects, takes a state, gives its own, waits or steps."""
        if at in stops and (at == "takes" or optimizer.workers.count == 2):
            stops.remove(at)
            os.kill(os.getpid(), signal.SIGSTOP)

    manager.register_state_dict_fn("stop", lambda state: stop("takes"), lambda: stop("gives"))
    connect = manager._pg.configure
    manager._pg.configure = lambda *args: (stop("connects"), connect(*args))
    complete = Gloo._complete
    Gloo._complete = lambda *args: (stop("waits"), complete(*args))[1]
    breaks = int(os.environ.get("BREAKS", -1))  # the step in which this worker gives up, once
    cuts = int(os.environ.get("CUTS", -1))  # the step whose first exchange breaks off here, once
    step, nan = 0, int(os.environ.get("NAN", 10**9))  # from which step on a gradient has NaN
    net[0].weight.register_hook(lambda g: g * torch.nan if step >= nan and step % 4 == 2 else None)
    while True:
        optimizer.zero_grad()
        step = optimizer.param_groups[0]["steps"]
        optimizer.host(None)  # the parameters that all share, of local updates
        print(step, optimizer.workers.count, sha256(net), flush=True)
        optimizer.host(0)
        if step >= int(steps):
            break
        if step == breaks:
            breaks = -1
            if "STRAYS" in os.environ:  # as if it had seen another step committed than its peers
                of(optimizer)._lineage += 1
                with torch.no_grad():
                    net[0].weight += 1
            of(optimizer).attempt(fail)
            continue
        if step == cuts:
            cuts = -1
            optimizer.buckets[0].exchange.run = lambda step: fail()  # the next quorum has another
        before = own_state(optimizer)
        loss(net, step, optimizer.workers.rank * together + place).backward()
        if optimizer.schedule.at_step:  # its messages have left
            clip(net)
        time.sleep(float(os.environ.get("LAG", 0)))
        stop("steps")
        optimizer.step()
        if not (optimizer.committed or optimizer.moves_alone):
            assert all(map(torch.equal, own_state(optimizer), before)), "a step has left something"
        time.sleep(float(pause))


if __name__ == "__main__":
    code = 0
    try:
        main(*sys.argv[1:])
    except (dlion.UserError, dlion.TrainingFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    if dist.is_initialized():  # a thread of gloo may abort Python as it ends
        dist.destroy_process_group()
    sys.exit(code)
