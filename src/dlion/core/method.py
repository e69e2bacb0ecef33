"""Interface between a method and its step: the part of an optimizer that the engine uses."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from dlion.core.bucket import Bucket, StateNames
from dlion.core.layout import Members
from dlion.core.saving import Files
from dlion.exchange import Channel, Exchange
from dlion.extensions.dense_group import Node
from dlion.workers import Workers


class Method(StateNames, Protocol):
    """An optimizer, see :class:`dlion.core.optimizer.DistributedOptimizer`."""

    skips_missing: ClassVar[bool]
    moves_alone: ClassVar[bool]
    whole_matrices: bool
    members: Members
    workers: Workers
    channel: Channel
    node: Node | None
    nonfinite: Any
    seed: int
    stochastic_rounding: bool
    flag: bool
    flagged: bool
    skipped: int
    files: Files
    param_groups: list[dict[str, Any]]
    state: Any
    accumulates: Callable[[], bool] | None
    after_step: Callable[[Sequence[Bucket], Channel], None] | None

    @property
    def buckets(self) -> list[Bucket]: ...
    @property
    def params(self) -> Any: ...
    @property
    def exchanges(self) -> bool: ...
    def prepare(self) -> None: ...
    def include_unfrozen(self) -> list[Bucket]: ...
    def make_exchange(self, bucket: Bucket) -> Exchange: ...
    def move(self, bucket: Bucket, local: int) -> None: ...
    def encode(self, bucket: Bucket, local: int) -> None: ...
    def update(self, bucket: Bucket) -> None: ...
    def end_step(self, exchanged: bool) -> None: ...
    def begin_round(self) -> None: ...
