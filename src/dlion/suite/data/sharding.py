"""The samples that a worker sees at a step: a function of the seed and the step alone."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlion.errors import UserError
from dlion.streams import stream, stream_seed

Parts = tuple[tuple[int, int], ...]  # numbers of workers, and of batches that each has taken
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
        self.size, self.workers, self.seed, self.mode = size, workers, seed, mode
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

    An epoch begins as that of a :class:`Sharding` over the workers present. When their number
    changes, what is left of the epoch is shuffled and dealt among those present now: each sample is
    seen once in an epoch, but for the last ones, if they are fewer than half a batch for each
    worker. With another ``sharding`` than ``partition`` a change begins a new epoch instead.

    Args:
        make: returns the sharding over so many workers.
        size: number of samples.
        batch_size: samples in a worker's batch, at most.
        seed: decides the orders.

    Attributes:
        epoch: the one at hand, from 0.
        parts: of this epoch: numbers of workers, and how many batches each of them has taken.
    """

    def __init__(self, make: Callable[[int], Sharding], size: int, batch_size: int, seed: int):
        self.sharding = lru_cache(maxsize=2)(make)
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.epoch, self.parts = 0, list[list[int]]()
        self._dealt: dict[tuple[int, Parts], Tensor] = {}  # the latest two of :meth:`_rest`

    def indices(self, worker: int, count: int) -> Tensor:
        """Return the numbers of the samples of the next batch of a worker of so many."""
        epoch, *earlier, (_, taken) = self._place(count)
        return self._batch(epoch, tuple(earlier), worker, count, taken)

    def taken(self, count: int) -> None:
        """Note that each of so many workers has taken its batch."""
        self.epoch, *earlier, (_, taken) = self._place(count)
        self.parts = [*map(list, earlier), [count, taken + 1]]

    @property
    def epochs(self) -> float:
        """Passes over the samples so far."""
        *earlier, last = [*map(tuple, self.parts)] or [(1, 0)]
        steps = self._steps(self.epoch, tuple(earlier), last[0])
        if not earlier:
            return (self.epoch * steps + last[1]) / steps
        left = len(self._rest(self.epoch, tuple(earlier)))
        return self.epoch + 1 - left * (1 - last[1] / max(steps, 1)) / self.size

    def _place(self, count: int) -> tuple[Any, ...]:
        """Return the epoch of the next batch, and its parts, the last one being of ``count``."""
        parts = [*map(tuple, self.parts)]
        if not parts or parts[-1][0] != count:
            parts.append((count, 0))
        if parts[-1][1] >= self._steps(self.epoch, tuple(parts[:-1]), count):
            return self.epoch + 1, (count, 0)
        return self.epoch, *parts

    def _steps(self, epoch: int, earlier: Parts, count: int) -> int:
        """Return how many batches each of ``count`` workers gets after earlier parts."""
        if not earlier:
            return self.sharding(count).steps_per_epoch
        left = len(self._rest(epoch, earlier))
        return 0 if 2 * left < count * self.batch_size else -(-left // (count * self.batch_size))

    def _batch(self, epoch: int, earlier: Parts, worker: int, count: int, taken: int) -> Tensor:
        steps = self._steps(epoch, earlier, count)
        if not earlier:
            return self.sharding(count).indices(worker, epoch * steps + taken)
        rest = self._rest(epoch, earlier)
        start, stop = (_cut(len(rest), steps, batch) for batch in (taken, taken + 1))
        return rest[start:stop].tensor_split(count)[worker]

    def _rest(self, epoch: int, earlier: Parts) -> Tensor:
        """Return what earlier parts have left of an epoch, in the order in which it is dealt.

        Each part leaves something of what the one before has left: so a change costs one shuffle,
        however many there were.
        """
        parts = range(len(earlier), 0, -1)
        known = next((n for n in parts if (epoch, earlier[:n]) in self._dealt), 0)
        rest = self._dealt.get((epoch, earlier[:known]), torch.empty(0, dtype=torch.int64))
        for part in range(known, len(earlier)):
            rest = self._deal(epoch, earlier[:part], rest, *earlier[part])
            self._dealt[epoch, earlier[: part + 1]] = rest
            if len(self._dealt) > 2:
                del self._dealt[next(iter(self._dealt))]
        return rest

    def _deal(self, epoch: int, earlier: Parts, rest: Tensor, count: int, taken: int) -> Tensor:
        """Return what a part leaves of the rest that it began with."""
        steps = self._steps(epoch, earlier, count)
        if earlier:
            unseen = rest[_cut(len(rest), steps, taken) :].sort().values
        elif self.sharding(count).mode != "partition":
            unseen = rest
        else:
            left = torch.ones(self.size, dtype=torch.bool)
            for worker in range(count):
                left[self.sharding(count).stretch(worker, epoch, 0, taken)] = False
            unseen = left.nonzero().flatten()
        order = stream(self.seed, "rest", epoch, len(earlier) + 1)
        return unseen[torch.randperm(len(unseen), generator=order)]


def _cut(size: int, pieces: int, piece: int) -> int:
    """Return where a piece begins, or the last one ends, as ``Tensor.tensor_split`` cuts."""
    each, longer = divmod(size, pieces)
    return piece * each + min(piece, longer)


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
