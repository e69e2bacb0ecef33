"""Which samples a worker sees at which step: a function of the seed and the step alone."""

import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.streams import stream

MODES = ("partition", "replicate")


class Sharding:
    """Deals samples out to workers.

    ``partition``: every sample belongs to one worker, and is seen once per epoch. ``replicate``:
    every worker sees every sample once per epoch (as in arXiv 2404.00438, section 5.1). Each
    worker walks through its own samples in an order that is new in every epoch. Batches of an epoch
    differ by at most one sample, so that the last is not a small one.

    Args:
        size: samples.
        workers: n.
        batch_size: of a worker, at most.
        seed: of the partition and of the orders.
        mode: partition | replicate.

    Raises:
        UserError: if a worker has fewer samples than a batch.
    """

    def __init__(self, size: int, workers: int, batch_size: int, seed: int, mode: str):
        if mode not in MODES:
            raise UserError(f"dataset.sharding={mode} is unknown: choose partition or replicate")
        self.size, self.workers, self.seed, self.mode = size, workers, seed, mode
        shares = 1 if mode == "replicate" else workers
        smallest, largest = size // shares, -(-size // shares)
        if batch_size > smallest:
            raise UserError(
                f"batch_size={batch_size} is more than the {smallest} samples of a worker"
                f" ({size} over {shares}): type batch_size={max(smallest, 1)} or less, or fewer"
                " workers"
            )
        self.steps_per_epoch = -(-largest // batch_size)
        self.smallest_batch = smallest // self.steps_per_epoch
        self._deal = torch.randperm(size, generator=stream(seed, "shards"))
        self._orders: dict[int, tuple[int, Tensor]] = {}

    def indices(self, worker: int, step: int) -> Tensor:
        """The samples of a worker's batch at a step (counted from 0), int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(worker, epoch)
        start = place * len(order) // self.steps_per_epoch
        stop = (place + 1) * len(order) // self.steps_per_epoch
        return order[start:stop]

    def _order(self, worker: int, epoch: int) -> Tensor:
        cached = self._orders.get(worker)
        if cached is None or cached[0] != epoch:
            shard = self._deal if self.mode == "replicate" else self._deal[worker :: self.workers]
            shuffle = stream(self.seed, "order", worker, epoch)
            cached = (epoch, shard[torch.randperm(len(shard), generator=shuffle)])
            self._orders[worker] = cached
        return cached[1]
