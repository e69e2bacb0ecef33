"""A step as a transaction: it is committed by all, or changes nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.extensions.protocol import Extension


class Transaction(Extension):
    """Puts back what encoding has moved, where a step is not committed.

    Args:
        commit: says, when all answers are there, whether to apply them; equal everywhere.
    """

    def __init__(self, commit: Callable[[], bool]):
        self._commit = commit
        self._kept: dict[Bucket, list[tuple[Tensor, Tensor]]] = {}
        self._before: list[tuple[Tensor, Tensor]] = []  # state with what is kept of this step

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        begins = not self.optimizer.collected - {local}  # no other worker has moved anything
        for bucket in buckets if self.optimizer.exchanges and begins else ():
            rows = [*bucket.own.values(), *bucket.own_counters.values()]
            rows += bucket.exchange.state.values()
            kept = self._kept.get(bucket, [])
            if [id(row) for row, _ in kept] != [id(row) for row in rows]:
                kept = self._kept[bucket] = [(row, torch.empty_like(row)) for row in rows]
            for row, copy in kept:
                copy.copy_(row)
            self._before += kept

    def may_update(self) -> bool:
        return self._commit()

    def after_step(self, counts: bool) -> None:
        for row, copy in [] if self.optimizer.committed else self._before:
            row.copy_(copy)
        self._before.clear()
