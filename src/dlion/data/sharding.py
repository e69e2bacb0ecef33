"""Which samples a worker sees at which step: a function of the seed and the step alone."""

import math

import numpy as np
import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.streams import stream, stream_seed

MODES = ("partition", "replicate", "dirichlet")


class Sharding:
    """Deals samples out to workers.

    ``partition``: every sample belongs to one worker, and is seen once per epoch. ``replicate``:
    every worker sees every sample once per epoch (as in arXiv 2404.00438, section 5.1).
    ``dirichlet``: a partition into equal parts, but the shares of the classes are drawn for each
    worker from a Dirichlet distribution around those of all (Hsu et al. 2019, arXiv 1909.06335),
    with concentration ``alpha`` a class: 100 is nearly even, 0.1 gives most workers two or three.

    Each worker walks through its own samples in an order that is new in every epoch. Batches of an
    epoch differ by at most one sample, so that the last is not a small one.

    Args:
        size: samples.
        workers: n.
        batch_size: of a worker, at most.
        seed: of the partition and of the orders.
        mode: partition | replicate | dirichlet.
        labels: of the samples, for ``dirichlet``.
        alpha: of ``dirichlet``.

    Raises:
        UserError: if a worker has fewer samples than a batch, or the labels that are needed are not
            there.
    """

    def __init__(
        self,
        size: int,
        workers: int,
        batch_size: int,
        seed: int,
        mode: str,
        labels: Tensor | None = None,
        alpha: float = 1.0,
    ):
        if mode not in MODES:
            raise UserError(f"dataset.sharding={mode} is unknown: choose {', '.join(MODES)}")
        if mode == "dirichlet" and labels is None:
            raise UserError(
                "dataset.sharding=dirichlet needs a label for each sample, which this data set does"
                " not have: type dataset.sharding=partition"
            )
        if not (isinstance(alpha, (int, float)) and 0 < alpha < math.inf):
            raise UserError(f"dataset.alpha={alpha} is not possible: give a number above 0")
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
        deal = torch.randperm(size, generator=stream(seed, "shards"))
        if mode == "dirichlet" and labels is not None:
            self._shards = [deal[own] for own in _dirichlet(labels[deal], workers, alpha, seed)]
        elif mode == "partition":
            self._shards = [deal[worker::workers] for worker in range(workers)]
        else:
            self._shards = workers * [deal]
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
            shard = self._shards[worker]
            shuffle = stream(self.seed, "order", worker, epoch)
            cached = (epoch, shard[torch.randperm(len(shard), generator=shuffle)])
            self._orders[worker] = cached
        return cached[1]


def _dirichlet(labels: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """Places of each worker's samples; a worker takes others where a class it wants is used up."""
    draws = np.random.default_rng(stream_seed(seed, "dirichlet"))
    classes, sizes = np.unique(labels.numpy(), return_counts=True)
    places = [np.flatnonzero(labels.numpy() == c) for c in classes]
    used = np.zeros(len(classes), dtype=np.int64)
    shards = []
    for worker in range(workers):
        wanted = draws.dirichlet(alpha * len(classes) * sizes / sizes.sum())
        room = len(range(worker, len(labels), workers))
        shard: list[np.ndarray] = []
        while room:
            left = sizes - used
            weights = np.where(left > 0, wanted, 0.0)
            if weights.sum() == 0:
                weights = left.astype(float)
            counts = np.minimum(draws.multinomial(room, weights / weights.sum()), left)
            for c, count in enumerate(counts):
                shard.append(places[c][used[c] : used[c] + count])
            used += counts
            room -= int(counts.sum())
        shards.append(torch.from_numpy(np.concatenate(shard)))
    return shards
