"""Workers that lie: what the vote is said to withstand."""

import torch
from torch import Tensor, nn

from dlion.streams import stream
from dlion.workers import Workers

ATTACKS = ("flip", "random", "stale")


class Byzantine:
    """Replaces the gradients of the last ``count`` workers before anything is made of them.

    ``flip``: the opposite; as every rule here is odd in the gradient, so is the message.
    ``random``: normal noise with the gradient's norm. ``stale``: that of the latest step that is a
    multiple of ``stale_steps``. Each is multiplied by ``scale``.

    Create it before the optimizer, so that gradients are replaced before they leave.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: Workers,
        seed: int,
        count: int,
        attack: str,
        scale: float,
        stale_steps: int,
    ):
        self.seed, self.attack, self.scale, self.stale_steps = seed, attack, scale, stale_steps
        first = workers.count - count
        self._liars = [i for i, worker in enumerate(workers.ids) if worker >= first]
        self._ids = workers.ids
        self._lies: tuple[int, int] | None = None  # local worker and step, while one lies
        self._kept: dict[int, list[Tensor]] = {}
        params = list(model.parameters()) if self._liars else []
        if attack == "stale":
            self._kept = {i: [torch.zeros_like(p) for p in params] for i in self._liars}
        for place, param in enumerate(params):
            param.register_post_accumulate_grad_hook(lambda p, place=place: self._lie(p, place))

    def enter(self, i: int, step: int, last: bool) -> None:
        """Before a backward pass of local worker i; ``last``: of this step."""
        self._lies = (i, step) if last and i in self._liars else None

    def state(self, i: int) -> dict[str, Tensor]:
        """What local worker i remembers."""
        return {f"stale.{place}": kept for place, kept in enumerate(self._kept.get(i, ()))}

    @torch.no_grad()
    def _lie(self, param: Tensor, place: int) -> None:
        grad = param.grad
        if self._lies is None or grad is None:
            return
        i, step = self._lies
        if self.attack == "flip":
            grad.neg_()
        elif self.attack == "random":
            draws = stream(self.seed, "attack", self._ids[i], step, place)
            noise = torch.randn(grad.shape, generator=draws).to(grad)
            grad.copy_(noise * (grad.norm() / noise.norm().clamp(min=1e-12)))
        elif step % self.stale_steps == 0:
            self._kept[i][place].copy_(grad)
        else:
            grad.copy_(self._kept[i][place])
        grad.mul_(self.scale)
