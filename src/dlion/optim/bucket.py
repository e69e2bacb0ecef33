"""Parameters and per-worker gradients as flat buffers: one message, one exchange, one update."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dlion.wire import packing

ALIGNMENT = 64  # elements: every parameter starts at a whole word of a one-bit message


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, and their place in some buffer."""

    tensor: torch.nn.Parameter
    start: int
    stop: int
    view: Tensor


class Bucket:
    """Parameters of one group, dtype and device, laid out one after the other.

    Parameters become views into ``params``, so that an update is a few operations on one long
    vector. Each starts at a multiple of 64; the gaps are zero in gradients and never read back.

    Attributes:
        tensors, names: the parameters and what they are called (``""`` where unnamed).
        group: the optimizer's parameter group; hyperparameters are read from it at every step.
        spans: ``(start, stop)`` of each parameter.
        numel: elements, gaps included.
        params: ``[padded]``, in the parameters' dtype.
        own: per-worker state, name -> float32 ``[k, padded]``. Never leaves its worker.
        shared: state that is equal everywhere, name -> float32 ``[padded]``.
    """

    def __init__(self, tensors: list[torch.nn.Parameter], names: list[str], group: dict):
        self.tensors, self.names, self.group = tensors, names, group
        self.device = tensors[0].device
        self.spans: list[tuple[int, int]] = []
        start = 0
        for tensor in tensors:
            self.spans.append((start, start + tensor.numel()))
            start += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
        self.numel = start
        self._row: tuple[Tensor, list[Piece]] | None = None
        self._headers: dict[tuple[tuple[bool, ...], bool], Tensor] = {}

    def allocate(self, padded: int, local: int, own: list[str], shared: list[str]) -> None:
        """Make the buffers and move the parameters in."""
        first = self.tensors[0]
        self.params = torch.zeros(padded, dtype=first.dtype, device=self.device)
        self.own = {name: torch.zeros(local, padded, device=self.device) for name in own}
        self.shared = {name: torch.zeros(padded, device=self.device) for name in shared}
        self._param_views = self.views(self.params)
        self.adopt()

    def views(self, flat: Tensor) -> list[Tensor]:
        """``[padded]`` -> a view for each parameter, in its shape."""
        return [
            flat[start:stop].view(tensor.shape)
            for tensor, (start, stop) in zip(self.tensors, self.spans, strict=True)
        ]

    def spread(self, values: Tensor) -> Tensor:
        """One value a parameter, ``[T]`` -> ``[padded]``, the same for all its elements."""
        starts = [start for start, _ in self.spans] + [len(self.params)]
        sizes = torch.tensor(starts, device=self.device).diff()
        return values.repeat_interleave(sizes, output_size=len(self.params))

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

    def cut(self, rows: Tensor) -> list[Piece]:
        """Where the parameters lie in ``rows``, ``[n, slice]``, a flat buffer cut into slices."""
        size = rows.shape[1]
        pieces = []
        for tensor, (start, stop) in zip(self.tensors, self.spans, strict=True):
            at = start
            while at < stop:
                row, column = divmod(at, size)
                end = min(stop, at + size - column)
                view = rows[row, column : column + end - at]
                pieces.append(Piece(tensor, at - start, end - start, view))
                at = end
        return pieces

    def gradients(self) -> Tensor:
        """The latest gradients in one vector, float32 ``[padded]``; the next call overwrites it."""
        if self._row is None:
            row = torch.zeros(len(self.params), device=self.device)
            self._row = row, self.cut(row.unsqueeze(0))
        row, pieces = self._row
        copy_gradients(pieces)
        return row

    def present(self) -> tuple[bool, ...]:
        """Which parameters have a gradient."""
        return tuple(tensor.grad is not None for tensor in self.tensors)

    def norms(self) -> Tensor:
        """The norm of each gradient, ``[T]``, 0 where there is none."""
        norms = torch.zeros(len(self.tensors), device=self.device)
        there = [i for i, tensor in enumerate(self.tensors) if tensor.grad is not None]
        if there:
            found = torch._foreach_norm([dense(self.tensors[i].grad) for i in there])
            norms[there] = torch.stack(found).to(torch.float32)
        return norms

    @property
    def header_bytes(self) -> int:
        """One bit a parameter (is its gradient there?) and a flag, in whole words."""
        return 8 * -(-(len(self.tensors) + 1) // 64)

    def header(self, present: tuple[bool, ...], flag: bool = False) -> Tensor:
        """The header of a worker's messages, uint8 ``[header_bytes]``."""
        known = self._headers.get((present, flag))
        if known is None:
            bits = torch.zeros(8 * self.header_bytes, dtype=torch.bool)
            bits[: len(present) + 1] = torch.tensor((*present, flag))
            known = self._headers[present, flag] = packing.pack_bits(bits).to(self.device)
        return known

    def read_headers(self, headers: Tensor) -> tuple[list[int], bool]:
        """What all headers ``[n, header_bytes]`` say together.

        Returns:
            The parameters, by index, that no worker has a gradient for, and whether any flag is up.
        """
        usual = self.header((True,) * len(self.tensors))
        if torch.equal(headers, usual.expand_as(headers)):
            return [], False
        *present, flag = packing.unpack_bits(headers.cpu(), len(self.tensors) + 1).any(0).tolist()
        return [i for i, there in enumerate(present) if not there], flag

    @contextmanager
    def untouched(self, indices: list[int], *flats: Tensor) -> Iterator[None]:
        """Keep the given parameters' part of flat buffers as it was."""
        parts = [flat[slice(*self.spans[i])] for i in indices for flat in flats]
        kept = [part.clone() for part in parts]
        yield
        for part, old in zip(parts, kept, strict=True):
            part.copy_(old)


def copy_gradients(pieces: list[Piece]) -> None:
    """Copy the gradients to their places, zero where there is none."""
    views, parts = [], []
    for tensor, start, stop, view in pieces:
        if tensor.grad is None:
            view.zero_()
        else:
            views.append(view)
            parts.append(dense(tensor.grad).flatten()[start:stop])
    if parts:
        torch._foreach_copy_(views, parts)


def dense(grad: Tensor) -> Tensor:
    """The gradient, if it is one that can be flattened."""
    if grad.is_sparse:
        raise RuntimeError("sparse gradients are not supported: use Embedding(sparse=False)")
    return grad
