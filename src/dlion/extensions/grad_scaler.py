"""``torch.amp.GradScaler``: an overflow on one worker skips the step on all.

That takes one more small collective a step; each process keeps a scale of its own.
"""

from typing import Any

import torch

from dlion.extensions.protocol import Extension


class GradScaling(Extension):
    """Looks for what a GradScaler sets before it calls ``step()``: ``found_inf``, ``grad_scale``.

    Raises:
        RuntimeError: where messages would be made of scaled gradients.
    """

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        optimizer._step_supports_amp_scaling = True

    def before_step(self) -> bool:
        optimizer = self.optimizer
        if getattr(optimizer, "found_inf", None) is None:
            return True
        if optimizer.workers.local > 1 or not optimizer.schedule.at_step:
            raise RuntimeError(
                "under a GradScaler messages must not be made of scaled gradients: create the"
                " optimizer with overlap=False and one worker a process"
            )
        overflow = optimizer.found_inf.view(1) != 0
        if optimizer.channel.gather(overflow[None]).any():
            return False
        if optimizer.grad_scale is not None:
            self._unscale()
        return True

    @torch.no_grad()
    def _unscale(self) -> None:
        """Divide the gradients by the scale, without the host knowing it."""
        grads = [each.grad for each in self.optimizer.params if each.grad is not None]
        factor = self.optimizer.grad_scale.double().reciprocal().float()
        for device in {grad.device for grad in grads}:
            here = [grad for grad in grads if grad.device == device]
            torch._foreach_mul_(here, factor.to(device))
