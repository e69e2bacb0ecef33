"""The number formats of parameters and computation."""

import torch
from torch import nn


def in_precision(model: nn.Module, precision: str, device: str) -> nn.Module:
    """Put a model on a device, in a precision.

    ``bf16_mixed`` keeps parameters in float32 and computes matrix products in bfloat16 (autocast).
    ``bf16`` keeps parameters and gradients in bfloat16: with 8 bits of mantissa, updates below
    1/512 of a parameter are lost. With ``bf16_stochastic``, where the optimizer rounds at random,
    they add up. Momentum and numbers in messages are float32 in all of them, and constants of a
    model that are not saved with it (rotary frequencies) keep their precision.
    """
    if precision in ("bf16", "bf16_stochastic"):
        constants = _constants(model)
        model.to(torch.bfloat16)
        for name, value in constants.items():
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, value)
        model.register_forward_pre_hook(_to_bf16)
    elif precision == "bf16_mixed":
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
    return model.to(device)


def _constants(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not saved with the model."""
    saved = model.state_dict()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved}


def _to_bf16(model: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = inputs
    return (x.to(torch.bfloat16) if x.is_floating_point() else x,)
