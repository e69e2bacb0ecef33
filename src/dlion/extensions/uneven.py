"""Uneven numbers of batches (torch's Join): a worker without a batch takes no part in a step."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from dlion.core.header import plain_values
from dlion.extensions.lockstep import gather
from dlion.workers import Workers


def check_possible(optimizer: Any) -> None:
    """Refuse settings under which workers cannot leave during a pass over the data.

    Raises:
        RuntimeError: naming those that are possible.
    """
    one = optimizer.workers.local == 1 and not optimizer.dense_processes > 1
    if optimizer.overlap or optimizer._step.elastic is not None or not one:
        raise RuntimeError(
            "torch's Join needs an optimizer with overlap=False and one worker a process, without"
            " dense_group and manager: create it so, or give all workers equally many batches"
        )
    if len(optimizer.channel.participants) < optimizer.workers.count:
        raise RuntimeError(
            "torch's Join names the participants: call set_participants(None) before it"
        )


def meet(optimizer: Any, here: bool) -> bool:
    """Agree on the participants of a step, those that have a batch; the others follow their rates.

    Args:
        optimizer: on every process of its workers.
        here: whether this process has a batch.

    Returns:
        Whether a GradScaler calls the step of some worker.
    """
    notice = Join.notify_join_context(optimizer) if here else None
    if notice is not None:
        notice.wait()
    workers = optimizer.workers
    scaled = getattr(optimizer, "found_inf", None) is not None
    rows = gather(torch.tensor([here, scaled]), workers)
    present = rows[:, 0].nonzero().flatten().tolist()
    everyone = len(present) == workers.processes
    optimizer.channel.set_participants(None if everyone else present)
    if not everyone:
        text = json.dumps([plain_values(group) for group in optimizer.param_groups])
        theirs = json.loads(_text_of(present[0], text, workers))
        for own, values in zip(optimizer.param_groups, theirs, strict=True):
            for name, value in values.items():
                own[name] = tuple(value) if isinstance(own.get(name), tuple) else value
    return bool(rows[:, 1].any())


def _text_of(source: int, text: str, workers: Workers) -> str:
    """Broadcast the text of one process to all, without pickle."""
    content, group = torch.tensor([*text.encode()]), workers.with_cpu_group().group
    size = torch.tensor(len(content))
    dist.broadcast(size, group=group, group_src=source)
    if len(content) != size:
        content = content.new_empty(int(size))
    dist.broadcast(content, group=group, group_src=source)
    return bytes(content.tolist()).decode()


class Shadow(JoinHook):
    """Steps of an optimizer whose process has no batch left."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Take the step that the others take, without a message of its own."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        if meet(optimizer, here=False):
            optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), None
        config, optimizer._join_config = optimizer._join_config, _without(optimizer)
        try:
            optimizer.step()
        finally:
            optimizer._join_config = config
            optimizer.found_inf = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Let all workers take part again."""
        self.optimizer._join_config = _without(self.optimizer)
        self.optimizer.channel.set_participants(None)


def _without(optimizer: Any) -> Any:
    return optimizer._join_config._replace(enable=False)
