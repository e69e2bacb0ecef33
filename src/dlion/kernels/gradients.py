"""The gradients of a bucket as kernels read them: where autograd has left them, all at once."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places:
    """The places of T parameters in the flat buffers of a bucket.

    Attributes:
        spans: ``(start, stop)`` of each, ascending; starts are multiples of 64.
        tables: what kernels have made of the spans, by device.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = tuple(spans)
        self.tables: dict[torch.device, Any] = {}


class Gradients(NamedTuple):
    """The gradients of T parameters, each a vector ``[stop - start]``; None counts as zeros."""

    tensors: Sequence[Tensor | None]
    places: Places

    @classmethod
    def of(cls, *tensors: Tensor) -> "Gradients":
        """Return gradients of parameters that lie side by side, from multiples of 64 on."""
        sizes = [-(-len(tensor) // 64) * 64 for tensor in tensors]
        starts = itertools.accumulate(sizes, initial=0)
        spans = [(start, start + len(t)) for start, t in zip(starts, tensors, strict=False)]
        return cls(tensors, Places(spans))

    @property
    def present(self) -> list[Tensor]:
        """The gradients that there are."""
        return [tensor for tensor in self.tensors if tensor is not None]

    def parts(self, flat: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each parameter's start, its part of a flat vector, and its gradient or zeros."""
        for (start, stop), grad in zip(self.places.spans, self.tensors, strict=True):
            part = flat[start:stop]
            yield start, part, torch.zeros_like(part) if grad is None else grad
