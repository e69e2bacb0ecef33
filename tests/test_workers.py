"""Groups of processes: which backends they have, and which processes may not be in one."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from dlion.compat import backends, gloo_threads
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers, check_different, check_gpus
from tests.support.refusals import refused

pytestmark = pytest.mark.slow

assert fake_pg  # the backend "fake" stands for NCCL: it carries nothing, and no CPU tensors here
MIXED, GPU_ONLY = {"cpu": "gloo", "cuda": "fake"}, {"cuda": "fake"}


def total(workers: Workers) -> float:
    """What its group adds up on the CPU."""
    mine = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(mine, group=workers.group)
    return mine.item()


def in_groups(world: str) -> list[Any]:
    """Make groups of the first two of three processes; return what process 0 sees."""
    join_process_group(world, 60)
    seen: list[Any] = []
    both, gpus = (dist.new_group([0, 1], backend=name) for name in (world, "cuda:fake"))
    # as init_process_group(device_id=...) does where there are GPUs
    dist.group.WORLD.bound_device_id = device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() < 2:  # the third one is not asked
        for group in (both, gpus):
            workers = Workers.current(group=group, timeout=60)
            own, cpu = workers.with_own_group(), workers.with_cpu_group()
            seen.append([backends(each.group) for each in (workers, own, cpu)])
            seen[-1].append(total(cpu))
            seen[-1].append(workers.with_cpu_group().group is cpu.group)
            seen[-1].append(cpu.group is workers.group)
            seen[-1].append(own.group.bound_device_id is None)
            own.give_back()
            seen[-1].append(workers.with_own_group().group is own.group)
    everyone = Workers.current(timeout=60)
    seen.append([backends(everyone.with_own_group().group), total(everyone.with_cpu_group())])
    seen.append(dist.group.WORLD.bound_device_id == device)
    dist.destroy_process_group()
    return seen


def test_a_group_of_ones_own_has_the_same_backends_and_one_for_cpus_is_shared():
    both, gpu_only, everyone, bound = run_processes(3, in_groups, "cpu:gloo,cuda:fake")
    assert both == [MIXED, MIXED, MIXED, 3.0, True, True, True, True]
    cpu = {"cpu": "gloo", "cuda": "gloo"}
    assert gpu_only == [GPU_ONLY, GPU_ONLY, cpu, 3.0, True, False, True, True]
    assert everyone == [MIXED, 6.0]
    assert bound


def in_overlapping_groups() -> list[list[float]]:
    """Make groups of 0 and 1, of 1 and 2, and of all three; return what each has added up."""
    join_process_group("gloo", 20)
    seen: list[float] = []
    for pair in ([0, 1], [1, 2]):
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            workers = Workers.current(group=group, timeout=20)
            seen += [total(workers.with_own_group()) for _ in range(2)]
    seen.append(total(Workers.current(timeout=20).with_own_group()))
    told = [seen] * 3
    dist.all_gather_object(told, seen)
    dist.destroy_process_group()
    return told


def test_a_process_may_be_in_more_groups_than_the_others_of_one():
    assert run_processes(3, in_overlapping_groups) == [[3, 3, 6], [3, 3, 5, 5, 6], [5, 5, 6]]


def on_gpus(gpus: list[str]) -> list[str]:
    """Refuse processes on the same GPU; return what each has been told."""
    join_process_group("gloo", 60)
    workers, told = Workers.current(), [""] * len(gpus)
    check_gpus(workers, torch.device("cpu"))  # only NCCL is asked about
    mine = refused(lambda: check_different(workers, gpus[dist.get_rank()]))
    dist.all_gather_object(told, mine)
    dist.destroy_process_group()
    return told


def test_processes_that_share_a_gpu_are_named_on_all_of_them():
    assert run_processes(3, on_gpus, ["a 0", "a 1", "b 0"]) == 3 * ["accepted"]
    told = run_processes(3, on_gpus, ["a 0", "b 0", "b 0"])
    assert [text.partition(",")[0] for text in told] == 3 * ["processes 1 and 2 share a GPU"]
    assert "torch.cuda.set_device(int(os.environ" in told[0]


def of_a_world_that_has_ended() -> str:
    """Make groups, and end all; return the states of gloo's threads."""
    join_process_group("gloo", 60)
    workers = Workers.current().with_own_group()
    total(workers)
    assert gloo_threads()
    del workers
    dist.destroy_process_group()
    return gloo_threads()


def test_groups_go_with_their_world():
    assert run_processes(2, of_a_world_that_has_ended) == ""


def test_python_that_ends_while_gloo_frees_a_message_is_not_aborted():
    script = """
import sys, time
import torch
import torch.distributed as dist
from dlion.compat import gloo_threads
from dlion.workers import Workers
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
while len(gloo_threads()) < 3:  # they have names once they run
    time.sleep(0.01)
workers = Workers.current(group=dist.group.WORLD)  # it outlives destroy_process_group()
sys.setswitchinterval(100)  # seconds: gloo's thread gets Python's lock if this one waits
dist.all_reduce(torch.ones(1), async_op=True)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
