"""The number formats of parameters and of what a model computes."""

import torch
from torch import nn

PRECISIONS = ("float32", "bf16_mixed", "bf16")


def in_precision(model: nn.Module, precision: str, device: str) -> nn.Module:
    """Put a model on a device, in a precision.

    ``bf16_mixed`` keeps parameters, momentum and updates in float32 and computes matrix products in
    bfloat16 (autocast). ``bf16`` keeps everything in bfloat16, half the memory: with 8 bits of
    mantissa, updates below 1/256 of a parameter are lost.
    """
    if precision == "bf16":
        model.to(torch.bfloat16)
        model.register_forward_pre_hook(_to_bf16)
    elif precision == "bf16_mixed":
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
    return model.to(device)


def _to_bf16(model: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = inputs
    return (x.to(torch.bfloat16) if x.is_floating_point() else x,)
