"""Updates that rivals share."""

from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.rivals import kernels


def momentum_descent(bucket: Bucket, answer: Tensor) -> None:
    """``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``: SGD with momentum."""
    buffer = bucket.shared["momentum_buffer"]
    for segment in bucket.segments("momentum", "lr", "weight_decay"):
        kernels.momentum_descent(*segment.of(bucket.params, buffer, answer), *segment.values)
