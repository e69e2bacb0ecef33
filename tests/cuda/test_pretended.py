"""The CUDA path on a pretended GPU: the bits of the CPU, no faults, and few waits of the host."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from hydra import compose, initialize_config_dir

from dlion.optim import DistributedOptimizer, DLion
from dlion.suite.launch.check import check
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.training.job import Job
from dlion.suite.training.loop import Trainer, train
from dlion.suite.training.signals import SignalNotice
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.cuda.configurations import ALL, BUCKETS, THREADS, Limits, Measured, measure
from tests.cuda.pretend import pretended_cuda
from tests.cuda.report import table
from tests.support.methods import of_all
from tests.support.scripts import script

same_bits = script("same_bits")
STEPS = 4  # in each of which other workers take part
QUICK = ["dlion_mavo", "terngrad"]
# each configuration with overlap, and each kind of exchange and of limit without it
ALONE = ["DLion", "GAdamW", "DGC", "LionCub", "PowerSGD", "DiLoCo", "DLion nonfinite=skip"]
ALONE += ["DLion grid, 2 workers", "GMuon node"]
MEASURED = [(name, True) for name in ALL] + [(name, False) for name in ALONE]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which sends nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def on_cpu(method: str, partial: bool) -> str:
    case = same_bits.Case(method, method, partial=partial, steps=STEPS)
    return same_bits.run_case(case, Workers(local=same_bits.WORKERS), overlap=False)


def cases() -> Iterator[Any]:
    """Yield each method in one way: with or without overlap, absent workers, and NCCL.

    Three of four overlap, and eight in a row have every two of these together.
    """
    for index, method in enumerate(same_bits.METHODS):
        overlap = index % 4 > 0
        partial, travelling = (bool(index & bit) != bool(index & 4) for bit in (1, 2))
        name = f"{method}{'-overlap' * overlap}{'-some' * partial}{'-nccl' * travelling}"
        marks = [] if method in QUICK else pytest.mark.slow
        yield pytest.param(method, overlap, partial, travelling, id=name, marks=marks)


@pytest.mark.parametrize(("method", "overlap", "partial", "travelling"), cases())
def test_the_bits_are_those_of_the_cpu(alone, method, overlap, partial, travelling):
    case = same_bits.Case(method, method, partial=partial, steps=STEPS)
    workers = Workers.current(local=same_bits.WORKERS)
    with pretended_cuda() as gpu:
        digest = same_bits.run_case(case, workers, overlap, "cuda", travelling)
    assert gpu.seen.faults == []
    assert digest == on_cpu(method, partial)


def trained_alone(
    cls: type[DistributedOptimizer], options: dict[str, Any], *devices: str
) -> list[torch.Tensor]:
    """Return parameters on these devices after three steps of a worker that has no others."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 8).to(device)) for device in devices]
    optimizer = cls(params, lr=0.1, **options)
    for _ in range(3):
        grads = [torch.randn(64, 8).to(device) for device in devices]
        torch.autograd.backward(params, grads)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().cpu() for param in params]


@of_all
def test_one_worker_may_be_alone(alone, method, cls, options):
    with pretended_cuda() as gpu:
        found = trained_alone(cls, options, "cuda", "cuda")
    assert gpu.seen.faults == []
    assert all(map(torch.equal, found, trained_alone(cls, options, "cpu", "cpu")))


@pytest.mark.parametrize("nonfinite", [None, "skip"])
@pytest.mark.parametrize("devices", [("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")])
def test_parameters_may_be_on_a_gpu_and_in_main_memory(alone, devices, nonfinite):
    """As an embedding is that its GPU has no place for."""
    options = {"nonfinite": nonfinite}
    with pretended_cuda() as gpu:
        found = trained_alone(DLion, options, *devices)
    assert gpu.seen.faults == []
    assert all(map(torch.equal, found, trained_alone(DLion, options, "cpu", "cpu", "cpu")))


def apart(methods: list[str]) -> dict[str, str]:
    """Train in two processes over a pretended NCCL, in some steps without workers in one."""
    join_process_group("gloo")
    found = {}
    for method in methods:
        case = same_bits.Case(method, method, partial=True, steps=STEPS)
        with pretended_cuda():
            try:
                found[method] = same_bits.run_case(case, Workers.current(2), False, "cuda")
            except Exception as error:
                found[method] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_process_whose_workers_stay_away_is_on_its_gpu_too():
    methods = [*same_bits.METHODS]
    assert run_processes(2, apart, methods) == {name: on_cpu(name, True) for name in methods}


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, bool], Measured | str]:
    return measure(MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overlap"), MEASURED)
def test_the_host_waits_as_rarely_as_it_can(measured, name, overlap):
    found = measured[name, overlap]
    assert isinstance(found, Measured), found
    assert found.buckets == (1 if name == "MuonADM" else BUCKETS)  # which has whole matrices only
    assert found.faults == []
    limits = ALL[name].overlap if overlap else Limits(0, 0, ALL[name].alone)
    for thread, waits, limit in zip(THREADS, found.waits(), limits, strict=True):
        where = found.places(thread)
        assert waits <= limit, f"{thread}: {waits} waits, {limit} at most; {where}"


@pytest.mark.slow
def test_the_report_has_a_row_for_each_configuration(measured):
    both = {run: measured[run] for name in ALONE for run in ((name, False), (name, True))}
    rows = table(both).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ALONE
    assert all(len(row.split("|")) == 10 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_the_trainer_waits_once_a_pass(tmp_path: Path, overlap: bool):
    job = job_of(tmp_path, f"overlap={overlap}", "accumulate=2", "bucket_cap_mb=0.05")
    waits, places, faults = run_processes(1, train_on_pretended_gpu, job)
    assert faults == []
    passes = 2 * job.workers.local
    assert waits["hook"] == 0, places
    assert waits["all"] <= passes + 1, f"{waits['all']} in {passes} passes and a step: {places}"


def job_of(directory: Path, *overrides: str) -> Job:
    """A run of two workers in this process, checked as one on a CPU."""
    small = ["model=vit_tiny", "dataset=digits", "batch_size=4", "workers=2", "steps=3"]
    here = ["device=cpu", "processes=1", "logger=none", f"output_dir={directory / 'run'}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=[*small, *here, *overrides])
    return check(config, directory / "run", None)


def train_on_pretended_gpu(job: Job) -> tuple[dict[str, int], list[str], list[str]]:
    """Train from start to end, then again step by step.

    Returns:
        how often the host waits in the last step, in hooks and in all; where; all faults.
    """
    torch.set_num_threads(1)
    join_process_group("gloo")
    try:
        workers = Workers.current(job.workers.local)
        job = replace(job, device="cuda", backend="nccl", workers=workers)
        with pretended_cuda() as gpu:
            train(job)
            # more steps, as the last one makes a row
            again = replace(job, output_dir=job.output_dir.with_name("again"), steps=job.steps + 1)
            with SignalNotice() as notice:
                trainer = Trainer(again, notice)
                for step in range(job.steps):
                    gpu.seen.syncs.clear()
                    trainer.take_step(step)
        syncs = gpu.seen.syncs
        places = [f"{n} x {sync.kind} at {sync.place} ({sync.thread})" for sync, n in syncs.items()]
        waits = {"hook": gpu.seen.waits("hook"), "all": syncs.total()}
        return waits, places, gpu.seen.faults
    finally:
        dist.destroy_process_group()
