"""States of optimizers: loaded to the bit, or refused."""

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dlion.optim import (
    DiLoCo,
    DistributedOptimizer,
    DLion,
    GAdamW,
    LionCub,
    OneBitAdam,
    Signum,
)
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.methods import of_all
from tests.support.small_model import flat, loss_of, net, samples, train


@of_all
def test_state_dict_resumes_to_the_bit(method, cls, options, tmp_path):
    straight = net()
    expected = train(straight, cls(straight.parameters(), **options), 10)

    model = net()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, 5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = net()
    resumed.load_state_dict(weights)
    optimizer = cls(resumed.parameters(), **options)
    optimizer.load_state_dict(state)
    for t in range(5, 10):
        optimizer.zero_grad()
        loss_of(resumed, *samples(t)).backward()
        optimizer.step()
    assert torch.equal(flat(resumed), expected)


def test_a_model_that_moves_after_the_optimizer_was_made_is_refused():
    model = net()
    optimizer = DLion(model.parameters())
    train(model, optimizer, 1)
    model.to(torch.float64)
    loss_of(model, *(sample.double() for sample in samples(0))).backward()
    with pytest.raises(RuntimeError, match=r"create the optimizer after model.to\("):
        optimizer.step()


def resumed_from_copies() -> bool:
    """Whether a state is loaded whose DTensors have no memory of the optimizer's.

    On a mesh of GPUs that is so for what is in main memory, as DTensor moves it there.
    """
    join_process_group("gloo", 60)
    from_local = DTensor.from_local

    def copied(here: torch.Tensor, *args: Any, **kwargs: Any) -> DTensor:
        return from_local(here.clone(), *args, **kwargs)

    with patch.object(DTensor, "from_local", copied):
        model, resumed = net(), net()
        optimizer = DiLoCo(model.parameters(), local_steps=4)
        train(model, optimizer, 3)
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, 3)
        resumed.load_state_dict(state[0])
        optimizer = DiLoCo(resumed.parameters(), local_steps=4)
        optimizer.load_state_dict(state[1])
        train(resumed, optimizer, 3)
    dist.destroy_process_group()
    return torch.equal(flat(model), flat(resumed))


def shards_from_copies() -> list[list[float]]:
    """Return how many warm-up exchanges one-bit Adam counts, saved and loaded, as above."""
    join_process_group("gloo", 60)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    from_local, found = DTensor.from_local, []

    def copied(here: torch.Tensor, *args: Any, **kwargs: Any) -> DTensor:
        return from_local(here.clone() if here.numel() == 1 else here, *args, **kwargs)

    with patch.object(DTensor, "from_local", copied):
        state: dict[str, Any] | None = None
        for steps in (3, 0):
            model = fully_shard(net(), mesh=mesh["shard"])
            options = {"warmup_steps": 9, "mesh": mesh["replicate"]}
            optimizer = OneBitAdam(model.parameters(), **options)
            if state is not None:
                optimizer.load_state_dict(state)
            for t in range(steps):
                loss_of(model, *samples(t)).backward()
                optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            found.append(optimizer.buckets[0].exchange.state["runs"].flatten().tolist())
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_an_exchange_of_shards_keeps_in_main_memory_is_loaded_too():
    saved, loaded = run_processes(2, shards_from_copies)
    assert saved == loaded == [3.0]


@pytest.mark.slow
def test_state_in_main_memory_is_loaded_beside_parameters_on_a_gpu():
    assert run_processes(2, resumed_from_copies)


def test_state_of_another_spread_or_cut_is_refused():
    workers = Workers(local=2)
    for cls, options in ((DLion, {"aggregation": "avg"}), (LionCub, {})):
        saved = cls(net().parameters(), workers=workers, **options).state_dict()
        with pytest.raises(ValueError, match="workers 0, 1 of 2, but"):
            cls(net().parameters(), **options).load_state_dict(saved)
    saved = DLion(net().parameters(), workers=workers).state_dict()
    with pytest.raises(ValueError, match="bucket_cap_mb, ties and shards"):
        DLion(net().parameters(), workers=workers, bucket_cap_mb=1e-3).load_state_dict(saved)


def test_state_of_another_method_or_with_gaps_is_refused():
    optimizer = DLion(net().parameters())
    with pytest.raises(ValueError, match="has no betas: it is of another method"):
        optimizer.load_state_dict(Signum(net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"parameter 0 has \{'exp_avg'"):
        optimizer.load_state_dict(GAdamW(net().parameters()).state_dict())
    saved = optimizer.state_dict()
    del saved["state"][1]
    with pytest.raises(ValueError, match=r"saved state of parameter 1 has \{\}"):
        optimizer.load_state_dict(saved)
    one = DLion(net()[0].parameters())
    for ours, other in ((one, optimizer), (optimizer, one)):
        with pytest.raises(ValueError, match=r"groups of \[\d\] param.* into the same model with"):
            ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("through", ["one list", "add_param_group", "param_groups"])
@of_all
def test_a_state_with_groups_that_were_added_later_resumes_to_the_bit(
    method, cls, options, through
):
    def begun() -> tuple[torch.nn.Module, DistributedOptimizer, list[dict[str, Any]]]:
        model = net()
        later = [{"params": [param], "lr": 1e-3} for param in model[2].parameters()]
        return model, cls(model[0].parameters(), lr=1e-2, **options), later

    def go_on(model: torch.nn.Module, optimizer: DistributedOptimizer, first: int) -> torch.Tensor:
        for t in range(first, first + 3):
            optimizer.zero_grad()
            loss_of(model, *samples(t)).backward()
            optimizer.step()
        optimizer.host(None)
        parameters = flat(model)
        optimizer.host(0)
        return parameters

    if "clip_norm" in options:
        pytest.skip("it has one bucket")
    model, optimizer, later = begun()
    go_on(model, optimizer, 0)
    for group in later:
        optimizer.add_param_group(group)
    go_on(model, optimizer, 3)
    other, resumed, later = begun()
    if through == "one list":
        resumed = cls([{"params": other[0].parameters()}, *later], lr=1e-2, **options)
    elif through == "add_param_group":
        for group in later:
            resumed.add_param_group(group)
    else:  # as Lightning's BaseFinetuning does it
        saved = optimizer.param_groups[1:]
        resumed.param_groups += [old | new for old, new in zip(saved, later, strict=True)]
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(go_on(other, resumed, 6), go_on(model, optimizer, 6))


@of_all
def test_state_goes_by_name_where_both_sides_have_names(method, cls, options, tmp_path):
    """A model whose layers are listed in another order is the same model."""

    def make(order: Sequence[int]) -> tuple[torch.nn.ModuleList, Any]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        named = [*layers.named_parameters()]
        names = [named[2 * index + part] for index in order for part in (0, 1)]
        return layers, cls(names, workers=Workers(local=2), **options)

    def train_more(layers: torch.nn.ModuleList, optimizer: Any, steps: range) -> torch.Tensor:
        for t in steps:
            for local in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * t + local))
                torch.nn.Sequential(*layers)(x).square().mean().backward()
                optimizer.collect(local)
            optimizer.step()
        return flat(layers)

    one, first = make([0, 1, 2, 3])
    train_more(one, first, range(3))
    torch.save([one.state_dict(), first.state_dict()], tmp_path / "saved.pt")
    expected = train_more(one, first, range(3, 6))
    for order in ([0, 3, 2, 1], [3, 2, 1, 0]):
        other, second = make(order)
        weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
        other.load_state_dict(weights)
        second.load_state_dict(state)
        assert torch.equal(train_more(other, second, range(3, 6)), expected)
        third = make(order)
        train_more(*third, range(1))
        with pytest.raises(ValueError, match=r"in another order, .*: load it into a new one"):
            third[1].load_state_dict(state)
