"""Lion Cub: Lion whose direction is quantised to p bits before the vote."""

import re
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from dlion import kernels
from dlion.exchange import DenseMean, LevelSum
from dlion.optim.base import Common
from dlion.optim.bucket import Bucket
from dlion.optim.dlion import LevelOptimizer

BITS = (1, 2, 4, 8)
SCALES = ("l1", "max", "geometric")


class LionCub(LevelOptimizer):
    """Lion Cub: a majority vote weighted by p-bit magnitudes, with momentum synchronised if asked.

    Worker i: ``u_i = b1 m_i + (1 - b1) g_i``, ``q_i = clip(round(u_i / c_i * s / 2), -s, s)`` with
    ``s = 2**(p - 1) - 1`` and c_i the scale of each parameter tensor, ``m_i <- b2 m_i + (1 - b2)
    g_i``. The scale is the mean of ``|u|`` (``l1``), its maximum (``max``) or its geometric mean
    over the entries that are not zero (``geometric``). A mean-sized entry lands at half of the
    range and whatever is twice as large saturates; with ``max`` the factor is s, so that the range
    is used up. (The authors' code keeps s / 2 there, which wastes one bit.) Nothing is sent but q.
    NaN says 0, and so does all of a tensor whose scale is not finite.
    Everyone: ``x <- (1 - lr wd) x - lr sign(sum q_i)``.
    Source: Ishikawa et al. 2024 (arXiv 2411.16462). Their all-reduce adds inside the p-bit
    container, so their s shrinks with n; here the owner of a slice adds with as many bits as the
    sum needs, so s is full at any n and no sum overflows. A quantised zero abstains. With 1 bit
    there are no zeros and no scale: it is Distributed Lion with majority vote.

    Args:
        lr, betas, weight_decay: as for Lion.
        bits: p, 1 | 2 | 4 | 8.
        scale: l1 | max | geometric.
        ties: of a sum of exactly zero. ``zero`` (the default, as abstentions make it common and
            it means that nobody knows) costs 1.6 bits down instead of 1.
        momentum_sync: average the momenta of all workers every so many steps (an int; 0 never), or
            ``"exponential"``: ever more rarely, after the steps T_0 = 1, T_{j+1} = T_j + 2^(j /
            sync_rate), rounded down (0/1 Adam's rule; 1, 2, 4, 8 ... at a rate of 1). Costs float32
            both ways for what is averaged.
        sync_rate: of the exponential rule.
        sync_pattern: a regular expression; only parameters whose name contains it are averaged
            (pass ``model.named_parameters()``). None: all.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        bits: int = 4,
        scale: str = "l1",
        ties: str = "zero",
        momentum_sync: int | str = 0,
        sync_rate: float = 1.0,
        sync_pattern: str | None = None,
        **common: Unpack[Common],
    ):
        if bits not in BITS:
            raise ValueError(f"bits={bits} is not possible: choose 1, 2, 4 or 8")
        if scale not in SCALES:
            raise ValueError(f"scale={scale} is unknown: choose one of {', '.join(SCALES)}")
        if momentum_sync != "exponential" and not (
            isinstance(momentum_sync, int) and momentum_sync >= 0
        ):
            raise ValueError(
                f"momentum_sync={momentum_sync} is not possible: give a number of steps (0 for"
                " never) or exponential"
            )
        if not sync_rate > 0:
            raise ValueError(f"sync_rate={sync_rate} is out of range: it must be above 0")
        self.bits, self.scale = bits, scale
        self.momentum_sync, self.sync_rate = momentum_sync, sync_rate
        self.sync_pattern = sync_pattern
        self.levels = 2 if bits == 1 else 2**bits - 1
        self._sync_exchanges: dict[Bucket, DenseMean] = {}
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, ties, **common)
        if sync_pattern is not None and not momentum_sync:
            raise ValueError(
                f"sync_pattern={sync_pattern} has no effect with momentum_sync=0: give a number of"
                " steps or exponential"
            )
        if sync_pattern is not None and not any(self._synchronised(b) for b in self.buckets):
            raise ValueError(
                f"sync_pattern={sync_pattern} matches no parameter name: pass"
                " model.named_parameters() and a pattern that occurs in a name"
            )

    @property
    def paper_bits(self) -> tuple[float, float]:
        return self.bits, 1

    def encode(
        self,
        exchange: LevelSum,
        message: Tensor,
        at: int,
        momentum: Tensor,
        grad: Tensor,
        step: int,
        group: dict[str, Any],
    ) -> None:
        if self.bits == 1:
            super().encode(exchange, message, at, momentum, grad, step, group)
            return
        beta1, beta2 = self.betas(group)
        largest = (self.levels - 1) // 2
        unit = kernels.measure(momentum, grad, beta1, self.scale)
        smallest = torch.finfo(unit.dtype).tiny
        multiplier = (largest if self.scale == "max" else largest / 2) / unit.clamp(min=smallest)
        view = message[:, : self.bits * exchange.words].unflatten(1, (self.bits, exchange.words))
        kernels.encode_levels(view, at, momentum, grad, beta1, beta2, multiplier, largest)

    def finish(self, bucket: Bucket, step: int) -> None:
        spans = self._synchronised(bucket)
        if not spans or not self._is_sync_step(step + 1):
            return
        rows = bucket.own["momentum"]
        exchange = self._sync_exchanges.get(bucket)
        if exchange is None:
            size = sum(stop - start for start, stop in spans)
            exchange = DenseMean(self.channel, size, device=bucket.device)
            self._sync_exchanges[bucket] = exchange
        for i, row in enumerate(rows):
            message = torch.cat([row[start:stop] for start, stop in spans])
            exchange.post(i, torch.nn.functional.pad(message, (0, exchange.numel - len(message))))
        mean, offset, here = exchange(step), 0, self.channel.local_participants
        for start, stop in spans:
            rows[here, start:stop] = mean[offset : offset + stop - start]
            offset += stop - start

    def _synchronised(self, bucket: Bucket) -> list[tuple[int, int]]:
        """The spans whose momentum is averaged."""
        if not self.momentum_sync:
            return []
        if self.sync_pattern is None:
            return bucket.spans
        pattern = re.compile(self.sync_pattern)
        pairs = zip(bucket.names, bucket.spans, strict=True)
        return [span for name, span in pairs if pattern.search(name)]

    def _is_sync_step(self, step: int) -> bool:
        """Whether to average after ``step`` steps."""
        if self.momentum_sync != "exponential":
            return step % self.momentum_sync == 0
        moment, j = 1.0, 0
        while moment < step:
            moment += 2 ** (j / self.sync_rate)
            j += 1
        return int(moment) == step
