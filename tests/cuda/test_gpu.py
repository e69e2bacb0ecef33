"""What users do, on a real GPU: ``pytest -m gpu --dist load``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from dlion.methods import METHODS
from dlion.optim import DiLoCo, DistributedOptimizer, DLion
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from tests.support import runs
from tests.support.methods import of_all
from tests.support.small_model import net, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU: type pytest -m gpu", allow_module_level=True)

SETTINGS = ("steps=6", "eval_every=3", "batch_size=8", "checkpoint_every=3", "logger=none")
SPREAD = ("processes=2", "backend=gloo")  # NCCL refuses two processes on one GPU


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_spread_and_resumed_workers_train_to_the_same_bits(method, workers, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    same = f"optimizer={method}", f"workers={workers}", "device=cuda", *SETTINGS
    runs.train(*same, f"output_dir={whole}", code=0)
    runs.train(*same, f"output_dir={parted}", *SPREAD, "stop_after=3", code=75)
    runs.train(*same, f"output_dir={parted}", "resume=auto", code=0)
    one, other = (load_file(run / "model.safetensors") for run in (whole, parted))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def follows(make: Callable[..., DistributedOptimizer], options: dict[str, Any]) -> bool:
    """Whether optimizers made before and after their model went to the GPU train the same."""
    found: list[Tensor] = []
    for early in (False, True):
        model = net() if early else net().cuda()
        optimizer = make(model.parameters(), **options)
        train(model.cuda(), optimizer, 3)
        if early:  # to save it, say, and the state comes along as it is asked for
            model.cpu()
            optimizer.state_dict()
        found.append(train(model.cuda(), optimizer, 3, first=3).cpu())
    return torch.equal(*found)


@of_all
def test_an_optimizer_follows_its_model_to_the_gpu_and_back(method, cls, options):
    assert run_processes(1, follows, cls, options)


def resumed() -> bool:
    """Whether a state of processes that differ continues to the bit, within a round too."""
    join_process_group("gloo", 60)
    model, again = net().cuda(), net().cuda()
    optimizer = DiLoCo(model.parameters(), local_steps=4)
    train(model, optimizer, 3)
    weights, state = ({**kept.state_dict()} for kept in (model, optimizer))
    weights = {name: values.clone() for name, values in weights.items()}
    again.load_state_dict(weights)
    optimizer_again = DiLoCo(again.parameters(), local_steps=4)
    optimizer_again.load_state_dict(state)
    trained = train(model, optimizer, 3, first=3), train(again, optimizer_again, 3, first=3)
    dist.destroy_process_group()
    return torch.equal(*trained)


def test_the_state_of_two_processes_on_a_gpu_continues_to_the_bit():
    assert run_processes(2, resumed)


def half_moved() -> str:
    model = net()
    optimizer = DLion(model.parameters())
    model[0].weight.data = model[0].weight.data.cuda()
    try:
        optimizer.step()
    except RuntimeError as error:
        model.cuda()
        train(model, optimizer, 2)
        return str(error)
    return "accepted"


def test_a_model_that_moved_in_part_is_refused_and_moves_nothing():
    said = run_processes(1, half_moved)
    assert said.startswith("a parameter moved from torch.float32 on cpu to torch.float32 on cuda")
    assert "not all of its bucket" in said
