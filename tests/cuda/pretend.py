"""A GPU where there is none: :func:`pretended_cuda`.

Tensors say that they are on cuda:0, and hold their values in the memory of the host. What runs is
the library as it is, with the bits of the CPU; what is seen is what a GPU would make of it:

- operations on tensors of several devices;
- accesses to the same memory, on several streams or by the host, without an order between them;
- memory that is freed while another stream may still use it;
- waits of the host for the device, with their place and thread;
- launches of kernels, copies and collectives.

Not seen: what an operation of torch, or a kernel of ours, does inside (each counts as one launch);
threads of autograd (hooks run on the calling thread); and time. The bytes of a strided tensor count
from its first to its last one. What a NumPy array of pinned memory is used for later is not seen:
making one counts as a write.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

import dlion.kernels
from tests.cuda.clocks import Clock
from tests.cuda.collectives import nccl
from tests.cuda.device import Device, Event, made_current
from tests.cuda.kernels import kernels
from tests.cuda.tensors import CudaTensor, Functions, Generator


@contextmanager
def pretended_cuda(backends: str = "cuda:nccl") -> Iterator[Device]:
    """Pretend, in here, that this process has a GPU. Nothing of it is left behind.

    Args:
        backends: of process groups, see :func:`tests.cuda.collectives.nccl`. The groups themselves
            must be gloo's, made inside or before.

    Yields:
        the GPU, whose ``seen`` says what has happened.
    """
    device = Device()
    with ExitStack() as stack:
        stack.enter_context(made_current(device))
        stack.enter_context(_driver(device))
        stack.enter_context(_torch())
        stack.enter_context(_threads(device))
        stack.enter_context(_autograd(device))
        stack.enter_context(_kernels())
        stack.enter_context(nccl(backends))
        stack.enter_context(Functions(device))
        yield device


def _driver(device: Device) -> Any:
    """What ``torch.cuda`` offers."""
    return patch.multiple(
        torch.cuda,
        Event=Event,
        Stream=device.new_stream,
        current_device=lambda: 0,
        current_stream=lambda device_=None: device.stream,
        default_stream=lambda device_=None: device.default_stream,
        device=lambda device_: nullcontext(),
        device_of=lambda tensor: nullcontext(),
        get_device_name=lambda device_=None: "a pretended GPU",
        get_device_properties=lambda device_=None: SimpleNamespace(uuid=os.getpid()),
        is_initialized=lambda: True,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        set_device=lambda device_: None,
        stream=device.on,
        synchronize=device.synchronize,
    )


@contextmanager
def _torch() -> Iterator[None]:
    """What no mode can change, or has to be told to replace parameters that move to a device."""
    from_dlpack, future = torch.from_dlpack, torch.__future__

    def alone(tensor: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, CudaTensor):
            return CudaTensor(tensor.inner.detach())
        return from_dlpack(tensor, **kwargs)

    with (
        patch.multiple(torch, Generator=Generator, from_dlpack=alone),
        patch.object(future, "get_overwrite_module_params_on_conversion", lambda: True),
    ):
        yield


@contextmanager
def _threads(device: Device) -> Iterator[None]:
    """Pretend in the threads of executors, too.

    What is submitted comes after what the submitting thread knows, and is over for whoever asks for
    its result.
    """
    submit, result, exception = ThreadPoolExecutor.submit, Future.result, Future.exception
    ends: WeakKeyDictionary[Future[Any], Clock] = WeakKeyDictionary()

    def submitted(self: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        begin, end = Clock(device.host.clock), Clock()

        def run() -> Any:
            device.host.clock.join(begin)
            try:
                with Functions(device):
                    return function(*args, **kwargs)
            finally:
                end.join(device.host.clock)

        future = submit(self, run)
        ends[future] = end
        return future

    def over(get: Any) -> Any:
        def asked(self: Future[Any], timeout: float | None = None) -> Any:
            try:
                return get(self, timeout)
            finally:
                device.host.clock.join(ends.get(self, Clock()))

        return asked

    with (
        patch.object(ThreadPoolExecutor, "submit", submitted),
        patch.multiple(Future, result=over(result), exception=over(exception)),
    ):
        yield


@contextmanager
def _autograd(device: Device) -> Iterator[None]:
    """Pretend inside a backward pass, too: a mode is off while a function of torch runs."""
    run = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with Functions(device):
            return run(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", backward):
        yield


@contextmanager
def _kernels() -> Iterator[None]:
    compiled = dlion.kernels._compiled
    pretended = {name: kernels(name) for name in ("dlion.kernels", "dlion.rivals.kernels")}

    def choose(device: str, package: str = "dlion.kernels") -> Any:
        return pretended[package] if device == "cuda" else compiled(device, package)

    with patch.object(dlion.kernels, "_compiled", choose):
        yield
