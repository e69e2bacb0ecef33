"""What passes on a CPU are made of: compilation by Numba, threads, words and bfloat16."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core.caching import FunctionCache
from numba.np.arrayobj import make_array
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 512  # words of a vote at a time: its planes stay in the first cache
ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
SIZE = np.uint32(0x7FFFFFFF)  # of the bits of float32
_SMALL = 1 << 17  # elements below which threads do not pay
_UNSIGNED = {torch.int64: torch.uint64, torch.bfloat16: torch.uint16}  # NumPy has no bfloat16

inlined = numba.extending.register_jitable


class _Cache(FunctionCache):
    """Compiled code on disk: damaged files are replaced, and a full disk is done without."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        # what is compiled contains code of this file
        stamp = self._cache_file._source_stamp, Path(__file__).stat().st_mtime
        self._cache_file._source_stamp = stamp

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling a file that was cut or emptied may raise
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig, data):
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


def compiled(function: Callable) -> Callable:
    """Compile at first use, and keep the result on disk where there is a place for it."""
    dispatcher = numba.njit(nogil=True)(function)
    # neither this folder nor the home directory can be written to
    with contextlib.suppress(RuntimeError):
        # as dispatcher.enable_caching() sets Numba's own
        dispatcher._cache = _Cache(function)  # pyrefly: ignore[missing-attribute]
    return dispatcher


def as_array(tensor: Tensor) -> NDArray:
    """Return a tensor as an array; words are unsigned, and bfloat16 is given by its bits."""
    unsigned = _UNSIGNED.get(tensor.dtype)
    return (tensor if unsigned is None else tensor.view(unsigned)).numpy()


_pool: tuple[int, ThreadPoolExecutor] | None = None


def on_threads(kernel: Callable[..., None], args: tuple, length: int, weight: int = 1) -> None:
    """Call ``kernel(*args, start, stop)`` over all of ``length``, in parts on torch's threads."""
    global _pool
    threads = torch.get_num_threads()
    if threads == 1 or length * weight < _SMALL:
        kernel(*args, 0, length)
        return
    if _pool is None or _pool[0] != threads:
        _pool = (threads, ThreadPoolExecutor(threads - 1))
    share = -(-length // (threads * 64 * BLOCK)) * 64 * BLOCK
    others = range(share, length, share)
    parts = [_pool[1].submit(kernel, *args, s, min(s + share, length)) for s in others]
    kernel(*args, 0, min(share, length))  # on this thread, which need not be woken up
    for part in parts:
        part.result()


@inlined
def decay_and_rate(lr, weight_decay):
    return np.float32(1 - lr * weight_decay), np.float32(-lr)


@inlined
def split_words(vector, start, stop):
    """Split a share of a vector into its whole words and a copy of the rest, filled with zeros."""
    whole = stop - stop % 64
    rest = np.zeros(64 if whole < stop else 0, vector.dtype)
    rest[: stop - whole] = vector[whole:stop]
    return vector[start:whole], rest


@inlined
def keep_rest(vector, stop, rest):
    """Write back the copy that :func:`split_words` made."""
    vector[stop - stop % 64 : stop] = rest[: stop % 64]


def to_float(value) -> Any:
    """Return a value as float32; bfloat16 is given by its bits."""


@numba.extending.overload(to_float)
def _float_overload(value):
    if value == numba.float32:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def as_in(array, value) -> Any:
    """Return float32 as the array has it: as bfloat16, rounded to nearest, halves to even."""


@numba.extending.overload(as_in)
def _as_overload(array, value):
    if array.dtype == numba.float32:
        return lambda array, value: value

    def narrow(array, value):
        bits = np.float32(value).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.uint16(0x7FC0) if nan else np.uint16(rounded)

    return narrow


def _generate_plane(typing_context, levels, b):
    """Gather bit b of each of 64 bytes in one word, in few vector instructions.

    A comparison of all bytes is a mask; LLVM does not see by itself that one is wanted.
    """
    wide = ir.VectorType(ir.IntType(8), 64)

    def generate(context, builder, signature, arguments):
        array = make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(array.data, wide.as_pointer())
        values = builder.load(address, align=1)
        flag = builder.shl(ir.IntType(8)(1), arguments[1])
        first = builder.insert_element(wide(ir.Undefined), flag, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 64), None)
        flags = builder.shuffle_vector(first, wide(ir.Undefined), lanes)
        bits = builder.icmp_unsigned("!=", builder.and_(values, flags), wide(None))
        return builder.bitcast(bits, ir.IntType(64))

    return numba.uint64(levels, numba.uint8), generate


plane_of: Any = numba.extending.intrinsic(_generate_plane)


@inlined
def mask_of(count):
    """Return the bits of a word that ``count`` values fill, at most all."""
    return ONES >> np.uint64(max(64 - count, 0))
