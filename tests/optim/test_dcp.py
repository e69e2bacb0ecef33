"""torch.distributed.checkpoint gives every worker its own state back, on other processes too."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlion.optim import DLion, GAdamW
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.methods import ALL

pytestmark = pytest.mark.slow

N, BEFORE, AFTER = 4, 3, 3
METHODS = {each.method: partial(each.cls, **each.options) for each in ALL}  # the last of variants


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 13), nn.Tanh(), nn.Linear(13, 1), nn.Linear(1, 3))


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> Tensor:
    """Train on; worker i of a step has its own samples. Returns the parameters, whole."""
    for step in range(first, first + steps):
        for local, worker in enumerate(optimizer.workers.ids):
            generator = torch.Generator().manual_seed(100 * step + worker)
            x = torch.randn(8, 9, generator=generator)
            (model(x) - x[:, :3].sin()).square().mean().backward()
            optimizer.collect(local)
        optimizer.step()
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def leg(root: str, processes: int, begins: int, saves: int | None) -> dict[str, list[float]]:
    """Four workers go on from a step to the end, and save their state of another on the way."""
    join_process_group("gloo", 60)
    ends = {}
    for name, method in METHODS.items():
        model = net()
        workers = Workers.current(local=N // processes)
        optimizer = method(model.named_parameters(), lr=1e-2, workers=workers)
        if begins:
            load(model, optimizer, Path(root) / f"{name} {begins}")
        if saves:
            train(model, optimizer, begins, saves - begins)
            save(model, optimizer, Path(root) / f"{name} {saves}")
        first = saves or begins
        ends[name] = train(model, optimizer, first, BEFORE + AFTER - first).tolist()
    dist.destroy_process_group()
    return ends


def others(root: str) -> list[str]:
    """Return what two workers hear who want the state of four, and what eight do."""
    join_process_group("gloo", 60)
    heard = []
    for local in (1, 4):
        model, workers = net(), Workers.current(local=local)
        optimizer = DLion(model.named_parameters(), lr=1e-2, workers=workers)
        try:
            load(model, optimizer, Path(root) / f"dlion_mavo {BEFORE}")
            heard.append("accepted")
        except dcp.api.CheckpointException as error:  # which is no Exception
            heard.append(str(error))
    dist.destroy_process_group()
    return heard


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, dict[str, list[float]]]:
    root = str(tmp_path_factory.mktemp("dcp"))
    return root, run_processes(2, leg, root, 2, 0, BEFORE)


def test_two_processes_save_then_four_then_one_goes_on(saved):
    root, ends = saved
    assert run_processes(4, leg, root, 4, BEFORE, BEFORE + 1) == ends
    assert run_processes(1, leg, root, 1, BEFORE + 1, None) == ends


def test_another_number_of_workers_is_refused(saved):
    """By torch, which compares sizes before it loads anything; first those of whose state it is."""
    for now, heard in zip((2, 8), run_processes(2, others, saved[0]), strict=True):
        sizes = f"saved torch.Size([4, 2]) and current: torch.Size([{now}, 2])"
        assert f"{sizes} for optimizer.state.0.weight.worker\n" in heard


@pytest.mark.parametrize("method", [DLion, GAdamW])
def test_an_earlier_checkpoint_without_counted_steps_loads(method, tmp_path):
    model = net()
    optimizer = method(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 0, BEFORE)
    weights, state = get_state_dict(model, optimizer)
    if method is DLion:  # whose update counts none
        for values in state["state"].values():
            del values["step"]
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    resumed = net()
    other = method(resumed.named_parameters(), lr=1e-2)
    load(resumed, other, tmp_path)
    assert [other.state[param]["step"] for param in resumed.parameters()] == [BEFORE] * 6
    assert torch.equal(train(model, optimizer, BEFORE, 2), train(resumed, other, BEFORE, 2))


def sharded(root: str, replicas: int, goes_on: bool) -> list[float]:
    """Two workers, in two replicas of two shards, or both in one of four."""
    join_process_group("gloo", 60)
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    group = mesh["replicate"].get_group()
    ends: list[float] = []
    for name, method in {"vote": DLion, "adamw": GAdamW}.items():
        model = net()
        fully_shard(model, mesh=mesh["shard"])
        workers = Workers.current(local=2 // replicas, group=group)
        optimizer = method(model.named_parameters(), lr=1e-2, workers=workers)
        if goes_on:
            load(model, optimizer, Path(root) / name)
        else:
            train(model, optimizer, 0, BEFORE)
            save(model, optimizer, Path(root) / name)
        ends += train(model, optimizer, BEFORE, AFTER).tolist()
    dist.destroy_process_group()
    return ends


def test_shards_may_be_cut_otherwise(tmp_path):
    ends = run_processes(4, sharded, str(tmp_path), 2, False)
    assert run_processes(4, sharded, str(tmp_path), 2, True) == ends
    assert run_processes(4, sharded, str(tmp_path), 1, True) == ends
