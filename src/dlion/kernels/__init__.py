"""The passes over memory that a step of distributed Lion consists of, fused.

Each pass exists in plain torch (``reference.py``, the specification, for every device and dtype),
for CPUs (``numba_cpu.py``) and for CUDA (``triton_cuda.py``); device and dtype decide which of
them runs. ``DLION_KERNELS=reference`` in the environment always takes the reference, as does
``NUMBA_DISABLE_JIT=1`` on a CPU, and a machine with CUDA where Triton cannot work, after a warning.

All give the same bits: each product and each sum is rounded to float32 by itself (there is no fused
multiply-add), bfloat16 gradients are widened first, and bfloat16 parameters are rounded once, to
nearest even, at the end. Only :func:`measure` adds in an order of its own.

A message consists of 64-bit words in n rows, one for the owner of each slice of ``64 * words``
elements, so that element e belongs to row ``e // (64 * words)``. An integer of p bits takes p
planes of ``words`` words, plane b holding bit b (:mod:`dlion.wire.packing`). Messages may be views
of longer rows, in which a header follows: only the words of a plane must lie side by side.
"""

import importlib
import importlib.util
import itertools
import os
import shutil
import sysconfig
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dlion.kernels import reference
from dlion.kernels.gradients import Gradients, Places
from dlion.kernels.steps import Coder, nearest_level, step_size

__all__ = [
    "Coder",
    "Gradients",
    "Places",
    "apply_levels",
    "apply_signs",
    "apply_signs_by_run",
    "apply_trits",
    "choose",
    "compare_sum",
    "decode_deltas",
    "descend",
    "encode_deltas",
    "encode_levels",
    "encode_signs",
    "lion",
    "measure",
    "nearest_level",
    "pack_votes",
    "round_at_random",
    "step_size",
    "sum_planes",
]


def encode_signs(
    message: Tensor,
    momentum: Tensor,
    gradients: Gradients,
    beta1: float,
    beta2: float,
    positive: bool,
) -> None:
    """Update a worker's momentum and write the signs of its Lion direction, in one pass.

    The direction is ``u = b1 m + (1 - b1) g`` with the old momentum; ``m <- b2 m + (1 - b2) g``.

    Args:
        message: int64 ``[n, 1, words]``. The bits between the end of a parameter and the next
            multiple of 64 become zero.
        momentum: of the whole bucket, float32 ``[d]``, updated in place.
        gradients: of the parameters of the bucket.
        positive: whether 0, -0.0 and NaN, for which one bit has no room, are encoded as +1.
    """
    module = choose(momentum, *gradients.tensors)
    module.encode_signs(message, momentum, gradients, beta1, beta2, positive)


def measure(momentum: Tensor, gradients: Gradients, beta1: float, scale: str) -> Tensor:
    """Return the scale of each parameter's direction u: float32 ``[T]``.

    ``l1`` is the mean of ``|u|``, ``max`` its maximum, ``geometric`` its geometric mean over the
    entries that are not zero, or 1 without any. Sums are in float64. The result is NaN if any entry
    is NaN, and 0 if there are no entries.
    """
    module = choose(momentum, *gradients.tensors)
    return module.measure(momentum, gradients, beta1, scale)


def encode_levels(
    message: Tensor,
    momentum: Tensor,
    gradients: Gradients,
    beta1: float,
    beta2: float,
    multipliers: Tensor,
    largest: int,
) -> None:
    """Update the momentum and write ``clip(round(u * multiplier), -largest, largest) + largest``.

    Halves round to even; NaN becomes the middle level, which abstains.

    Args:
        message: int64 ``[n, planes, words]``, with the planes that ``2 * largest`` needs.
        momentum, gradients: as for :func:`encode_signs`.
        multipliers: of each parameter, float32 ``[T]``, on the device of the gradients.
        largest: at most 127.
    """
    module = choose(momentum, *gradients.tensors)
    module.encode_levels(message, momentum, gradients, beta1, beta2, multipliers, largest)


def sum_planes(rows: Tensor, largest: int, out: Tensor) -> None:
    """Add n messages, ``[n, planes, words]``, without unpacking them.

    Args:
        rows: int64, integers from 0 to ``largest`` each.
        out: int64 ``[q, words]``, the planes of the sum, ``q = (n * largest).bit_length()``.
    """
    _compiled(rows.device.type).sum_planes(rows, largest, out)


def compare_sum(rows: Tensor, largest: int, constant: int, greater: Tensor, equal: Tensor) -> None:
    """Add n messages as :func:`sum_planes` does and compare the sums with a constant.

    Args:
        greater, equal: the results, a bit for each sum: int64 ``[words]``.
    """
    _compiled(rows.device.type).compare_sum(rows, largest, constant, greater, equal)


def pack_votes(greater: Tensor, equal: Tensor, out: Tensor) -> None:
    """Pack masks as trits: 1 where ``greater``, 0 where ``equal``, else -1.

    Args:
        greater, equal: int64 ``[words]``; no bit is set in both.
        out: uint8 ``[ceil(64 * words / 5)]``.
    """
    _compiled(greater.device.type).pack_votes(greater, equal, out)


def encode_deltas(
    message: Tensor,
    momentum: Tensor,
    gradients: Gradients,
    coder: Coder,
    beta1: float,
    beta2: float,
    rise: int,
) -> None:
    """Update a worker's momentum and delta-modulate its Lion direction, in one pass.

    A bit is 1 where ``u >= h``; see :func:`decode_deltas` for what follows from it. NaN gives 0.

    Args:
        message: int64 ``[n, 1, words]``.
        momentum, gradients, beta1, beta2: as for :func:`encode_signs`. The elements between the
            end of a parameter and the next multiple of 64 have a direction of 0.
        coder: the worker's, of all elements of the message.
        rise: levels gained, see :func:`decode_deltas`.
    """
    module = choose(momentum, *gradients.tensors)
    module.encode_deltas(message, momentum, gradients, coder, beta1, beta2, rise)


def decode_deltas(
    messages: Tensor,
    rows: Tensor,
    coders: Coder,
    weights: Tensor | None,
    rise: int,
    lookahead: float,
    positive: Tensor,
    tied: Tensor,
) -> None:
    """Follow the messages of delta modulation about one slice, and find the sign of their sum.

    A bit that differs from the worker's last one lowers its level by 1, the second equal one leaves
    it, and every later one raises it by ``rise``, within 0 and 255. Then the estimate moves by
    :func:`step_size` of the level, up for 1 and down for 0. The sign is that of
    ``sum h + lookahead * sum (steps of the senders)``, added from worker 0 to n - 1.

    Args:
        messages: int64 ``[m, 1, words]`` of the senders.
        rows: for each worker the row of its message, -1 without one: int64 ``[n]``, on the device
            of the messages.
        coders: of the n workers. If ``weights`` is None, the estimate is their sum,
            ``[1, 64 * words]``, up to the rounding of its own additions.
        weights: of the workers' estimates and steps in the sum, float32 ``[n]``.
        positive, tied: the results, a bit for each sum that is above, or equal to, 0: int64
            ``[words]``.
    """
    module = _compiled(messages.device.type)
    module.decode_deltas(messages, rows, coders, weights, rise, lookahead, positive, tied)


def descend(params: Tensor, answer: Tensor, lr: float, weight_decay: float) -> None:
    """``x <- (1 - lr wd) x - lr a``, in place: descent with decoupled weight decay.

    The step ``lr a`` is rounded to float32; the rest is in float32 for parameters of fewer bits,
    and in float64 for those of float64.

    Args:
        answer: float32 ``[m]``.
    """
    reference.descend(params, answer, lr, weight_decay)


def apply_signs(params: Tensor, answers: Tensor, lr: float, weight_decay: float) -> None:
    """Decode votes ``[n, words]`` and :func:`descend` on ``[m]`` parameters, in one pass."""
    choose(params, length=params.numel()).apply_signs(params, answers, lr, weight_decay)


def apply_signs_by_run(
    params: Tensor, answers: Tensor, edges: Sequence[int], rates: Sequence[tuple[float, float]]
) -> None:
    """:func:`apply_signs` with other rates from place to place.

    Args:
        edges: where each run of parameters begins, and the last ends, multiples of 64.
        rates: of each run, the learning rate and the weight decay.
    """
    module = choose(params, length=params.numel())
    if hasattr(module, "apply_signs_by_run"):
        module.apply_signs_by_run(params, answers, edges, rates)
        return
    answers = answers.reshape(1, -1)
    for (start, stop), run in zip(itertools.pairwise(edges), rates, strict=True):
        module.apply_signs(params[start:stop], answers[:, start // 64 : stop // 64], *run)


def apply_levels(
    params: Tensor, answers: Tensor, largest: int, lr: float, weight_decay: float
) -> None:
    """Decode sums v, 0 to ``largest``, and :func:`descend` on ``2 v / largest - 1``, in one pass.

    Args:
        answers: int64 ``[n, planes, words]``, with the planes that ``largest`` needs.
    """
    module = choose(params, length=params.numel())
    module.apply_levels(params, answers, largest, lr, weight_decay)


def apply_trits(
    params: Tensor, answers: Tensor, length: int, lr: float, weight_decay: float
) -> None:
    """Decode trits and :func:`descend` on them, in one pass.

    Args:
        answers: uint8 ``[n, ceil(length / 5)]``.
        length: the number of values in a row.
    """
    module = choose(params, length=params.numel() | length)
    module.apply_trits(params, answers, length, lr, weight_decay)


def lion(
    params: Tensor,
    momentum: Tensor,
    grad: Tensor,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
) -> None:
    """Take a step of Lion itself in one pass: :func:`descend` on ``sign(u)``, the new momentum.

    ``u`` and the momentum are those of :func:`encode_signs`; the sign of 0 and of NaN is 0.
    """
    module = choose(params, momentum, grad)
    module.lion(params, momentum, grad, beta1, beta2, lr, weight_decay)


def round_at_random(params: Tensor, values: Tensor, key: tuple[int, int]) -> None:
    """Round float32 values to bfloat16, up or down at random: the mean is the value itself.

    What bfloat16 can represent stays as it is. The 16 random bits of a place are a hash of the
    place and the key, so every process and device that has the key draws the same.

    Args:
        params: bfloat16 ``[m]``, overwritten.
        values: float32 ``[m]``.
        key: two integers of 32 bits.
    """
    choose(params, values).round_at_random(params, values, key)


def choose(
    first: Tensor, *vectors: Tensor | None, length: int = 0, package: str = __name__
) -> ModuleType:
    """Return the fastest module of a package that takes the vectors, as far as there are any.

    Compiled kernels decode whole words, so a ``length`` that is no multiple of 64 is not for them.
    """
    plain = torch.float32, torch.bfloat16
    for vector in (first, *vectors):
        if vector is not None and not (vector.dtype in plain and vector.is_contiguous()):
            return _module(package, "reference")
    if length % 64:
        return _module(package, "reference")
    return _compiled(first.device.type, package)


@cache
def _compiled(device: str, package: str = __name__) -> ModuleType:
    return _module(package, _kind(device))


def _module(package: str, kind: str) -> ModuleType:
    return importlib.import_module(f"{package}.{kind}")


@cache
def _kind(device: str) -> str:
    """Return the name of the module that a kind of device gets."""
    if os.environ.get("DLION_KERNELS") == "reference":
        return "reference"
    if device == "cpu":
        from numba import config

        disabled = getattr(config, "DISABLE_JIT", False)  # for debuggers
        return "reference" if disabled else "numba_cpu"
    if device != "cuda":
        return "reference"
    missing = _missing_for_triton()
    if missing is None and torch.cuda.is_available():
        missing = _inexact(version("triton"), torch.cuda.get_device_capability())
    if missing is not None:
        text = f"kernels run in plain torch, which is much slower: Triton needs {missing}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return "reference"
    return "triton_cuda"


def _missing_for_triton() -> str | None:
    """Return the missing requirement of Triton, which compiles kernel launchers; None: complete."""
    if importlib.util.find_spec("triton") is None:
        return "to be installed (pip install triton)"
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if compiler is None else (compiler,))):
        return "a C compiler: install gcc or clang, or let CC name one"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # of Debian
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        return "Python.h: install the headers of this Python (python3-dev)"
    return None


def _inexact(triton: str, capability: tuple[int, int]) -> str | None:
    """Return the missing requirement of kernels that round each product and sum by itself.

    On Blackwell the assembler of Triton 3.6 fuses them, although it is told not to.
    """
    if capability >= (10, 0) and tuple(map(int, triton.split(".")[:2])) < (3, 7):
        return f"to be 3.7 or newer for this GPU, not {triton}: install torch 2.12 or newer"
    return None
