"""Copies between main memory and a GPU that keep the host from waiting."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Return values in main memory on a device; to a GPU without waiting for it.

    The copy leaves from pinned memory, which torch gives to nobody else before it is over.
    """
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in main memory, in one copy from each device: the host waits once for each.

    Tensors that are there already are returned as they are.
    """
    found = list(tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = [_bytes(tensors[index]) for index in here]
        parts = torch.cat(flat).cpu().split([part.numel() for part in flat])
        for index, part in zip(here, parts, strict=True):
            tensor = tensors[index]
            found[index] = (
                part.clone().view(tensor.dtype).view(tensor.shape)
            )  # aligned for its dtype
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor; one element counts as contiguous whatever its stride is."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def keep_for_this_stream(*tensors: Tensor) -> None:
    """Let tensors that were made on another stream of their GPU be used by the current one.

    Their memory is given to nobody else before what is queued here is over. It does not make this
    stream wait for the other one.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@lru_cache(maxsize=1024)
def index_of(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return places as an index tensor on the device: int64 ``[len(places)]``.

    A list as an index is copied to the GPU at every use, for which the host waits. This is copied
    once, and must not be changed.
    """
    return torch.tensor(places, dtype=torch.int64, device=device)
