"""Which workers take part in a step: a function of the seed and the step alone."""

import torch

from dlion.streams import stream


class Participation:
    """Partial participation, and workers that are absent by accident.

    Args:
        workers: n.
        participation: share of the workers, at least one, drawn anew for each step.
        drop: probability of each of those to be absent from the step nevertheless. If that leaves
            none, the first of them stays.
        seed: of the draws.
    """

    def __init__(self, workers: int, participation: float, drop: float, seed: int):
        self.workers, self.drop, self.seed = workers, drop, seed
        self.invited = max(1, round(participation * workers))

    def at(self, step: int) -> list[int]:
        """The workers that take part in a step, ascending."""
        everyone = list(range(self.workers))
        if self.invited == self.workers and not self.drop:
            return everyone
        draws = stream(self.seed, "attendance", step)
        invited = torch.randperm(self.workers, generator=draws)[: self.invited].sort().values
        stays = torch.rand(len(invited), generator=draws) >= self.drop
        return invited[stays].tolist() or invited[:1].tolist()
