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


def _rows(view):
    n, p, w = view.shape
    s = view.stride(0)
    return view.as_strided((n, p * w), (s, 1)), w


def encode_signs(message, start, momentum, grad, beta1, beta2, positive):
    out, words = _rows(message)
    choose(momentum, grad).encode_signs(out, start, momentum, grad, beta1, beta2, positive, words)


def measure(momentum, grad, beta1, scale):
    return choose(momentum, grad).measure(momentum, grad, beta1, scale)


def encode_levels(message, start, momentum, grad, beta1, beta2, multiplier, largest):
    out, words = _rows(message)
    choose(momentum, grad).encode_levels(
        out, start, momentum, grad, beta1, beta2, multiplier, largest, words
    )


def sum_planes(rows, largest, out):
    r, words = _rows(rows)
    reference.sum_planes(r, 0, words, rows.shape[1], largest, out.view(-1))


def compare_sum(rows, largest, constant, greater, equal):
    r, words = _rows(rows)
    reference.compare_sum(r, 0, words, rows.shape[1], largest, constant, greater, equal)


def pack_votes(greater, equal, out):
    choose(out).pack_votes(greater, equal, out)


def apply_signs(params, answers, lr, wd):
    choose(params).apply_signs(params, answers, lr, wd)


def apply_levels(params, answers, largest, lr, wd):
    choose(params).apply_levels(params, answers.flatten(1), largest, lr, wd)


def apply_trits(params, answers, length, lr, wd):
    choose(params).apply_trits(params, answers, length, lr, wd)


def lion(params, *args):
    choose(params).lion(params, *args)


def descend(params, answer, lr, wd):
    change = answer * -lr
    if params.dtype in (torch.float32, torch.float64):
        params.mul_(1 - lr * wd).add_(change)
    else:
        params.copy_(params.to(torch.float32).mul_(1 - lr * wd).add_(change))
