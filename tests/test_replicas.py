"""Replicas are made equal, and parameters that drift apart are named."""

import pytest
import torch
import torch.distributed as dist

import dlion
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from tests.support.refusals import refused

pytestmark = pytest.mark.slow


def two_optimizers(rest: str) -> list[tuple[str, list[float]]]:
    join_process_group("gloo", 60)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    model.register_buffer("projection", torch.randn(3))
    dlion.replicate(model)
    kind = torch.optim.AdamW if rest == "AdamW" else dlion.GAdamW
    optimizers = [dlion.DLion(model[0].parameters(), lr=0.1), kind(model[1].parameters(), lr=0.1)]
    for _ in range(3):
        model(torch.randn(8, 6)).sin().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    said = refused(lambda: dlion.check_replicas(model))
    heard = [("", [0.0])] * 2
    dist.all_gather_object(heard, (said, model.projection.tolist()))
    dist.destroy_process_group()
    return heard


@pytest.mark.parametrize("rest", ["AdamW", "GAdamW"])
def test_parameters_that_drift_apart_are_named(rest):
    (said, one), (_, other) = run_processes(2, two_optimizers, rest)
    assert one == other
    if rest == "AdamW":
        assert "differ between processes: 1.weight, 1.bias" in said and "GAdamW(rest)" in said
    else:
        assert said == "accepted"
