"""Which parameters are matrices of hidden layers, by name and shape; one may hold several."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from dlion.engine.layout import Member, Slot

# what ViT and GPT here, torchvision, timm, transformers and torchtitan call them
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


def is_hidden(name: str, others: str | None = None) -> bool:
    """Whether a matrix of this name is of a hidden layer; ``others``: a pattern of the others."""
    return not re.search(others or f"{EMBEDDINGS_AND_HEADS}|{TABLES}", name)


def is_matrix(param: Member | Slot) -> bool:
    """Whether a parameter has more than one row and more than one column."""
    return param.tensor.dim() > 1 and min(matrix_shape(param)) > 1


def matrix_shape(param: Member | Slot) -> tuple[int, int]:
    """Return rows and columns [out, rest] of the whole parameter, or of each of its matrices."""
    shape = tensor_shapes(param.name, param.tensor.shape)[0]
    return shape[0], shape[1:].numel()


def tensor_shapes(name: str, shape: torch.Size) -> list[torch.Size]:
    """Return the shapes of the tensors that a parameter holds: those of experts hold one each."""
    return [shape[1:]] * shape[0] if len(shape) == 3 and re.search(EXPERTS, name) else [shape]


def tensors_of(slots: Iterable[Slot], buffers: Iterable[Tensor]) -> list[Tensor]:
    """Return views of each slot's flat buffer in the shapes of the tensors that it holds."""
    found: list[Tensor] = []
    for slot, flat in zip(slots, buffers, strict=True):
        view = slot.view(flat)
        found += [view] if tensor_shapes(slot.name, slot.shape) == [slot.shape] else [*view]
    return found
