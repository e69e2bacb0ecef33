"""How parameters hold matrices: whole, stacked, stored as [in, out], or fused of several."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlion.core.layout import Slot

# usual names of embeddings and heads, where no model tells: see param_groups
EMBEDDINGS_AND_HEADS = (
    r"embed|(^|\.)(tokens|positions|wte|wpe|conv_proj|shared|relative_attention_bias|\w+_token"
    r"|(\w+_)?emb|(\w+_)?(lm|cls|class|classification|ctc|dist|output|score|value)_head|heads?"
    r"|head_dist|fc|classifier|score|predictions\.decoder|output_projection|pred_layer|lm_loss"
    r"|logits_proj|vocab_projector|sequence_summary)(\.|$)"
    r"|^((model|module|_orig_mod)\.)*(decoder|output|proj_out)\.weight$"
)
# tables of biases, relative positions and decays
TABLES = r"(^|\.)(\w*bias(es)?(_table|_[a-z])?|rel_pos_[hw]|A_log)$"
# of three dimensions [experts, rows, columns]
EXPERTS = r"(^|\.)(\w+_)?experts\.\w+$"


class Matrices(NamedTuple):
    """How a parameter holds matrices; a parameter group has these by the same names.

    Attributes:
        stacked: whether there is a matrix for each index of the first dimension.
        transposed: whether a matrix is stored as [in, out], for ``x @ W``.
        split: the outputs of each of several matrices that are fused, or how many equal ones.
    """

    stacked: bool = False
    transposed: bool = False
    split: int | tuple[int, ...] = 1

    @classmethod
    def of(cls, group: dict[str, Any], name: str, shape: torch.Size) -> "Matrices":
        """Return what a group says of its parameters; without it a stack is known by its name."""
        by_name = len(shape) == 3 and re.search(EXPERTS, name) is not None
        held = cls(group.get("stacked", by_name), group.get("transposed", False))
        return held.cut(group.get("split", 1), name, shape)

    def cut(self, split: int | Iterable[int], name: str, shape: torch.Size) -> "Matrices":
        """Return how a parameter holds matrices that are several fused.

        Raises:
            ValueError: if that is not possible.
        """
        sizes = split if isinstance(split, int | str) else tuple(split)
        numbers = sizes if isinstance(sizes, tuple) else (sizes,)
        if not numbers or any(type(size) is not int or size < 1 for size in numbers):
            raise ValueError(
                f"split={split} of {name or 'a parameter'}: give how many equal matrices it holds,"
                " or the outputs of each"
            )
        held = self if sizes == 1 else self._replace(split=sizes)
        if len(shape) > 1:
            held.shapes(shape, name)
        return held

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of a parameter's values as views, stored as the parameter is."""
        tensors = [*tensor] if self.stacked else [tensor]
        if self.split == 1:
            return tensors
        dim = 1 if self.transposed else 0
        return [part for each in tensors for part in each.split(self._sizes(each.shape[dim]), dim)]

    def shapes(self, shape: torch.Size, name: str = "") -> list[tuple[int, int]]:
        """Return rows (outputs) and columns of each matrix of a parameter of this shape."""
        count, shape = (shape[0], shape[1:]) if self.stacked else (1, shape)
        rows, columns = shape[0], shape[1:].numel()
        if self.transposed:
            rows, columns = columns, rows
        sizes = self._sizes(rows)
        if sum(sizes) != rows:
            of = f" of {name}" * bool(name)
            raise ValueError(f"split={self.split}{of} does not fit a matrix of {rows} outputs")
        return [(size, columns) for size in sizes] * count

    def stored(self, shape: torch.Size) -> list[tuple[int, int]]:
        """Return rows and columns of each matrix as it lies in memory; a vector is one row.

        Args:
            shape: in the order of memory.

        Raises:
            ValueError: for fused matrices whose columns are side by side in memory.
        """
        if self.transposed and self.split != 1:
            raise ValueError(f"split={self.split} of matrices stored as [in, out] needs GMuon")
        if len(shape) < 2:
            return [(1, shape.numel())]
        return self._replace(transposed=False).shapes(shape)

    def _sizes(self, outputs: int) -> list[int]:
        if isinstance(self.split, tuple):
            return [*self.split]
        return [outputs // self.split] * self.split


def are_matrices(shapes: Iterable[tuple[int, int]]) -> bool:
    """Whether all have more than one row and more than one column."""
    return all(min(shape) > 1 for shape in shapes)


def is_hidden(name: str, others: str | None = None) -> bool:
    """Whether a matrix of this name is of a hidden layer; ``others``: a pattern of the others."""
    return not re.search(others or f"{EMBEDDINGS_AND_HEADS}|{TABLES}", name)


def tensors_of(
    slots: Iterable[Slot], buffers: Iterable[Tensor], matrices: Matrices
) -> list[Tensor]:
    """Return views of each slot's flat buffer in the shapes of the matrices that it holds."""
    return [
        view
        for slot, flat in zip(slots, buffers, strict=True)
        for view in matrices.views(slot.view(flat))
    ]
