"""Averages the workers' momenta now and then."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from dlion.checks import check_pattern
from dlion.core.bucket import Bucket
from dlion.exchange import Channel, DirectSend, MeanWire, make_mean
from dlion.extensions.protocol import Extension
from dlion.values import Whole
from dlion.workers import Workers

Every = Whole | Literal["exponential", "floored"]


class MomentumSync(Extension):
    """Averages the momenta of all workers after some steps.

    Source: Ishikawa et al. 2024 (arXiv 2411.16462); the exponential rule is 0/1 Adam's (Lu et al.
    2022, arXiv 2202.06009). The first author's code is ``floored`` with a rate of 16, and stops
    after the first epoch. Entries of a momentum that are not finite count as 0, so that one
    worker's does not take those of all.

    Args:
        every: a number of steps (0: never), or ``exponential``: ever more rarely, after the steps
            T_0 = 1, T_{j+1} = T_j + 2^(j / rate), rounded down at the end (1, 2, 4, 8 ... at a rate
            of 1). ``floored``: the same, but every T_j is rounded down before the next is computed.
        rate: of the growing intervals.
        pattern: a regular expression; only parameters whose name contains it are averaged. None:
            all.
        until: the last step after which momenta may be averaged. None: no last step.
        wire: what momenta and their mean are rounded to on their way.

    Raises:
        ValueError: for settings that are not possible.
    """

    def __init__(
        self,
        every: Every,
        rate: float = 1.0,
        pattern: str | None = None,
        until: int | None = None,
        wire: MeanWire = "float32",
    ):
        for name, value in {"sync_pattern": pattern, "sync_until": until}.items():
            if value is not None and not every:
                raise ValueError(
                    f"{name}={value} has no effect with momentum_sync=0: give a number of steps,"
                    " exponential or floored"
                )
        self.every, self.rate, self.until, self.wire = every, rate, until, wire
        self.pattern = check_pattern("sync_pattern", pattern)
        self._means: dict[Bucket, DirectSend] = {}
        self._workers: Workers | None = None

    @contextmanager
    def around_exchange(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Average the momenta of buckets whose step it is, after all messages."""
        yield
        for bucket in buckets:
            if self.is_due(bucket.step + 1):
                self.average(bucket, self.optimizer.channel)

    def is_due(self, step: int) -> bool:
        """Whether to average after ``step`` steps."""
        if self.until is not None and step > self.until:
            return False
        if isinstance(self.every, int):
            return bool(self.every) and step % self.every == 0
        moment, j = 1.0, 0
        while moment < step:
            moment += 2 ** (j / self.rate)
            if self.every == "floored":
                moment = int(moment)
            j += 1
        return int(moment) == step

    def includes(self, name: str) -> bool:
        """Whether the momentum of a parameter is averaged."""
        return self.pattern is None or self.pattern.search(name) is not None

    def average(self, bucket: Bucket, channel: Channel) -> None:
        """Give ``bucket.own["momentum"]`` of all participants its mean over them."""
        slots = [slot for slot in bucket.slots if self.includes(slot.name)]
        rows = bucket.own["momentum"]
        if not slots:
            return
        alignment = 64 if self.wire == "int8" else 1  # of tensors that have a scale
        sizes = [slot.stop - slot.start for slot in slots]
        padded = [-(-size // alignment) * alignment for size in sizes]
        *starts, end = itertools.accumulate(padded, initial=0)
        places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        pairs = [(slice(s.start, s.stop), p) for s, p in zip(slots, places, strict=True)]
        if channel.workers is not self._workers:  # exchanges are for one number of workers
            self._means.clear()
            self._workers = channel.workers
        known = self._means.get(bucket)
        if known is None or known.device != bucket.device:
            spans = [(place.start, place.stop) for place in places]
            made = make_mean(self.wire, channel, end, spans, device=bucket.device)
            self._means[bucket] = made
        exchange = self._means[bucket]
        for local, row in enumerate(rows):
            message = row.new_zeros(exchange.numel)
            for here, place in pairs:
                message[place] = row[here].nan_to_num(0.0, 0.0, 0.0)
            exchange.encode(local, message)
        exchange.run(bucket.step)
        mean = exchange.decode()
        for here, place in pairs:
            for local in channel.local_participants:
                rows[local, here] = mean[place]
