"""The passes of :mod:`dlion.rivals.kernels` on a GPU, in Triton."""

import triton
import triton.language as tl

from dlion.kernels.triton_cuda import (
    EXACT,
    block_of_program,
    descend_block,
    grid_for,
    index_in_block,
    on_device,
    rates_of,
)
from dlion.rivals.kernels import reference


@on_device
def momentum_descent(params, buffer, answer, momentum, lr, weight_decay):
    size, factors = params.numel(), (float(momentum), *rates_of(lr, weight_decay))
    _momentum_descent[grid_for(size)](params, buffer, answer, size, *factors, **EXACT)


@on_device
def accumulate(velocity, accumulated, grad, momentum):
    size = velocity.numel()
    _accumulate[grid_for(size)](velocity, accumulated, grad, size, float(momentum), **EXACT)


ternarise = reference.ternarise
# what selects, or touches a few places only, is left to torch
largest, descend_at = reference.largest, reference.descend_at
add_entries, take_mean = reference.add_entries, reference.take_mean


@triton.jit
def _momentum_descent(values, buffer, answer, size, momentum, decay, rate):
    start, left = block_of_program(size)
    b = _moved(buffer + start, answer + start, left, momentum)
    descend_block(values + start, left, b * rate, decay)


@triton.jit
def _accumulate(velocity, accumulated, grad, size, momentum):
    start, left = block_of_program(size)
    u = _moved(velocity + start, grad + start, left, momentum)
    index = index_in_block()
    v = tl.load(accumulated + start + index, mask=index < left, other=0.0)
    tl.store(accumulated + start + index, v + u, mask=index < left)


@triton.jit
def _moved(buffer, values, left, momentum):
    """Update ``b <- mu b + v`` of a block, and return b: float32 ``[32, 32]``."""
    index = index_in_block()
    inside = index < left
    b = tl.load(buffer + index, mask=inside, other=0.0)
    b = b * momentum + tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffer + index, b, mask=inside)
    return b
