"""Agreement of a vote with the workers' mean, and the distance of their momenta."""

from collections import defaultdict

import torch
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.exchange import Channel, DenseMean, sum_in_order
from dlion.methods.dlion import SignVoteOptimizer
from dlion.methods.momentum import MomentumOptimizer
from dlion.optim import DLionADM
from dlion.workers import Workers

VOTES = (SignVoteOptimizer, DLionADM)  # who keep a momentum each, and are answered with its sign


class Agreement:
    """Compares the answer of single steps with that of float32 messages.

    These are the arguments of Ishikawa et al. 2024 (arXiv 2411.16462) for more than one bit, and
    for averaging the momenta of some layers only. What is compared travels over a channel of its
    own, as float32; the step itself is as it would be without.

    Args:
        optimizer: which says what a worker's direction is.
        workers: all of them, in a group that is idle while this measures.
    """

    def __init__(self, optimizer: MomentumOptimizer, workers: Workers):
        self.optimizer, self._channel = optimizer, Channel(workers)
        self._momenta: dict[Bucket, Tensor] = {}  # [k, padded], as the step begins
        self._directions: dict[Bucket, Tensor] = {}  # [k, padded]

    def begin(self) -> None:
        """Watch the step that follows; all processes must do so together."""
        for bucket in self.optimizer.buckets:
            self._momenta[bucket] = bucket.own["momentum"].clone()
            self._directions[bucket] = torch.zeros_like(self._momenta[bucket])

    def look(self, local: int) -> None:
        """In a step that is watched, take a local worker's direction from its gradients."""
        for bucket, momenta in self._momenta.items():
            momentum = bucket.own["momentum"][local]
            now = momentum.clone()  # with overlap the step has moved it already
            momentum.copy_(momenta[local])
            self._directions[bucket][local] = self.optimizer.direction(bucket, local)
            momentum.copy_(now)

    def measure(self) -> dict[str, float]:
        """Return the measurements of the watched step, over the workers that took part.

        Returns:
            ``agreement``, ``disagreement``: the shares of entries in which the answer has the sign
            of the mean direction u, or the opposite, of those where that is not zero. In the others
            the answer is zero.
            ``momentum_variance``: of the workers' momenta before the step, summed over entries,
            relative to their mean square: 0 where all are equal, 1 - 1 / n where they have nothing
            in common. ``momentum_variance.KIND``: the same for each kind of parameter, which is its
            name without the numbers of blocks.
        """
        self._channel.set_participants(self.optimizer.channel.participants)
        counts = torch.zeros(3, dtype=torch.int64)
        squares: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(2).double())
        for bucket, momenta in self._momenta.items():
            mean = self._mean(self._directions[bucket])
            right = bucket.exchange.decode().sign() * mean.sign()
            counts += torch.stack([(right > 0).sum(), (right < 0).sum(), (mean != 0).sum()]).cpu()
            for slot, found in zip(bucket.slots, self._squares(bucket, momenta), strict=True):
                kind = ".".join(part for part in slot.name.split(".") if not part.isdigit())
                squares[kind] += found
        self._momenta.clear()
        self._directions.clear()
        agreed, opposed, entries = counts.tolist()
        total = sum_in_order(torch.stack([*squares.values()]))
        return {
            "agreement": agreed / max(entries, 1),
            "disagreement": opposed / max(entries, 1),
            "momentum_variance": _ratio(total),
            **{f"momentum_variance.{kind}": _ratio(found) for kind, found in squares.items()},
        }

    def _mean(self, rows: Tensor) -> Tensor:
        """Return the mean over the participants of ``[k, padded]``, everywhere: ``[padded]``."""
        exchange = DenseMean(self._channel, rows.shape[1], device=rows.device)
        for local in self._channel.local_participants:
            exchange.encode(local, rows[local])
        exchange.run(0)
        return exchange.decode()

    def _squares(self, bucket: Bucket, momenta: Tensor) -> Tensor:
        """Sum the squares of ``m_i - mean`` and of ``m_i`` over participants: ``[T, 2]``."""
        apart = momenta - self._mean(momenta)
        parts = [
            [rows[:, start:stop].double().square().sum(1) for rows in (apart, momenta)]
            for start, stop in bucket.spans
        ]
        found = torch.stack([torch.stack(pair, 1) for pair in parts], 1).cpu()  # [k, T, 2]
        return sum_in_order(self._channel.gather(found)[self._channel.participants])


def _ratio(squares: Tensor) -> float:
    """Divide the first by the second; 0 before the first momentum."""
    apart, whole = squares.tolist()
    return apart / whole if whole else 0.0
