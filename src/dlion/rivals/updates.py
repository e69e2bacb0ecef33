"""Updates that rivals share."""

from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.rivals import kernels


def momentum_descent(bucket: Bucket, answer: Tensor) -> None:
    """``b <- mu b + a``, ``x <- (1 - lr wd) x - lr b``: SGD with momentum."""
    buffer = bucket.shared["momentum_buffer"]
    for run in bucket.runs("momentum", "lr", "weight_decay"):
        kernels.momentum_descent(*run.of(bucket.params, buffer, answer), *run.values)
