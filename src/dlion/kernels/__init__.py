"""The passes over memory that a step of distributed Lion consists of, fused.

Each function exists as plain torch (:mod:`.reference`, the specification, for every device and
dtype), for CPUs (:mod:`.numba_cpu`) and for CUDA (:mod:`.triton_cuda`); the arguments decide which
runs. ``DLION_KERNELS=reference`` in the environment always takes the reference.
"""

import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from dlion.kernels import reference


def choose(*tensors: Tensor) -> ModuleType:
    """The fastest module that takes the given vectors, of values or of messages."""
    if not all(t.dtype in _DTYPES and t.is_contiguous() for t in tensors):
        return reference
    return _compiled(tensors[0].device.type)


_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@cache
def _compiled(device: str) -> ModuleType:
    if os.environ.get("DLION_KERNELS") == "reference":
        return reference
    if device == "cpu":
        from dlion.kernels import numba_cpu

        return numba_cpu
    if device == "cuda" and importlib.util.find_spec("triton"):  # torch brings it along
        from dlion.kernels import triton_cuda

        return triton_cuda
    return reference
