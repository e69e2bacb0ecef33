"""The passes over memory that only rivals need, chosen as those of :mod:`dlion.kernels`."""

from functools import partial

from torch import Tensor

from dlion import kernels

choose = partial(kernels.choose, package=__name__)


def descend_at(params: Tensor, entries: Tensor, lr: float, weight_decay: float) -> None:
    """:func:`dlion.kernels.descend` on an answer that is zero but for entries (index, value).

    Without weight decay no other parameter is touched.

    Args:
        entries: int32 ``[m, 2]``, as for :func:`add_entries`.
    """
    choose(params).descend_at(params, entries, lr, weight_decay)


def momentum_descent(
    params: Tensor, buffer: Tensor, answer: Tensor, momentum: float, lr: float, weight_decay: float
) -> None:
    """``b <- mu b + a`` and :func:`dlion.kernels.descend` on b, in one pass: SGD with momentum.

    Args:
        buffer: b, float32 ``[m]``, updated in place.
        answer: a, float32 ``[m]``.
    """
    module = choose(params, buffer, answer)
    module.momentum_descent(params, buffer, answer, momentum, lr, weight_decay)


def accumulate(velocity: Tensor, accumulated: Tensor, grad: Tensor, momentum: float) -> None:
    """``u <- mu u + g``, ``v <- v + u``, float32 ``[m]`` in place, in one pass."""
    choose(velocity, accumulated, grad).accumulate(velocity, accumulated, grad, momentum)


def largest(values: Tensor, count: int) -> Tensor:
    """Return where the ``count`` largest sizes are in each row of float32 ``[..., d]``.

    These are int64 ``[..., count]``, ascending. NaN is larger than everything; of equal sizes the
    first are taken.
    """
    return choose(values).largest(values, count)


def add_entries(total: Tensor, entries: Tensor) -> None:
    """Add entries (index, value) to a float32 vector, in place.

    Args:
        entries: int32 ``[m, 2]``, the values by the bits of float32. The indices must be of the
            vector, and none may occur twice.
    """
    choose(total).add_entries(total, entries)


def take_mean(total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a float32 vector ``[d]`` over ``count`` as entries, and set it to zero.

    Returns:
        Entries as for :func:`add_entries`, ``[d, 2]``: first those that are not 0, by ascending
        index; and how many these are, an integer. What follows them means nothing.
    """
    return choose(total).take_mean(total, count)


def ternarise(values: Tensor, scales: Tensor, coins: Tensor) -> Tensor:
    """``sign(v)`` with probability ``|v| / s``, else 0, so that s times it is unbiased: int8.

    NaN becomes 0. No ``|v|`` may be above s.
    Source: Wen et al. 2017 (arXiv 1705.07878), section 3.1.

    Args:
        values, scales: v and s, float32 ``[m]``.
        coins: uniform in [0, 1), float32 ``[m]``.
    """
    return choose(values, scales, coins).ternarise(values, scales, coins)
