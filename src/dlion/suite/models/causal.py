"""The order in which a language model sees tokens."""

import torch
from torch import nn

from dlion.errors import TrainingFailed

_LENGTH = 8  # tokens that are tried
_NOISE = 1e-5  # share of the largest logit


@torch.no_grad()
def check_causal(model: nn.Module, vocabulary: int, context: int, device: str) -> None:
    """Refuse a model that sees the tokens that it is to predict, so that its loss means nothing.

    Args:
        model: tokens ``[B, T]`` -> logits ``[B, T, vocabulary]``.
        vocabulary: number of different tokens.
        context: tokens a model sees at once.
        device: where the model is.

    Raises:
        TrainingFailed: in that case.
    """
    if (length := min(context, _LENGTH)) < 2:
        return
    first = (2 + torch.arange(length, device=device)) % vocabulary  # often 0 and 1 are padding
    other = first.clone()
    other[-1] = (first[-1] + 1) % vocabulary
    was_training = model.training
    one, two = model.eval()(torch.stack([first, other]))[:, :-1].float()
    model.train(was_training)
    if (one - two).abs().amax() > _NOISE * one.abs().amax():
        raise TrainingFailed(
            "the model predicts tokens that it has seen, as its attention looks ahead: type"
            " +model.is_decoder=true if it is one of transformers, or choose another"
        )
