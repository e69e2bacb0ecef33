"""Models and optimizers behave as torch's: saving, copying, dtypes, layouts, clipping, scaling."""

import contextlib
import copy
import gc
import io
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_model

from dlion.errors import TrainingFailed
from dlion.optim import (
    DGC,
    DeMo,
    DiLoCo,
    DLion,
    DLionADM,
    EF21Sign,
    EFSignSGD,
    GAdamW,
    GLion,
    GMuon,
    GradDrop,
    LionCub,
    OneBitAdam,
    PowerSGD,
    Signum,
    TernGrad,
)
from dlion.workers import Workers
from tests.support.methods import of_all

LION = [GLion, DLion, Signum, LionCub, EF21Sign, DLionADM]
EVERY = [*LION, GAdamW, TernGrad, GradDrop, DGC, EFSignSGD, GMuon, PowerSGD, OneBitAdam, DeMo]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(50, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3))


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    for t in range(steps):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------ saving and copying


def test_a_trained_model_is_saved_as_small_as_any_other(tmp_path):
    model = net()
    train(model, DLion(model.parameters(), bucket_cap_mb=None))
    save_model(model, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    sizes = []
    for bias in (net()[2].bias, model[2].bias):
        buffer = io.BytesIO()
        torch.save(bias, buffer)
        sizes.append(len(buffer.getvalue()))
    assert sizes[1] == sizes[0]


def test_a_copy_of_the_model_is_independent():
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2)
    train(model, optimizer)
    average, before = copy.deepcopy(model), flat(model)
    train(model, optimizer)
    assert torch.equal(flat(average), before) and not torch.equal(flat(model), before)


@pytest.mark.slow
def test_a_destroyed_process_group_leaves_no_threads(tmp_path):
    """Else one of them may abort the process when Python ends, after a checkpoint above all."""
    script = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from dlion import DLion
model = torch.nn.Linear(9, 5)
optimizer = DLion(model.parameters())
def train():
    model(torch.ones(3, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train()
weights, state = get_state_dict(model, optimizer)
both = {"model": weights, "optimizer": state}
dcp.save(both, checkpoint_id="one")
dcp.async_save(both, checkpoint_id="two").result()
for folder in ("one", "two"):
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train()
tasks = "/proc/self/task"
names = lambda: {open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks)}
assert any("gloo" in name for name in names())
dist.destroy_process_group()
assert not any("gloo" in name for name in names()), names()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr


def test_an_optimizer_that_is_dropped_gives_everything_back():
    model = net()
    threads = threading.active_count()
    for _ in range(5):
        optimizer = DLion(model.parameters(), overlap=True)
        train(model, optimizer)
        del optimizer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("exchange"):
            thread.join(10)
    assert threading.active_count() == threads
    assert not model[0].weight._post_accumulate_grad_hooks


@of_all
def test_an_optimizer_is_freed_when_nobody_holds_it(method, cls, options):
    """Not by the garbage collector: that gives groups back at other moments in each process."""
    model = net()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_gradients_that_come_and_go_cost_no_memory():
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(30)]
    optimizer = GLion(params)

    def step(t: int) -> None:
        for index, param in enumerate(params):
            param.grad = torch.ones(3) if t >> index & 1 else None
        optimizer.step()

    for t in range(50):
        step(t)
    gc.collect()
    before = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    for t in range(50, 250):
        step(t)
    gc.collect()
    after = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    assert after <= before + 30


# ------------------------------------------------------------------ dtypes, shapes and layouts


@pytest.mark.parametrize("cls", EVERY)
def test_float64_parameters_keep_their_precision(cls):
    values = torch.full((10, 7), 1 / 3, dtype=torch.float64)
    param = torch.nn.Parameter(values.clone())
    optimizer = cls([param], lr=0.0)
    for _ in range(3):
        param.grad = torch.randn(10, 7, dtype=torch.float64)
        optimizer.step()
    assert torch.equal(param.detach(), values)
    optimizer.param_groups[0]["lr"] = 1e-2
    param.grad = torch.randn(10, 7, dtype=torch.float64)
    optimizer.step()
    assert param.dtype == torch.float64 and not torch.equal(param.detach(), values)


@pytest.mark.parametrize("cls", EVERY)
def test_channels_last_convolutions_keep_their_layout_and_learn_the_same(cls):
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        convolutions = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        model = torch.nn.Sequential(*convolutions).to(memory_format=layout)
        options = {"density": 1.0} if cls in (DGC, GradDrop) else {}
        optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
        for t in range(4):
            generator = torch.Generator().manual_seed(t)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
                param.grad = param.grad.to(memory_format=layout) if param.dim() == 4 else param.grad
            optimizer.step()
        weights = [param for param in model.parameters() if param.dim() == 4]
        assert all(weight.is_contiguous(memory_format=layout) for weight in weights)
        state = optimizer.state[weights[0]]
        own = [v for k, v in state.items() if v.dim() > 2 and not k.startswith("exchange.")]
        assert all(v.shape[-4:] == weights[0].shape for v in own)
        results.append(flat(model))
    if cls in (TernGrad, PowerSGD, DeMo):  # draws and tiles belong to places in memory
        return
    torch.testing.assert_close(*results, rtol=0, atol=0 if cls is not LionCub else 1e-6)


def test_large_half_precision_gradients_are_finite():
    param = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    optimizer = DLion([param], nonfinite="skip")
    param.grad = torch.full_like(param, 1000.0)
    optimizer.step()
    assert optimizer.skipped == 0 and param.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_every_precision_are_looked_at(dtype):
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = DLion([param], lr=1e-2, nonfinite="skip")
    for value, skipped in ((1.0, 0), (float("nan"), 1), (float("inf"), 2)):
        param.grad = torch.full_like(param, value)
        optimizer.step()
        assert optimizer.skipped == skipped
    assert param.isfinite().all()


@pytest.mark.parametrize(("rank", "processes", "local"), [(0, 1, 0), (-1, 2, 1), (2, 2, 1)])
def test_workers_that_cannot_be(rank, processes, local):
    with pytest.raises(ValueError, match="is not possible"):
        Workers(rank, processes, local)


# ------------------------------------------------------------------ what happens during a step


@pytest.mark.parametrize("cls", [DLion, GAdamW, PowerSGD, DiLoCo])
def test_a_compiled_step_breaks_the_graph_and_spoils_nothing(cls):
    results = []
    for compiled in (False, True):
        model = net()
        optimizer = cls(model.parameters(), lr=1e-2, overlap=compiled and cls is DLion)

        def step(model=model, optimizer=optimizer) -> None:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="eager") if compiled else step
        run(), step(), run()
        results.append(flat(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("late", [5, 500])
def test_g_adamw_counts_the_steps_of_each_parameter(late):
    ours, theirs = net(), net()
    optimizer = GAdamW(ours.parameters(), lr=1e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    for t in range(late + 5):
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            backward(model, t)
            if t < late:
                model[0].weight.grad = None
            each.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-6)
    steps = [int(optimizer.state[p]["step"]) for p in ours.parameters()]
    assert steps == [int(reference.state[p]["step"]) for p in theirs.parameters()]


@pytest.mark.parametrize("change", ["clip", "replace"])
def test_with_overlap_gradients_that_change_too_late_are_refused(change):
    model = net()
    optimizer = DLion(model.named_parameters(), overlap=True, bucket_cap_mb=1e-3)
    backward(model)
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        model[2].bias.grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"gradient of \S+ was changed .* overlap=False"):
        optimizer.step()


def test_clipping_works_without_overlap():
    one, two = net(), net()
    first, second = GLion(one.parameters(), lr=1e-2), GLion(two.parameters(), lr=1e-2)
    backward(one), backward(two)
    torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
    total = torch.cat([p.grad.flatten() for p in two.parameters()]).norm()
    for param in two.parameters():
        param.grad *= 1e-3 / (total + 1e-6)
    first.step(), second.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first.state[p]["momentum"], second.state[q]["momentum"])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("planted")


def test_with_overlap_a_backward_pass_that_failed_can_be_tried_again():
    model, plain = net(), net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True, bucket_cap_mb=1e-3)
    with pytest.raises(MemoryError, match="planted"):
        model[2](Fails.apply(model[1](model[0](torch.randn(8, 50))))).square().mean().backward()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    other = DLion(plain.parameters(), lr=1e-2)
    backward(plain)
    other.step()
    assert torch.equal(flat(model[0]), flat(plain[0]))  # the last layer's had left before
    assert torch.equal(train(model, optimizer)[-3:].sign(), flat(model)[-3:].sign())


@pytest.mark.parametrize("way", ["no_sync", "frozen", "nothing"])
def test_with_overlap_a_pass_through_another_models_parameters_does_not_count(way):
    """A generator learns through a discriminator, which learns in a pass of its own."""
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        g, d = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
        both = [DLion(m.parameters(), lr=1e-2, overlap=overlap) for m in (g, d)]
        for t in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(t))
            d.requires_grad_(way != "frozen")
            with both[1].no_sync() if way == "no_sync" else contextlib.nullcontext():
                d(g(x)).mean().backward()
            both[0].step()
            d.requires_grad_(True)
            if overlap and way == "nothing":
                with pytest.raises(RuntimeError, match=r"no_sync\(\).*requires_grad_\(False\)"):
                    both[1].zero_grad()
                return
            both[0].zero_grad(), both[1].zero_grad()
            d(g(x).detach()).square().mean().backward()
            both[1].step()
            both[1].zero_grad()
        results.append(torch.cat([flat(g), flat(d)]))
    assert torch.equal(*results)


def test_with_overlap_a_batch_that_was_sent_cannot_be_skipped():
    model = net()
    optimizer = DLion(model.parameters(), overlap=True)
    backward(model)
    with pytest.raises(RuntimeError, match="whose messages have left, before step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_groups_are_added_between_steps_only():
    model, late = net(), torch.nn.Parameter(torch.zeros(3))
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True)
    backward(model)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        optimizer.add_param_group({"params": [late]})
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="lr=-1 is not possible"):
        optimizer.add_param_group({"params": [late], "lr": -1})
    optimizer.add_param_group({"params": [late]})  # as if that had not been
    (late.sum() + model(torch.randn(8, 50)).mean()).backward()
    optimizer.step()
    assert late.abs().min() > 0


def test_a_state_that_was_saved_after_unfreezing_is_loaded_after_unfreezing():
    def start() -> tuple[torch.nn.Module, DLion]:
        model = net()
        model[0].requires_grad_(False)
        return model, DLion(model.parameters(), lr=1e-2)

    model, optimizer = start()
    train(model, optimizer)
    model[0].requires_grad_(True)
    train(model, optimizer)
    other, resumed = start()
    with pytest.raises(ValueError, match="parameter 0 is frozen, and was trained when the state"):
        resumed.load_state_dict(optimizer.state_dict())
    other[0].requires_grad_(True)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(train(other, resumed), train(model, optimizer))


def test_clipping_over_several_buckets_is_refused_whenever_they_come():
    model = net()
    optimizer = DGC(model.parameters(), clip_norm=1.0)
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="needs the whole gradient"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("before_step", [False, True])
def test_a_grad_scaler_leaves_no_trace_in_the_momentum(before_step):
    one, two = net(), net()
    scaled, plain = DLion(one.parameters(), lr=1e-2), DLion(two.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for t in range(6):
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(t))
        scaler.scale(one(x).square().mean() * (float("inf") if t == 2 else 1)).backward()
        if before_step:
            scaler.unscale_(scaled)
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9)
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        if t != 2:
            two(x).square().mean().backward()
            plain.step()
            plain.zero_grad()
    assert torch.equal(flat(one), flat(two))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(scaled.state[p]["momentum"], plain.state[q]["momentum"])


@pytest.mark.parametrize("options", [{"overlap": True}, {"workers": Workers(local=2)}])
def test_a_grad_scaler_that_cannot_work_says_so(options):
    model = net()
    optimizer = DLion(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.randn(8, 50)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="overlap=False and one worker a process"):
        scaler.step(optimizer)


def test_with_overlap_a_backward_pass_while_all_are_absent_is_ignored():
    model = net()
    optimizer = DLion(model.parameters(), lr=1e-2, overlap=True, workers=Workers(local=2))
    optimizer.set_participants([1])
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    backward(model)
    optimizer.collect(1)
    optimizer.step()
    assert not torch.equal(flat(model), before)


def test_weights_handed_to_another_process_are_trained_on():
    """torch moves a storage into shared memory in place."""
    model = net()
    optimizer = DLion(model.parameters(), lr=0.1)
    for shares in (False, True, False):
        if shares:
            model.share_memory()
        before = [param.detach().clone() for param in model.parameters()]
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for param, old in zip(model.parameters(), before, strict=True):
            assert ((param - old).abs() > 0.09).all()


def show(model: torch.nn.Module, pipe) -> None:
    while pipe.recv():
        pipe.send(flat(model).tolist())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cls", [DLion, DiLoCo])
def test_another_process_sees_a_model_in_shared_memory_being_trained(cls, late):
    model = net()
    if not late:
        model.share_memory()
    optimizer = cls(model.parameters(), lr=0.1)
    if late:
        model.share_memory()
        train(model, optimizer, 1)
    context = torch.multiprocessing.get_context("fork")
    here, there = context.Pipe()
    evaluator = context.Process(target=show, args=(model, there), daemon=True)
    evaluator.start()
    before = flat(model).tolist()
    train(model, optimizer)
    here.send(True)
    assert here.poll(60)
    assert before != here.recv() == flat(model).tolist()
    here.send(False)
    evaluator.join()


def test_a_model_of_another_dtype_is_refused_before_anything_moves():
    model = net()
    optimizer = DLion(model.parameters(), lr=0.1)
    backward(model)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    model.to(torch.float64)
    with pytest.raises(RuntimeError, match="create the optimizer after"):
        optimizer.step()
    model.to(torch.float32)
    assert not any(state["momentum"].any() for state in optimizer.state.values())
    optimizer.step()
    assert not torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)


def test_half_a_step_is_not_gone_on_with():
    model = net()
    optimizer = DLion(model.parameters(), lr=0.1, nonfinite="stop")
    saved = copy.deepcopy(optimizer.state_dict())
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.nan)
    with pytest.raises(TrainingFailed, match="not finite"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="it is of another method"):
        optimizer.load_state_dict(Signum(net().parameters()).state_dict())
    with pytest.raises(RuntimeError, match="an earlier step failed half-way"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    after = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(after, before - 0.1)


def test_edited_groups_are_refused():
    model = net()
    optimizer = DLion([{"params": [param]} for param in model.parameters()])
    group = optimizer.param_groups.pop()
    with pytest.raises(RuntimeError, match="param_groups were edited"):
        optimizer.step()
    optimizer.param_groups.append(group)
    optimizer.step()
    group["params"][0] = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="param_groups were edited"):
        optimizer.step()


def test_with_overlap_rates_are_set_before_the_backward_pass():
    model = net()
    optimizer = DLion(model.parameters(), overlap=True)
    model(torch.ones(1, 50)).sum().backward()
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    with pytest.raises(RuntimeError, match="set it before backward"):
        optimizer.step()


def test_frozen_parameters_may_be_anything():
    model = net()
    model.codes = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    model.wide = torch.nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
    group = {"params": model.parameters(), "owner": object()}
    DLion([group]).step()


def test_shards_of_fsdp1_are_refused():
    shard = torch.nn.Parameter(torch.zeros(4))
    shard._fsdp_flattened = True
    with pytest.raises(ValueError, match="use fully_shard"):
        DLion([shard])


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_that_a_launcher_has_started_does_not_train_alone(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = DLion([param], lr=0.1)
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        optimizer.step()
