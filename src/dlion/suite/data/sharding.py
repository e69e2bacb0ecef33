"""The samples that a worker sees at a step: a function of the seed and the step alone."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.streams import stream, stream_seed

MODES = ("partition", "contiguous", "replicate", "dirichlet")


class Sharding:
    """Divides the samples among the workers.

    ``partition``: every sample belongs to one worker, drawn at random, and is seen once per epoch.
    ``contiguous``: a partition into n equal stretches of the data set in its own order, worker i
    has the i-th; what stands together (modules of a library, tasks, folders of classes) stays with
    one worker, so that workers see non-i.i.d. data, the same for every seed. ``replicate``: every
    worker sees every sample once per epoch (as in arXiv 2404.00438, section 5.1).
    ``dirichlet``: a partition into equal parts, but each worker draws its shares of the classes
    from a Dirichlet distribution around those of the whole set (Hsu et al. 2019, arXiv 1909.06335),
    with concentration ``alpha`` a class: 100 is nearly even, 0.1 gives most workers two or three.

    Each worker sees its shard in an order that is new in every epoch. Batches of an epoch differ by
    at most one sample in size, so that the last is not a small one. Of batches of one sample every
    worker has equally many: where shards differ in size, the larger ones leave out a sample in each
    epoch, another one every time.

    Args:
        size: number of samples.
        workers: n.
        batch_size: samples in a worker's batch, at most.
        seed: decides the shards (but those of ``contiguous``) and the orders.
        mode: partition | contiguous | replicate | dirichlet.
        labels: one for each sample; ``dirichlet`` needs them.
        alpha: the concentration of ``dirichlet``, which needs one.

    Raises:
        UserError: if a worker has fewer samples than a batch, or labels are needed and missing.

    Attributes:
        steps_per_epoch: batches of a worker in an epoch.
        smallest_batch: samples in the smallest batch of an epoch.
    """

    def __init__(
        self,
        size: int,
        workers: int,
        batch_size: int,
        seed: int,
        mode: str,
        labels: Tensor | None = None,
        alpha: float | None = None,
    ):
        if mode not in MODES:
            raise UserError(f"dataset.sharding={mode} is unknown: choose {', '.join(MODES)}")
        if mode == "dirichlet" and labels is None:
            raise UserError(
                "dataset.sharding=dirichlet needs a label for each sample, which this data set does"
                " not have: type dataset.sharding=partition, or contiguous for non-i.i.d. parts"
            )
        if mode == "dirichlet" and alpha is None:
            raise UserError(
                "dataset.sharding=dirichlet needs an alpha: type +dataset.alpha=0.5, for example"
            )
        if alpha is not None and not (isinstance(alpha, (int, float)) and 0 < alpha < math.inf):
            raise UserError(f"dataset.alpha={alpha} is not possible: give a number above 0")
        self.size, self.workers, self.batch_size, self.seed = size, workers, batch_size, seed
        self.mode, self.labels, self.alpha = mode, labels, alpha
        shares = 1 if mode == "replicate" else workers
        smallest, largest = size // shares, -(-size // shares)
        if smallest == 0:
            raise UserError(
                f"workers={workers} is more than the {size} samples: type workers={size} or fewer"
            )
        if batch_size > smallest:
            raise UserError(
                f"batch_size={batch_size} is more than the {smallest} samples of a worker"
                f" ({size} over {shares}): type batch_size={smallest} or less, or fewer"
                " workers"
            )
        self.steps_per_epoch = min(-(-largest // batch_size), smallest)
        self.smallest_batch = smallest // self.steps_per_epoch
        self._used = smallest if batch_size == 1 else largest  # samples of a shard in an epoch
        order = torch.randperm(size, generator=stream(seed, "shards"))
        if labels is not None and alpha is not None and mode == "dirichlet":
            positions = _dirichlet(labels[order], workers, alpha, seed)
            self._shards = [order[shard] for shard in positions]
        elif mode == "partition":
            self._shards = [order[worker::workers] for worker in range(workers)]
        elif mode == "contiguous":
            cuts = [worker * size // workers for worker in range(workers + 1)]
            self._shards = [torch.arange(*cut) for cut in pairwise(cuts)]
        else:
            self._shards = workers * [order]
        self._orders: dict[int, tuple[int, Tensor]] = {}

    def among(self, workers: int) -> "Sharding":
        """Return the division among another number of workers, of smaller batches if need be."""
        largest = self.size if self.mode == "replicate" else max(1, self.size // workers)
        batch_size, divided = min(self.batch_size, largest), (self.mode, self.labels, self.alpha)
        return Sharding(self.size, workers, batch_size, self.seed, *divided)

    def indices(self, worker: int, step: int) -> Tensor:
        """Return the numbers of the samples of a worker's batch at a step (from 0), int64."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.stretch(worker, epoch, batch, batch + 1)

    def stretch(self, worker: int, epoch: int, start: int, stop: int) -> Tensor:
        """Return the numbers of the samples of a worker's batches ``start`` to ``stop - 1``."""
        order = self._order(worker, epoch)
        first, last = (batch * len(order) // self.steps_per_epoch for batch in (start, stop))
        return order[first:last]

    def _order(self, worker: int, epoch: int) -> Tensor:
        cached = self._orders.get(worker)
        if cached is None or cached[0] != epoch:
            shard = self._shards[worker]
            shuffle = stream(self.seed, "order", worker, epoch)
            shuffled = shard[torch.randperm(len(shard), generator=shuffle)]
            cached = (epoch, shuffled[: self._used])
            self._orders[worker] = cached
        return cached[1]


class Dealing:
    """Deals the samples to workers that come and go.

    An epoch begins as that of a :class:`Sharding` over the workers present. Once their number has
    changed, what is left of it is shuffled and dealt to those present: each sample is seen once in
    an epoch, but for the last ones, if they are fewer than half a batch for each worker. With
    another ``sharding`` than ``partition`` a change begins a new epoch instead.

    Args:
        make: returns the sharding over the given number of workers.
        size: number of samples.
        batch_size: samples in a worker's batch, at most.
        seed: decides the orders.

    Attributes:
        state: the epoch at hand, from 0; the number of workers and the batches that each has taken;
            once that number has changed in this epoch, what is left of it, else None.
    """

    def __init__(self, make: Callable[[int], Sharding], size: int, batch_size: int, seed: int):
        self.sharding = lru_cache(maxsize=2)(make)
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.state: tuple[int, int, int, Tensor | None] = 0, 1, 0, None

    def indices(self, worker: int, count: int) -> Tensor:
        """Return the numbers of the samples of the next batch of a worker among ``count``."""
        epoch, _, taken, rest = self._next(count)
        if rest is None:
            return self.sharding(count).stretch(worker, epoch, taken, taken + 1)
        return rest[: self._together(count, rest)].tensor_split(count)[worker]

    def taken(self, count: int) -> None:
        """Note that each of ``count`` workers has taken its batch."""
        epoch, _, taken, rest = self._next(count)
        left = None if rest is None else rest[self._together(count, rest) :]
        self.state = epoch, count, taken + 1, left

    @property
    def epochs(self) -> float:
        """Passes over the samples so far."""
        epoch, count, taken, rest = self.state
        if rest is None:
            return epoch + taken / self.sharding(count).steps_per_epoch
        return epoch + 1 - len(rest) / self.size

    def _next(self, count: int) -> tuple[int, int, int, Tensor | None]:
        """Return the state in which ``count`` workers take their next batch."""
        epoch, before, taken, rest = self.state
        if rest is None and taken and count != before:
            rest = self._shuffled_rest()
        if rest is None:
            ends = taken == self.sharding(count).steps_per_epoch
        else:
            ends = len(rest) < count * max(1, self.batch_size / 2)
        return (epoch + 1, count, 0, None) if ends else (epoch, count, taken, rest)

    def _together(self, count: int, rest: Tensor) -> int:
        """Return how many samples ``count`` workers take, in batches of about equal size."""
        steps = -(-len(rest) // (count * self.batch_size))
        return -(-len(rest) // steps)

    def _shuffled_rest(self) -> Tensor:
        """Return what nobody has seen of the epoch, in a new order."""
        epoch, count, taken, _ = self.state
        sharding, unseen = self.sharding(count), torch.ones(self.size, dtype=torch.bool)
        if sharding.mode != "partition":
            return torch.empty(0, dtype=torch.int64)
        for worker in range(count):
            unseen[sharding.stretch(worker, epoch, 0, taken)] = False
        rest = unseen.nonzero().flatten()
        return rest[torch.randperm(len(rest), generator=stream(self.seed, "rest", epoch))]


def _dirichlet(labels: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """Return the positions of each worker's samples in ``labels``.

    A worker falls back to the remaining classes when one is exhausted.
    """
    generator = np.random.default_rng(stream_seed(seed, "dirichlet"))
    classes, sizes = np.unique(labels.numpy(), return_counts=True)
    positions = [np.flatnonzero(labels.numpy() == c) for c in classes]
    used = np.zeros(len(classes), dtype=np.int64)
    shards = []
    for worker in range(workers):
        wanted = generator.dirichlet(alpha * len(classes) * sizes / sizes.sum())
        missing = len(range(worker, len(labels), workers))
        shard: list[np.ndarray] = []
        while missing:
            left = sizes - used
            weights = np.where(left > 0, wanted, 0.0)
            if weights.sum() == 0:
                weights = left.astype(float)
            counts = np.minimum(generator.multinomial(missing, weights / weights.sum()), left)
            for c, count in enumerate(counts):
                shard.append(positions[c][used[c] : used[c] + count])
            used += counts
            missing -= int(counts.sum())
        shards.append(torch.from_numpy(np.concatenate(shard)))
    return shards
