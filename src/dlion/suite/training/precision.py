"""The number formats of parameters and computation."""

import time

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


def describe(precision: str, device: str) -> str:
    """Name a precision, and say if this CPU multiplies far more slowly in it than in float32."""
    slower = _seconds(torch.bfloat16) / _seconds(torch.float32) if device == "cpu" else 1
    if slower < 2:
        return precision
    return f"{precision}; products take {slower:.0f} times as long as in float32 on this CPU"


def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest of three products of two matrices of 128 rows and columns."""
    matrix, found = torch.ones(128, 128, dtype=dtype), []
    for _ in range(3):
        begun = time.perf_counter()
        matrix @ matrix
        found.append(time.perf_counter() - begun)
    return min(found)


def _constants(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not saved with the model."""
    saved = model.state_dict()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved}


def _to_bf16(model: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = inputs
    return (x.to(torch.bfloat16) if x.is_floating_point() else x,)
