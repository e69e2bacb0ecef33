"""Lion Cub: Lion whose direction is quantised to p bits before the vote."""

from collections.abc import Iterable
from typing import Any, Literal, Unpack

import torch

from dlion import kernels
from dlion.checks import check_matches
from dlion.core.bucket import Bucket
from dlion.core.optimizer import Common
from dlion.exchange import LevelMean, Shape, Ties, Topology, Vote, WeightedVote
from dlion.extensions.momentum_sync import Every, MomentumSync
from dlion.methods.dlion import DLion
from dlion.values import Betas, Count, Name, NotNegative, Positive

Bits = Literal[1, 2, 4, 8]
Scale = Literal["l1", "max", "geometric"]


class LionCub(DLion):
    """Lion Cub: a majority vote weighted by p-bit magnitudes, with momentum synchronised if asked.

    Worker i: ``u_i = b1 m_i + (1 - b1) g_i``, ``q_i = clip(round(u_i / c_i * s / 2), -s, s)`` with
    ``s = 2**(p - 1) - 1`` and c_i the scale of each parameter tensor, ``m_i <- b2 m_i + (1 - b2)
    g_i``. The scale is the mean of ``|u|`` (``l1``), its maximum (``max``) or its geometric mean
    over the entries that are not zero (``geometric``). A mean-sized entry lands at half of the
    range, and one twice as large saturates. With ``max`` the factor is s, which uses the whole
    range. Only q is sent. NaN becomes 0, and so does every entry of a tensor whose scale is not
    finite. A quantised zero abstains. With 1 bit there are no zeros and no scale: that is
    Distributed Lion with majority vote.
    Everyone: ``x <- (1 - lr wd) x - lr sign(sum q_i)``.
    Source: Ishikawa et al. 2024 (arXiv 2411.16462) and the first author's code, which differs:

    - Its all-reduce adds inside p bits, so ``s = floor((2**(p - 1) - 1) / n)``. Here the owner of a
      slice adds with as many bits as the sum needs, and s is full at any n. ``headroom=True`` takes
      the authors' s. Their 4-bit vote of 8 workers carries a sign each, which is ``bits=1`` here.
    - ``max`` keeps the factor s / 2 there, so half of the range stays unused.
    - ``geometric`` averages the logarithm of ``|u| + 1e-12`` over all entries there. A tensor with
      many zeros then has a tiny scale, and its other entries saturate to signs.

    When not to use it: where a vote of one bit does as well, as it costs p times the bits up. On
    i.i.d. data 4 bits gained 0.014 nats over 1 on a small text model (searched, five seeds,
    results/board/text), and nothing on digits.

    Args:
        lr: learning rate, 3 to 10 times smaller than AdamW's.
        betas: of the direction and of the momentum.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
        bits: p.
        scale: of each tensor: the mean of ``|u|`` (l1), its maximum, or its geometric mean.
        ties: of a sum of exactly zero. ``zero`` (the default, as abstentions make it common and
            it means that nobody knows) costs 1.6 bits down instead of 1.
        headroom: leave room for the sum inside p bits: s = floor((2^(p-1) - 1) / n). It needs
            2 bits or more, and n at most 2^(p-1) - 1. Messages shrink to the bits that 2 s + 1
            levels take.
        momentum_sync: steps between averages of the momenta of all workers; 0: never; exponential
            and floored: at growing intervals, see
            :class:`dlion.extensions.momentum_sync.MomentumSync`.
        sync_rate: of the growing intervals: T_{j+1} = T_j + 2^(j / rate).
        sync_until: the last step after which momenta may be averaged. None: the end of training.
        sync_pattern: a regular expression: average only parameters whose name contains it. It needs
            ``model.named_parameters()``.
        exchange: how messages travel, as for :class:`dlion.DLion`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: NotNegative = 0.0,
        bits: Bits = 4,
        scale: Scale = "l1",
        ties: Ties = "zero",
        headroom: bool = False,
        momentum_sync: Every = 0,
        sync_rate: Positive = 1.0,
        sync_until: Count | None = None,
        sync_pattern: Name | None = None,
        exchange: Topology | Shape = "direct",
        **common: Unpack[Common],
    ):
        self.bits, self.scale, self.headroom = bits, scale, headroom
        self.momentum_sync, self.sync_rate, self.sync_until = momentum_sync, sync_rate, sync_until
        self.sync_pattern = sync_pattern
        sync = MomentumSync(momentum_sync, sync_rate, sync_pattern, sync_until)
        if momentum_sync:
            common["extensions"] = [*common.get("extensions", ()), sync]
        super().__init__(params, lr, betas, weight_decay, ties=ties, exchange=exchange, **common)
        check_matches("sync_pattern", sync_pattern, self.param_groups)

    @property
    def largest(self) -> int:
        """The largest level of a worker, s."""
        full = 2 ** (self.bits - 1) - 1
        return full // self.workers.count if self.headroom else full

    @property
    def levels(self) -> int:
        return 2 if self.bits == 1 else 2 * self.largest + 1

    def make_exchange(self, bucket: Bucket) -> LevelMean | Vote | WeightedVote:
        most = 2 ** (self.bits - 1) - 1
        if self.headroom and self.workers.count > most:
            allowed = f"at most {most} workers" if most else "bits=2, 4 or 8"
            raise ValueError(
                f"headroom=true with bits={self.bits} and {self.workers.count} workers is not"
                f" possible: it needs {allowed}, as n messages are to add up inside the bits of one"
            )
        return super().make_exchange(bucket)

    def encode(self, bucket: Bucket, local: int) -> None:
        if self.bits == 1:
            super().encode(bucket, local)
            return
        message, largest = bucket.exchange.messages[local], self.largest
        momentum = bucket.own["momentum"][local]
        for segment in bucket.segments("betas"):
            grads, (beta1, beta2) = bucket.grads(segment.slots), segment.values[0]
            scales = kernels.measure(momentum, grads, beta1, self.scale)
            smallest = torch.finfo(scales.dtype).tiny
            factors = (largest if self.scale == "max" else largest / 2) / scales.clamp(min=smallest)
            kernels.encode_levels(message, momentum, grads, beta1, beta2, factors, largest)
