"""Workers that are absent, and workers that send false gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlion.streams import stream
from dlion.suite.data.base import to_device
from dlion.workers import Workers


class Participation:
    """Draws the workers that take part in a step, from the seed and the step alone.

    Args:
        workers: n.
        participation: share of the workers, at least one, drawn again for each step.
        drop: probability of each of those to be absent from the step nevertheless. If that leaves
            none, the first of them stays.
        seed: of the draws.
    """

    def __init__(self, workers: int, participation: float, drop: float, seed: int):
        self.workers, self.drop, self.seed = workers, drop, seed
        self.invited = max(1, round(participation * workers))

    def at(self, step: int) -> list[int]:
        """Return the workers that take part in a step, ascending."""
        if self.invited == self.workers and not self.drop:
            return list(range(self.workers))
        draws = stream(self.seed, "attendance", step)
        invited = torch.randperm(self.workers, generator=draws)[: self.invited].sort().values
        stays = torch.rand(len(invited), generator=draws) >= self.drop
        return invited[stays].tolist() or invited[:1].tolist()


class Byzantine:
    """Replaces the gradients of the last workers before anything is made of them.

    ``flip``: by the opposite; as every rule here is odd in the gradient, so is the message.
    ``random``: by normal noise of the gradient's norm. ``stale``: by that of the latest step that
    is a multiple of ``stale_steps``. Each is multiplied by ``scale``.

    Create it before the optimizer, so that its hooks run before those that send gradients.

    Args:
        model: whose gradients are replaced.
        workers: all workers.
        seed: of the noise.
        faults: settings ``byzantine`` (number of such workers), ``attack``, ``scale`` and
            ``stale_steps``.
    """

    def __init__(self, model: nn.Module, workers: Workers, seed: int, faults: Any):
        self.seed, self.attack, self.scale = seed, faults.attack, faults.scale
        self.stale_steps = faults.stale_steps
        first = workers.count - faults.byzantine
        self._worker_ids = workers.ids
        self._byzantine = [i for i, worker in enumerate(workers.ids) if worker >= first]
        self._active: tuple[int, int] | None = None  # local worker and step
        self._stale: dict[int, list[Tensor]] = {}
        params = list(model.parameters()) if self._byzantine else []
        if self.attack == "stale":
            self._stale = {i: [torch.zeros_like(p) for p in params] for i in self._byzantine}
        for index, param in enumerate(params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._replace, index))

    @contextmanager
    def attacking(self, i: int, step: int) -> Iterator[None]:
        """Replace the gradients of the backward pass in here if local worker i is Byzantine.

        It must be the worker's last pass in the step, which completes its gradients.
        """
        self._active = (i, step) if i in self._byzantine else None
        yield
        self._active = None

    def state(self, i: int) -> dict[str, Tensor]:
        """Return the gradients that local worker i repeats, by name."""
        return {f"stale.{index}": grad for index, grad in enumerate(self._stale.get(i, ()))}

    @torch.no_grad()
    def _replace(self, index: int, param: Tensor) -> None:
        grad = param.grad
        if self._active is None or grad is None:
            return
        i, step = self._active
        if self.attack == "flip":
            grad.neg_()
        elif self.attack == "random":
            draws = stream(self.seed, "attack", self._worker_ids[i], step, index)
            noise = to_device(torch.randn(grad.shape, generator=draws), grad.device).to(grad.dtype)
            grad.copy_(noise * (grad.norm() / noise.norm().clamp(min=1e-12)))
        elif step % self.stale_steps == 0:
            self._stale[i][index].copy_(grad)
        else:
            grad.copy_(self._stale[i][index])
        grad.mul_(self.scale)
