"""NCCL, pretended over a group whose processes talk through gloo."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda.device import Stream, current
from tests.cuda.tensors import CudaTensor, tensors_in

Group = dist.ProcessGroup | None
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_own: dict[str, Callable[..., Any]] = {
    name: getattr(dist, name)
    for name in (
        _GATHER,
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "irecv",
        "isend",
    )
}


class _Work:
    """What an asynchronous collective returns."""

    def __init__(self, stream: Stream, tensors: Sequence[Tensor]) -> None:
        self._stream, self._tensors = stream, tensors  # which torch holds, too, until wait()

    def wait(self, timeout: object = None) -> bool:
        current().stream.wait_stream(self._stream)
        self._tensors = ()
        return True


def _run(
    name: str,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    work: Callable[[list[Tensor], list[Tensor]], Any],
    async_op: bool,
) -> _Work | None:
    """Run a collective: on the current stream, as torch's NCCL does it, or on one of its own.

    ``work`` is given the values of what is read and of what is written.
    """
    for tensor in (*reads, *writes):
        if not isinstance(tensor, CudaTensor):
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: Tensors must be contiguous")
    device = current()
    stream = device.new_stream() if async_op else device.stream
    stream.wait_stream(device.stream)
    sent, received = ([tensor.inner for tensor in side] for side in (reads, writes))
    device.launch(f"nccl::{name}", sent, received, stream)
    with torch._C.DisableTorchFunction():
        work(sent, received)
    return _Work(stream, [*reads, *writes]) if async_op else None


def _all_to_all(
    outputs: list[Tensor], inputs: list[Tensor], group: Group = None, async_op: bool = False
) -> _Work | None:
    return _run("all_to_all", inputs, outputs, lambda i, o: _exchange(i, o, group), async_op)


def _all_to_all_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> _Work | None:
    parts = dist.get_world_size(group)

    def work(sent: list[Tensor], received: list[Tensor]) -> None:
        _exchange([*sent[0].chunk(parts)], [*received[0].chunk(parts)], group)

    return _run("all_to_all_single", [input], [output], work, async_op)


def _all_gather_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> _Work | None:
    parts = dist.get_world_size(group)

    def work(sent: list[Tensor], received: list[Tensor]) -> None:
        _exchange(sent * parts, [*received[0].view(parts, *sent[0].shape)], group)

    return _run(_GATHER, [input], [output], work, async_op)


def _broadcast(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> _Work | None:
    def work(sent: list[Tensor], received: list[Tensor]) -> None:
        _own["broadcast"](sent[0], *args, **kwargs)

    return _run("broadcast", [tensor], [tensor], work, async_op)


def _all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> _Work | None:
    def work(sent: list[Tensor], received: list[Tensor]) -> None:
        _own["all_reduce"](sent[0], *args, **kwargs)

    return _run("all_reduce", [tensor], [tensor], work, async_op)


def _no_such(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("messages between two processes alone are not pretended")


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], group: Group) -> None:
    """Send ``outgoing[q]`` to process q and fill ``incoming[q]`` from it."""
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    incoming[rank].copy_(outgoing[rank])
    others = [q for q in range(processes) if q != rank]
    requests = [
        _own["irecv"](incoming[q], group=group, group_src=q) for q in others if incoming[q].numel()
    ]
    requests += [
        _own["isend"](outgoing[q], group=group, group_dst=q) for q in others if outgoing[q].numel()
    ]
    for request in requests:
        request.wait()


_of_the_host: list[dist.ProcessGroup] = []  # the library keeps groups for as long as there are any


@contextmanager
def nccl(backends: str) -> Iterator[None]:
    """Let ``torch.distributed`` carry pretended tensors.

    Groups that are made with ``backend="gloo"`` carry tensors of the host; all others are as
    ``backends`` says.

    Args:
        backends: what ``get_backend_config`` is to return, such as ``cuda:nccl``. Tensors of the
            host go to gloo if ``cpu`` is among it, and are refused otherwise.
    """
    pretended = {
        _GATHER: _all_gather_single,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "broadcast": _broadcast,
        "irecv": _no_such,
        "isend": _no_such,
    }
    make = dist.new_group

    def config(group: Group = None) -> str:
        return "cpu:gloo" if group in _of_the_host else backends

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, **kwargs: Any
    ) -> Any:
        group = make(ranks, timeout, "gloo", **kwargs)
        if backend == "gloo" and group is not None:
            _of_the_host.append(group)
        return group

    def carried(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            ours = any(isinstance(tensor, CudaTensor) for tensor in tensors_in(args))
            on_host = not ours and "cpu" in config(kwargs.get("group"))
            return (_own if on_host else pretended)[name](*args, **kwargs)

        return collective

    replaced = {name: carried(name) for name in pretended}
    with patch.multiple(dist, get_backend_config=config, new_group=new_group, **replaced):
        yield
