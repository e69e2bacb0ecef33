"""Parameters and per-worker gradients as flat buffers: one message, one exchange, one update."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlion.wire import reference


class Bucket:
    """The parameters of one group, dtype and device, laid out one after the other.

    Parameters become views into ``params``, so that an update is a few operations on one long
    vector. Buffers are padded to ``padded`` elements; the padding is always zero on the wire.

    Attributes:
        tensors, names: the parameters and what they are called (``""`` where unnamed).
        group: the optimizer's parameter group; hyperparameters are read from it at every step.
        spans: ``(start, stop)`` of each parameter.
        params: ``[padded]``, in the parameters' dtype.
        grads: float32 ``[k, padded]``, one row for each local worker.
        own: per-worker state, name -> float32 ``[k, padded]``. Never leaves its worker.
        shared: state that is equal everywhere, name -> float32 ``[padded]``.
        present: bool ``[k, T]``, which parameters each worker has a gradient for.
    """

    def __init__(self, tensors: list[torch.nn.Parameter], names: list[str], group: dict):
        self.tensors, self.names, self.group = tensors, names, group
        self.spans: list[tuple[int, int]] = []
        stop = 0
        for tensor in tensors:
            self.spans.append((stop, stop + tensor.numel()))
            stop += tensor.numel()
        self.numel = stop

    def allocate(self, padded: int, local: int, own: list[str], shared: list[str]) -> None:
        """Make the buffers and move the parameters in."""
        first = self.tensors[0]
        device = first.device
        self.params = torch.zeros(padded, dtype=first.dtype, device=device)
        self.grads = torch.zeros(local, padded, device=device)
        self.own = {name: torch.zeros(local, padded, device=device) for name in own}
        self.shared = {name: torch.zeros(padded, device=device) for name in shared}
        self.present = torch.zeros(local, len(self.tensors), dtype=torch.bool)
        self._grad_views = [self.views(row) for row in self.grads]
        self._param_views = self.views(self.params)
        self.adopt()

    def views(self, flat: Tensor) -> list[Tensor]:
        """``[padded]`` -> a view for each parameter, in its shape."""
        return [
            flat[start:stop].view(tensor.shape)
            for tensor, (start, stop) in zip(self.tensors, self.spans, strict=True)
        ]

    def adopt(self) -> None:
        """Point parameters back into the buffer, should anyone have replaced their storage."""
        for tensor, view in zip(self.tensors, self._param_views, strict=True):
            if tensor.data_ptr() != view.data_ptr():
                if tensor.device != view.device or tensor.dtype != view.dtype:
                    raise RuntimeError(
                        f"a parameter moved from {view.dtype} on {view.device} to {tensor.dtype} on"
                        f" {tensor.device}: create the optimizer after model.to(...)"
                    )
                view.copy_(tensor.data)
                tensor.data = view

    def collect(self, worker: int) -> None:
        """Copy the gradients of the latest backward pass into the row of a local worker."""
        row = self._grad_views[worker]
        present = [tensor.grad is not None for tensor in self.tensors]
        grads = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("sparse gradients are not supported: use Embedding(sparse=False)")
        for view, there in zip(row, present, strict=True):
            if not there:
                view.zero_()
        if grads:
            views = [view for view, there in zip(row, present, strict=True) if there]
            torch._foreach_copy_(views, grads)
        self.present[worker] = torch.tensor(present)

    @property
    def header_bytes(self) -> int:
        """Bytes that tell which gradients are there: one bit a parameter, in whole words."""
        return 8 * -(-len(self.tensors) // 64)

    def header(self, worker: int) -> Tensor:
        """The presence bits of a local worker, uint8 ``[header_bytes]``."""
        bits = torch.zeros(8 * self.header_bytes, dtype=torch.bool)
        bits[: len(self.tensors)] = self.present[worker]
        return reference.pack_bits(bits)

    def missing(self, present: Tensor) -> list[int]:
        """The parameters, by index, that bool ``[T]`` says nothing is there for."""
        return [] if bool(present.all()) else (~present).nonzero().flatten().tolist()

    def missing_everywhere(self, headers: Tensor) -> list[int]:
        """The parameters, by index, that no worker has a gradient for: headers uint8 ``[n, h]``."""
        present = reference.unpack_bits(headers.cpu(), len(self.tensors)).any(0)
        return self.missing(present)

    @contextmanager
    def untouched(self, indices: list[int], *flats: Tensor) -> Iterator[None]:
        """Keep the given parameters' part of flat buffers as it was."""
        parts = [flat[slice(*self.spans[i])] for i in indices for flat in flats]
        kept = [part.clone() for part in parts]
        yield
        for part, old in zip(parts, kept, strict=True):
            part.copy_(old)
