"""The pretended GPU sees each kind of fault that it is for, and none where all is right."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from tests.cuda.device import Device
from tests.cuda.pretend import pretended_cuda


@pytest.fixture
def gpu() -> Iterator[Device]:
    with pretended_cuda() as device:
        yield device


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count, device="cuda")


def pinned(count: int = 8) -> torch.Tensor:
    return torch.ones(count, pin_memory=True)


def test_ordered_work_on_two_streams_and_copies_that_nobody_waits_for_are_right(gpu: Device):
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    x = pinned().to("cuda", non_blocking=True)
    ready.record()
    with torch.cuda.stream(side):
        ready.wait()
        x.record_stream(side)
        y = (x * 2).to("cpu", non_blocking=True)
        done.record()
    del x
    done.synchronize()
    assert y.tolist() == [2.0] * 8
    assert gpu.seen.faults == []
    assert [sync.kind for sync in gpu.seen.syncs.elements()] == ["Event.synchronize"]
    assert gpu.seen.launches == {"copy HtoD": 1, "aten::mul": 1, "copy DtoH": 1}


# ---- devices


@pytest.mark.parametrize(
    "mix",
    [
        lambda: ones() + torch.ones(8),
        lambda: ones().index_select(0, torch.arange(2)),
        lambda: torch.stack([torch.ones((), device="cuda"), torch.ones(())]),
        lambda: torch.rand(8, generator=torch.Generator(), device="cuda"),
        lambda: torch.rand(8, generator=torch.Generator("cuda")),
    ],
)
def test_mixed_devices(gpu: Device, mix: Callable[[], object]):
    mix()
    assert len(gpu.seen.mixed) == 1


def test_numbers_of_the_host_may_be_mixed_in(gpu: Device):
    x = ones() * torch.tensor(2.0) + 1
    x[2:4] = 5
    assert gpu.seen.faults == []
    assert not gpu.seen.syncs
    assert x.tolist() == [3.0, 3.0, 5.0, 5.0, 3.0, 3.0, 3.0, 3.0]


def test_results_are_where_they_were_asked_for(gpu: Device):
    x = ones()
    assert torch.empty_like(x, device="cpu").device.type == "cpu"
    assert torch.zeros_like(torch.ones(3), device=x.device).is_cuda
    assert x.new_zeros(3).device == x.device == x.view(2, 4)[0].device == torch.device("cuda", 0)
    assert x.cpu().to(torch.float64).device.type == "cpu"
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()


# ---- order


def test_a_race_between_streams(gpu: Device):
    x = ones()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    assert len(gpu.seen.races) == 1


def test_a_stream_that_waits_does_not_race(gpu: Device):
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    assert gpu.seen.faults == []
    x.add_(1)  # behind the default stream, but not behind the other
    assert len(gpu.seen.races) == 1


def test_other_bytes_do_not_race(gpu: Device):
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:4].add_(1)
    x[4:].add_(1)
    assert gpu.seen.faults == []


def test_what_a_thread_is_given_is_ordered_by_its_host_alone(gpu: Device):
    x = ones()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: x.add_(1)).result()  # on the default stream, too
        assert gpu.seen.faults == []
        side = torch.cuda.Stream()

        def on_its_own_stream() -> None:
            with torch.cuda.stream(side):
                x.add_(1)

        pool.submit(on_its_own_stream).result()
    assert len(gpu.seen.races) == 1


# ---- memory


def test_memory_freed_under_another_stream(gpu: Device):
    def use(record: bool) -> None:
        x, side = ones(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if record:
            x.record_stream(side)

    use(record=True)
    assert gpu.seen.faults == []
    use(record=False)
    assert len(gpu.seen.freed) == 1


def test_memory_freed_after_its_own_stream_has_waited(gpu: Device):
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.current_stream().wait_stream(side)
    del x
    assert gpu.seen.faults == []


# ---- the host

INDEX = [0, 2]


@pytest.mark.parametrize(
    ("act", "count"),
    [
        (lambda: torch.ones(8).to("cuda"), 1),
        (lambda: torch.ones(8).to("cuda", non_blocking=True), 1),  # pageable
        (lambda: torch.ones(8).pin_memory().to("cuda"), 1),
        (lambda: torch.ones(8).pin_memory().to("cuda", non_blocking=True), 0),
        (lambda: pinned().to("cuda", torch.float64, non_blocking=True), 1),  # by way of a copy
        (lambda: ones().copy_(pinned(), non_blocking=True), 0),
        (lambda: pinned().copy_(ones(), non_blocking=True), 0),
        (lambda: torch.ones(8).copy_(ones(), non_blocking=True), 1),
        (lambda: torch._foreach_copy_([ones(), ones()], [torch.ones(8), torch.ones(8)]), 2),
        (lambda: torch.tensor([1, 2], device="cuda"), 1),
        (lambda: ones().new_tensor([1, 2]), 1),
        (lambda: torch.full((3,), 2.0, device="cuda"), 0),
        (lambda: ones()[INDEX], 1),
        (lambda: ones().__setitem__(INDEX, 0.0), 1),
        (lambda: ones()[torch.arange(2)], 1),
        (lambda: ones()[torch.arange(2, device="cuda")], 0),
        (lambda: ones()[ones() > 0], 1),
        (lambda: ones().masked_select(ones() > 0), 1),
        (lambda: ones().nonzero(), 1),
        (lambda: ones().nonzero_static(size=8), 0),
        (lambda: ones().repeat_interleave(torch.ones(8, dtype=torch.int64, device="cuda")), 1),
        (lambda: ones().cpu(), 1),
        (lambda: ones().to("cpu", non_blocking=True), 0),
        (lambda: ones().tolist(), 1),
        (lambda: ones().sum().item(), 1),
        (lambda: bool(ones().all()), 1),
        (lambda: torch.equal(ones(), ones()), 1),
        (lambda: torch.cuda.current_stream().synchronize(), 1),
        (lambda: torch.cuda.Event().synchronize(), 1),
        (lambda: torch.cuda.synchronize(), 1),
    ],
)
def test_waits_of_the_host(gpu: Device, act: Callable[[], object], count: int):
    act()
    assert gpu.seen.waits("main") == sum(gpu.seen.syncs.values()) == count
    assert gpu.seen.faults == []


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        lambda y: y[0].item(),
        lambda y: y.view(2, 4)[1].tolist(),
        lambda y: y.split(4)[0].numpy(),
        lambda y: y + 1,
        lambda y: y.to(torch.int32),
        lambda y: bool(y[3]),
    ],
)
def test_a_copy_is_read_before_it_has_arrived(gpu: Device, read: Callable[[torch.Tensor], object]):
    x, arrived = ones(), torch.cuda.Event()
    y = x.to("cpu", non_blocking=True)
    arrived.record()
    y.view(2, 4).shape  # noqa: B018 - which reads nothing
    assert gpu.seen.faults == []
    read(y)
    assert len(gpu.seen.races) == 1
    gpu.seen.clear()
    arrived.synchronize()
    read(y)
    assert gpu.seen.faults == []


def test_an_event_from_before_the_copy_does_not_help(gpu: Device):
    x, early = ones(), torch.cuda.Event()
    early.record()
    y = x.to("cpu", non_blocking=True)
    early.synchronize()
    y.tolist()
    assert len(gpu.seen.races) == 1


def test_pinned_memory_is_overwritten_before_it_has_left(gpu: Device):
    staging = pinned()
    x = staging.to("cuda", non_blocking=True)
    staging.fill_(2)
    assert len(gpu.seen.races) == 1
    gpu.seen.clear()
    torch.cuda.current_stream().synchronize()
    staging.fill_(3)
    assert staging.is_pinned()
    assert not x.is_pinned()
    assert gpu.seen.faults == []


def test_who_waits(gpu: Device):
    x = torch.nn.Parameter(ones())

    def hook(parameter: torch.Tensor) -> None:
        parameter.grad.cpu()

    x.register_post_accumulate_grad_hook(hook)
    x.square().sum().backward()
    with ThreadPoolExecutor(1, "exchange") as pool:
        pool.submit(x.detach().cpu).result()
    x.detach().cpu()
    assert [sync.thread for sync in gpu.seen.syncs.elements()] == ["hook", "exchange", "main"]


# ---- NCCL, and the rest


def test_nccl_takes_whole_tensors_of_the_device_alone(gpu: Device):
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        out = torch.zeros(8, device="cuda")
        dist.all_to_all([out], [ones()])
        assert out.tolist() == [1.0] * 8
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_to_all([torch.zeros(8)], [torch.ones(8)])
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_to_all([out[::2]], [ones(4)])
        work = dist.all_to_all([out], [ones()], async_op=True)
        out.add_(1)
        assert len(gpu.seen.races) == 1
        gpu.seen.clear()
        work.wait()
        out.add_(1)
        assert gpu.seen.faults == []
    finally:
        dist.destroy_process_group()


def test_nothing_is_left_behind():
    def names() -> list[object]:
        functions = [torch.Generator, torch.from_dlpack, dist.all_to_all, ThreadPoolExecutor.submit]
        return [*functions, torch.cuda.Event, torch.cuda.Stream, torch.cuda.current_stream]

    before = names()
    with pretended_cuda(), pytest.raises(ZeroDivisionError):
        ones().sum() / 0 + 1 // 0
    assert names() == before
    if not torch.cuda.is_available():
        error, words = AssertionError, "not compiled with CUDA"
        if torch.backends.cuda.is_built():
            error, words = RuntimeError, "Found no NVIDIA driver|No CUDA GPUs"
        with pytest.raises(error, match=words):
            ones()
