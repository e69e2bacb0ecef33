"""Optimizers of several processes that were made, loaded or called differently say so."""

import copy
import gc
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dlion.frameworks import WorkerFiles
from dlion.optim import DiLoCo, DLion, GAdamW, GradDrop, LionCub, PowerSGD
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.refusals import refused

pytestmark = pytest.mark.slow

LOST = "hangs, or called step() less often than this one"


def net(rank: int = 0, width: int = 40) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(
        torch.nn.Linear(20, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )


def backward(model: torch.nn.Module, seed: int) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def flat(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


CASES: list[Callable[[int], Any]] = []


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Have a function run in both of two processes; it returns what process r has seen."""
    CASES.append(function)
    return function


@case
def order(r: int) -> str:
    params = list(net().parameters())
    return refused(lambda: DLion(params if r == 0 else params[::-1]))


@case
def shapes(r: int) -> str:
    return refused(lambda: DLion(net(width=40 + r).parameters()))


@case
def names(r: int) -> str:
    named = [(f"{name}{'x' * r}", param) for name, param in net().named_parameters()]
    return refused(lambda: DLion(named))


@case
def dtypes(r: int) -> str:
    model = net().to(torch.bfloat16) if r else net()
    return refused(lambda: DLion(model.parameters()))


@case
def buckets(r: int) -> str:
    return refused(lambda: DLion(net().parameters(), bucket_cap_mb=0.002 * (r + 1)))


@case
def overlap(r: int) -> str:
    return refused(lambda: DLion(net().parameters(), overlap=r == 0))


@case
def rates(r: int) -> str:
    return refused(lambda: DLion(net().parameters(), lr=1e-3 * (r + 1)))


@case
def hosts(r: int) -> str:
    return refused(lambda: DLion(net().parameters(), workers=Workers.current(local=1 + r)))


@case
def methods(r: int) -> str:
    return refused(lambda: (DLion if r else LionCub)(net().parameters()))


@case
def bits(r: int) -> str:
    return refused(lambda: LionCub(net().parameters(), bits=2 * (r + 1)))


@case
def frozen(r: int) -> str:
    model = net()
    model[0].weight.requires_grad_(r == 0)
    return refused(lambda: DLion(model.parameters()))


@case
def groups(r: int) -> str:
    optimizer = DLion(net().parameters())
    extra = torch.nn.Parameter(torch.zeros(3 + r))
    return refused(lambda: optimizer.add_param_group({"params": [extra]}))


@case
def wrapped(r: int) -> str:
    model = DistributedDataParallel(net())
    return refused(lambda: DLion(model.parameters()))


@case
def zero_redundancy(r: int) -> str:
    """Equal shapes would let each process take over other parameters' values in silence."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    return refused(lambda: ZeroRedundancyOptimizer(model.parameters(), DLion, lr=1e-3))


@case
def parameters(r: int) -> bool:
    """Those of process 0 are handed out, frozen ones and those of later groups too."""
    model, late = net(r), torch.nn.Parameter(torch.full((3,), float(r)))
    model[0].weight.requires_grad_(False)
    codes = [torch.full((3,), r).to(d) for d in (torch.int16, torch.bool, torch.float8_e4m3fn)]
    frozen = [torch.nn.Parameter(code, requires_grad=False) for code in codes]
    DLion(model.parameters()).add_param_group({"params": [late, *frozen]})
    handed_out = all(not part.float().any() for part in (late, *frozen))
    return flat(model) == flat(net()) and handed_out


@case
def alone(r: int) -> str:
    return refused(lambda: DLion(net().parameters(), workers=Workers(local=2)))


@case
def other_state(r: int) -> str:
    model = net()
    optimizer = GradDrop(model.parameters())
    backward(model, r)
    optimizer.step()
    saved = [None, None]
    dist.all_gather_object(saved, optimizer.state_dict())
    return refused(lambda: optimizer.load_state_dict(saved[0]))


@case
def other_steps(r: int) -> str:
    model = net()
    optimizer = DLion(model.parameters())
    if r == 1:
        optimizer.param_groups[0]["steps"] = 7
    backward(model, r)
    return refused(optimizer.step)


@case
def schedules(r: int) -> tuple[int, str]:
    """Process 1 leaves out the step of one batch, but not that of the schedule."""
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for t in range(4):
        backward(model, t)
        if r == 0 or t != 1:
            message = refused(optimizer.step)
            if message != "accepted":
                return t, message
        optimizer.zero_grad()
        schedule.step()
    return 4, "accepted"


@case
def rates_of_other_types(r: int) -> list[str]:
    """Equal as numbers of three types, then different ones."""
    model = net()
    optimizer = DLion(model.parameters(), lr=0.5)
    messages = []
    for one, other in (
        (0.25, np.float64(0.25)),
        (0.125, torch.tensor(0.125)),
        (1.0, np.float32(2)),
    ):
        optimizer.param_groups[0]["lr"] = other if r else one
        backward(model, 0)
        messages.append(refused(optimizer.step))
    return messages


@case
def unfrozen_here(r: int, overlap: bool = False) -> str:
    model = net()
    model[0].requires_grad_(False)
    optimizer = DLion(model.parameters(), overlap=overlap)
    backward(model, r)
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(r == 1)
    backward(model, r)
    return refused(optimizer.step)


@case
def unfrozen_here_overlap(r: int) -> str:
    return unfrozen_here(r, overlap=True)


@case
def another(r: int) -> list[float]:
    kept = []
    for t in range(3):
        model = net()
        optimizer = DLion(model.parameters(), lr=1e-2, overlap=True)
        if r == 1:
            kept.append(optimizer)  # as where something else still holds it
        backward(model, 10 * t + r)
        optimizer.step()
        del optimizer
    return flat(model)


@case
def wrapped_later(r: int) -> str:
    model = net()
    optimizer = DLion(model.parameters())
    wrapped = DistributedDataParallel(model)
    backward(wrapped, r)
    return refused(optimizer.step)


@case
def scaler(r: int) -> tuple[bool, list[float], float]:
    """An overflow on process 1 skips the step on both."""
    model, plain = net(), net()
    optimizer, other = DLion(model.parameters(), lr=1e-2), DLion(plain.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(4):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * r + t))
        factor = float("inf") if t == 2 and r == 1 else 1.0
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if t != 2:
            plain(x).square().mean().backward()
            other.step()
            other.zero_grad()
    return flat(model) == flat(plain), flat(model), scaler.get_scale()


@case
def broken(r: int) -> list[tuple[str, bool]]:
    """A gradient of process 1 that is not finite, without overlap and with it."""
    found = []
    for overlap in (False, True):
        model = net()
        named = model.named_parameters()
        optimizer = DLion(named, lr=1e-2, nonfinite="stop", overlap=overlap)
        before = flat(model)
        x = torch.randn(8, 20)
        factor = torch.tensor([1.0, float("nan") if r else 1.0, 1.0])
        (model(x) * factor).square().mean().backward()
        found.append((refused(optimizer.step), flat(model) == before))
    return found


@case
def absent(r: int) -> list[float]:
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True, bucket_cap_mb=1e-3)
    optimizer.set_participants([0])
    backward(model, r)
    optimizer.step()
    return flat(model)


@case
def unfrozen_while_absent(r: int) -> list[float]:
    model = net()
    model[0].requires_grad_(False)
    optimizer = DLion(model.parameters(), lr=1e-2)
    for step, present in enumerate(([0], [0], [0, 1])):
        model[0].requires_grad_(step > 0)
        optimizer.set_participants(present)
        if r in present:
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@case
def dropped(r: int) -> tuple[int, int]:
    """Threads and open files before and after optimizers that are made and dropped."""

    def count() -> int:
        gc.collect()
        tasks = Path("/proc/self/task").iterdir() if Path("/proc/self/task").exists() else ()
        files = Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ()
        return len(list(tasks)) + len(list(files))

    counts = []
    for _ in range(6):
        model = net()
        optimizer = DLion(model.parameters(), lr=1e-2, overlap=True)
        backward(model, r)
        optimizer.step()
        del optimizer
        dist.barrier()
        counts.append(count())
    return counts[1], counts[-1]


@case
def powersgd(r: int) -> tuple[list[float], list[float]]:
    """Parameters after some steps, with ours and with torch's hook, from the same first Q."""
    torch.manual_seed(0)
    ours = torch.nn.Linear(20, 30, bias=False)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    state.iter = 2  # the steps before are dense
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0, momentum=0.9)
    optimizer = PowerSGD(ours.parameters(), lr=1.0, rank=2)
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))  # as the hook
    query = optimizer.buckets[0].exchange.state["query"]
    query.copy_(torch.randn(20, 2).flatten())
    for t in range(6):
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            backward(model, 10 * t + r)
            each.step()
    return flat(ours), flat(theirs)


@case
def compiled(r: int) -> list[list[float]]:
    """Parameters after some steps: plain, compiled, and compiled with overlap."""
    ends = []
    for compiles, overlap in ((False, False), (True, False), (True, True)):
        model = torch.compile(net(), backend="aot_eager") if compiles else net()
        optimizer = DLion(model.parameters(), lr=1e-2, overlap=overlap, bucket_cap_mb=1e-3)
        for t in range(3):
            backward(model, 10 * t + r)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(flat(model))
    return ends


def warned(work: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in said]


@case
def files_of_later_groups(r: int) -> list[bool]:
    """Whether runs resume to the bit from process 0's state and all files, read in either order."""
    found = []
    methods = (DLion, {}), (LionCub, {}), (GAdamW, {}), (DiLoCo, {"local_steps": 4})
    for (cls, options), files_first in itertools.product(methods, (True, False)):
        models = net(), net()
        ours, resumed = (cls(model[0].parameters(), lr=1e-2, **options) for model in models)
        files, theirs = WorkerFiles(ours), WorkerFiles(resumed)
        for optimizer, model in zip((ours, resumed), models, strict=True):
            for t in range(6) if optimizer is ours else ():
                if t == 3:
                    optimizer.add_param_group({"params": model[2].parameters()})
                optimizer.zero_grad()
                backward(model, 10 * t + r)
                optimizer.step()
        resumed.add_param_group({"params": models[1][2].parameters()})
        box = [tempfile.mkdtemp(), copy.deepcopy(ours.state_dict()), models[0].state_dict()]
        dist.broadcast_object_list(box)
        folder, state, weights = box
        files.save(Path(folder))
        dist.barrier()
        models[1].load_state_dict(weights)
        if files_first:
            theirs.load(Path(folder))
        resumed.load_state_dict(state)
        if not files_first:
            theirs.load(Path(folder))
        for t in (6, 7, 8):
            for optimizer, model in zip((ours, resumed), models, strict=True):
                optimizer.zero_grad()
                backward(model, 10 * t + r)
                optimizer.step()
        ends = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
        found.append(torch.equal(*ends))
    return found


@case
def same_data(r: int) -> list[list[str]]:
    """Warnings of two steps with the same samples, and with others."""
    found = []
    for seed, overlaps in ((0, True), (r, False)):
        model = net()
        optimizer = DLion(model.parameters(), lr=1e-3, overlap=overlaps)

        def train(model=model, optimizer=optimizer, seed=seed) -> None:
            for t in range(2):
                optimizer.zero_grad()
                backward(model, 10 * t + seed)
                optimizer.step()

        found.append(warned(train))
    return found


@case
def limits(r: int) -> list[float]:
    """Seconds that the group of an overlapping optimizer waits: as the group that was given."""
    few = dist.new_group(timeout=timedelta(seconds=17))
    found = []
    for group in (None, few):
        own = DLion(net().parameters(), overlap=True, process_group=group).workers.group
        found.append(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


def run_cases() -> dict[str, list[Any]]:
    join_process_group("gloo", 60)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mine = {case.__name__: case(rank) for case in CASES}
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    dist.destroy_process_group()
    return {name: [results[name] for results in everyone] for name in mine}


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, list[Any]]]:
    import torch._inductor.pattern_matcher  # noqa: F401 - by which all compile: once, not in each

    return run_processes(2, run_cases)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("order", "parameter shapes"),
        ("shapes", "parameter shapes"),
        ("names", "parameter names"),
        ("dtypes", "parameter dtypes"),
        ("buckets", "settings"),
        ("overlap", "settings"),
        ("rates", "hyperparameters"),
        ("methods", "settings"),
        ("bits", "settings"),
        ("frozen", "frozen parameters"),
        ("groups", "parameter shapes"),
    ],
)
def test_processes_that_were_built_differently_are_named_on_all(seen, case, what):
    for message in seen[case]:
        assert message.startswith("process 1 made its optimizer with other ") and what in message


def test_processes_that_disagree_about_the_number_of_workers_are_named_on_all(seen):
    for message in seen["hosts"]:
        assert "process 1 hosts 2 workers and process 0 1" in message


def test_workers_of_one_process_of_several_are_refused(seen):
    for message in seen["alone"]:
        assert "each of which would train alone: type Workers.current(local=2)" in message


def test_inside_distributed_data_parallel_it_says_why_not(seen):
    for message in seen["wrapped"] + seen["wrapped_later"]:
        assert "would average the gradients in float32" in message and "bare model" in message
        assert "call its register_comm_hook(None, noop_hook), of" in message


def test_parameters_that_are_split_between_processes_are_refused(seen):
    for message in seen["zero_redundancy"]:
        assert message.startswith("ZeroRedundancyOptimizer gives each process other parameters")


def test_all_parameters_are_those_of_process_0(seen):
    assert seen["parameters"] == [True, True]


def test_the_state_of_another_worker_is_refused(seen):
    accepted, refusal = seen["other_state"]
    assert accepted == "accepted"
    assert "state of worker 0 of 2, but this process hosts worker 1 of 2" in refusal


def test_processes_in_different_steps_are_named(seen):
    for message in seen["other_steps"]:
        assert "worker 1 is in step 8, worker 0 in step 1" in message


def test_a_step_that_was_left_out_shows_in_the_next_one(seen):
    (step0, message0), (step1, message1) = seen["schedules"]
    assert (step0, step1) == (1, 2)  # the second step of each
    for message, rate in ((message0, 0.005), (message1, 0.0025)):
        assert "in step 2 worker 1 has other hyperparameters or frozen parameters" in message
        assert f"(here: lr={rate}, " in message and "betas=(" in message


def test_rates_of_numpy_and_torch_are_compared_as_numbers(seen):
    for *equal, different in seen["rates_of_other_types"]:
        assert equal == ["accepted", "accepted"]
        assert "in step 3 worker 1 has other hyperparameters or frozen parameters" in different


def test_unfreezing_on_one_process_only_is_named(seen):
    for message in seen["unfrozen_here"] + seen["unfrozen_here_overlap"]:
        assert "in step 2 worker 1 has other hyperparameters or frozen parameters" in message


def test_files_of_workers_with_groups_that_were_added_later_resume_to_the_bit(seen):
    assert seen["files_of_later_groups"] == [[True] * 8] * 2


def test_processes_that_read_the_same_samples_are_told(seen):
    (same, apart), (silent, others) = seen["same_data"]
    assert len(same) == 1 and "DistributedSampler" in same[0]
    assert not any([*apart, *silent, *others])


def test_groups_made_later_have_the_limit_of_the_first(seen):
    assert seen["limits"] == [[60, 17]] * 2


def test_powersgd_is_that_of_torch(seen):
    for ours, theirs in seen["powersgd"]:
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_compiled_model_learns_the_same(seen):
    for plain, *ends in seen["compiled"]:
        assert ends == [plain, plain] and plain == seen["compiled"][0][0]


def test_an_optimizer_that_is_dropped_on_one_process_first_makes_way_for_another(seen):
    assert seen["another"][0] == seen["another"][1]


def test_an_overflow_on_one_worker_skips_the_step_on_all(seen):
    (same0, params0, scale0), (same1, params1, scale1) = seen["scaler"]
    assert same0 and same1 and params0 == params1
    assert scale0 == 1024 and scale1 == 512  # a scale is each process's own


def test_a_gradient_that_is_not_finite_ends_the_step_on_all_before_anything_moves(seen):
    for message, unmoved in (*seen["broken"][0], *seen["broken"][1]):
        assert "the gradient of 0.weight is not finite on worker 1 in step 1" in message
        assert unmoved


def test_a_process_whose_workers_are_absent_may_compute_all_the_same(seen):
    assert seen["absent"][0] == seen["absent"][1]


def test_a_parameter_may_be_unfrozen_while_all_workers_of_a_process_are_absent(seen):
    assert seen["unfrozen_while_absent"][0] == seen["unfrozen_while_absent"][1]


def test_optimizers_that_are_dropped_cost_nothing(seen):
    for first, last in seen["dropped"]:
        assert last <= first + 2  # a thread that is about to end


def of_a_backend(name: str) -> list[float]:
    join_process_group(name, 60)
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True, ties="zero")
    for t in range(3):
        backward(model, 10 * t + dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return flat(model)


def made_too_early() -> str:
    optimizer = DLion(net().parameters())
    join_process_group("gloo", 60)
    message = refused(optimizer.step)
    dist.destroy_process_group()
    return message


def test_an_optimizer_that_is_made_too_early_does_not_train_alone():
    assert "call init_process_group() first" in run_processes(2, made_too_early)


def test_the_backend_may_be_named_by_device():
    """As torch does where none is named."""
    one, other = (run_processes(2, of_a_backend, name) for name in ("gloo", "cpu:gloo"))
    assert one == other


def uneven(skips: int, overlaps: bool) -> list[Any]:
    """Process 1 leaves out the step of one batch, so process 0 takes one more in the end."""
    join_process_group("gloo", 60)
    rank, model = dist.get_rank(), net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=overlaps)
    for t in range(4):
        if rank == 1 and t == skips:
            continue
        backward(model, t)
        message = refused(optimizer.step)
        if message != "accepted":
            return [t, message]
        optimizer.zero_grad()
    dist.destroy_process_group()
    return []


def made_alone() -> str:
    join_process_group("gloo", 60)
    message = ""
    if dist.get_rank() == 0:
        message = refused(lambda: DLion(net().parameters()))
    dist.destroy_process_group()
    return message


def test_an_optimizer_that_one_process_alone_makes_says_so():
    message = run_processes(2, made_alone)
    assert (
        message.startswith("the processes could not be compared") and "another has ended" in message
    )


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_too_many_is_named_as_soon_as_the_others_have_left(overlaps):
    step, message = run_processes(2, uneven, 1, overlaps)
    assert step == 3
    assert message.startswith("the exchange of step 4 broke off") and LOST in message
