"""Two levels: processes of a node average densely, and a node is one worker."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dlion.extensions.dense_group import DenseGroup
from dlion.optim import (
    DGC,
    DiLoCo,
    DistributedOptimizer,
    DLion,
    DLionADM,
    GAdamW,
    GMuon,
    LionCub,
    Signum,
)
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.refusals import refused

pytestmark = pytest.mark.slow

STEPS = 4
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "vote": (DLion, {}),
    "vote bf16": (DLion, {"dense_wire": "bf16"}),
    "vote overlap": (DLion, {"overlap": True, "bucket_cap_mb": 1e-3}),
    "mean of signs": (Signum, {"aggregation": "avg"}),
    "cub": (LionCub, {}),
    "adamw": (GAdamW, {}),
    "muon": (GMuon, {}),
    "local steps": (DiLoCo, {"local_steps": 2}),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))


def backward(model: nn.Module, step: int, process: int) -> None:
    """The second layer has no bias gradient on processes 1 and 3."""
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + process))
    last = nn.functional.linear(model[1](model[0](x)), model[2].weight)
    (last if process % 2 else last + model[2].bias).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def reference(method: type, settings: dict[str, Any]) -> Tensor:
    """Two workers in one process, each with the mean gradient of two processes."""
    bf16 = settings.get("dense_wire") == "bf16"
    kept = {name: settings[name] for name in ("aggregation", "local_steps") if name in settings}
    model, (alone, _) = net(), dist.new_subgroups(1)
    workers = Workers(local=2, group=alone)
    optimizer = method(model.parameters(), lr=1e-2, workers=workers, **kept)
    for step in range(STEPS):
        for node in range(2):
            grads = []
            for process in (2 * node, 2 * node + 1):
                model.zero_grad()
                backward(model, step, process)
                found = [
                    p.grad if p.grad is not None else 0 * p.detach() for p in model.parameters()
                ]
                grads.append([g.bfloat16().float() if bf16 else g for g in found])
            for param, one, two in zip(model.parameters(), *grads, strict=True):
                mean = (one + two) / 2
                param.grad = mean.bfloat16().float() if bf16 else mean
            optimizer.collect(node)
        optimizer.step()
    return flat(model)


def dense(optimizer: DistributedOptimizer) -> DenseGroup:
    (found,) = (each for each in optimizer.extensions if isinstance(each, DenseGroup))
    return found


def in_each_process() -> dict[str, Any]:
    join_process_group("gloo", 60)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "node"))
    two_levels = {"mesh": mesh["replicate"], "dense_group": mesh["node"].get_group()}
    seen: dict[str, Any] = {}
    for name, (method, settings) in CASES.items():
        model = net()
        if rank:
            nn.init.zeros_(model[0].weight)  # all begin with what process 0 has
        given = {"dense_wire": "float32", **settings}
        optimizer = method(model.parameters(), lr=1e-2, **two_levels, **given)
        for step in range(STEPS):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        everyone: list[Any] = [None] * 4
        mine = (
            flat(model),
            optimizer.channel.traffic.sent_bytes,
            dense(optimizer).traffic.sent_bytes,
        )
        dist.all_gather_object(everyone, mine)
        expected = reference(method, settings)
        seen[name] = all(torch.equal(params, expected) for params, _, _ in everyone)
        seen[f"{name} traffic"] = [sum(each[i] for each in everyone[:2]) for i in (1, 2)]
    model = net()
    group = two_levels["dense_group"]
    wrong: dict[str, tuple[type, dict[str, Any]]] = {
        "dense_group does not go with DGC": (DGC, two_levels),
        "dense_group does not go with DLionADM": (DLionADM, two_levels),
        "are also to exchange messages": (DLion, {"dense_group": group}),
        "dense_wire=int8 is unknown": (DLion, {**two_levels, "dense_wire": "int8"}),
    }
    for sentence, (method, settings) in wrong.items():
        seen[sentence] = refused(partial(method, model.parameters(), **settings))
    unlike = {"lr": 1e-2 if rank % 2 else 1e-1}
    seen["made its optimizer with other hyperparameters"] = refused(
        partial(DLion, model.parameters(), **unlike, **two_levels)
    )
    optimizer = DLion(model.parameters(), lr=1e-2, **two_levels)
    optimizer.flag = rank == 1  # which is not the one that exchanges messages
    backward(model, 0, rank)
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(rank == 1))
    optimizer.step()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (optimizer.flagged, optimizer.param_groups[0]["steps"]))
    seen["flagged, steps"] = everyone
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.param_groups[0]["lr"] = unlike["lr"]
    backward(model, 1, rank)
    seen["has other hyperparameters"] = refused(optimizer.step)
    dist.destroy_process_group()
    return seen


def on_a_grid_of_nodes() -> bool:
    """Whether four nodes of two come to the same on a grid as directly."""
    join_process_group("gloo", 60)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "node"))
    two_levels = {"mesh": mesh["replicate"], "dense_group": mesh["node"].get_group()}
    found = []
    for way in ("direct", (2, 2)):
        model = net()
        optimizer = DLion(model.parameters(), lr=1e-2, exchange=way, **two_levels)
        for step in range(STEPS):
            backward(model, step, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(model))
    equal: list[Any] = [None] * 8
    dist.all_gather_object(equal, torch.equal(*found))
    dist.destroy_process_group()
    return all(equal)


def test_nodes_may_vote_on_a_grid():
    assert run_processes(8, on_a_grid_of_nodes)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_processes(4, in_each_process)


@pytest.mark.parametrize("case", CASES)
def test_a_node_is_a_worker_with_the_mean_gradient(seen, case):
    assert seen[case]


def test_a_node_sends_a_message_once_and_its_gradients_stay_inside(seen):
    outside, inside = seen["vote traffic"]
    words = sum(-(-size // 64) for size in (800, 40, 120, 3))
    assert outside >= STEPS * 8 * words and outside < STEPS * 8 * words * 1.5 + 1000
    assert inside > STEPS * 4 * 963  # float32, once around


def test_a_flag_and_an_overflow_of_one_process_are_everyones(seen):
    assert seen["flagged, steps"] == [[True, 1]] * 4


@pytest.mark.parametrize(
    "sentence",
    [
        "dense_group does not go with DGC",
        "dense_group does not go with DLionADM",
        "are also to exchange messages",
        "dense_wire=int8 is unknown",
        "made its optimizer with other hyperparameters",
        "has other hyperparameters",
    ],
)
def test_what_does_not_go_is_said(seen, sentence):
    assert sentence in seen[sentence]
