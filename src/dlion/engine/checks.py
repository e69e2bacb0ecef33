"""What an optimizer refuses, in one sentence each, before it is used."""

import gc
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from dlion.engine.shards import EXCHANGE, local_part
from dlion.errors import TrainingFailed
from dlion.exchange import Channel
from dlion.values import parameters, refusal
from dlion.workers import Workers


def check_hyperparameters(kind: type, group: dict[str, Any]) -> None:
    """Refuse hyperparameters that a method cannot have; make numbers of tensors of one element."""
    types = parameters(kind)
    for name in types.keys() & group.keys():
        group[name] = _plain(group[name])
        _check(name, group[name], types[name])


def checked(constructor: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor refuse arguments that are not of its parameters' types."""
    known = inspect.signature(constructor)

    @wraps(constructor)
    def check_first(self: Any, *args: Any, **kwargs: Any) -> None:
        types = parameters(constructor)
        for name, value in known.bind(self, *args, **kwargs).arguments.items():
            if name in types:
                _check(name, _plain(value), types[name])
        constructor(self, *args, **kwargs)

    return check_first


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check(name: str, value: Any, hint: Any) -> None:
    wrong = refusal(value, hint)
    if wrong is not None:
        wrong = wrong.replace("null", "None").replace("type true or false", "give True or False")
        raise ValueError(f"{name}={value} {wrong}")


def check_pattern(name: str, pattern: str | None) -> re.Pattern[str] | None:
    """Compile a regular expression, or refuse what is none."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}={pattern} is no regular expression: {error}") from error


def check_parameters(tensors: Sequence[Tensor]) -> None:
    """Refuse what is not a real floating-point number, and the flat shards of FSDP1."""
    for tensor in tensors:
        if getattr(tensor, "_fsdp_flattened", False):
            raise ValueError(
                "the model is wrapped in FullyShardedDataParallel, whose processes hold different"
                " parts of flat parameters: use fully_shard (FSDP2), as examples/fsdp2.py does"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"parameters must be real floating-point numbers, not {tensor.dtype}")


def check_alike(workers: Workers, facts: dict[str, Any]) -> None:
    """Compare what all processes of the workers were given, by hash.

    Args:
        facts: the same keys on all processes, in words for the message; values are written as JSON.

    Raises:
        TrainingFailed: naming a process that differs from the first, and in what.
    """
    texts = (json.dumps(fact, default=str).encode() for fact in facts.values())
    digests = b"".join(hashlib.sha256(text).digest()[:8] for text in texts)
    own = torch.frombuffer(bytearray(digests), dtype=torch.int64)
    everyone = _gather(own, workers)
    first, *_ = ranks = workers.ranks
    for process, row in zip(ranks, everyone, strict=True):
        different = (row != everyone[0]).tolist()
        if any(different):
            what = [fact for fact, differs in zip(facts, different, strict=True) if differs]
            raise TrainingFailed(
                f"process {process} made its optimizer with other {' and other '.join(what)} than"
                f" process {first}: give all processes the same, in the same order"
            )


def _gather(values: Tensor, workers: Workers) -> Tensor:
    """Return values in main memory of all processes, ``[...]`` -> ``[P, ...]``."""
    return Channel(replace(workers, local=1).with_cpu_group()).gather(values[None])


def check_spread(workers: Workers) -> None:
    """Compare how many workers the processes host.

    Raises:
        TrainingFailed: naming a process that differs from process 0.
    """
    if workers.processes == 1:
        return
    first, *others = _gather(torch.tensor([workers.local]), workers).flatten().tolist()
    for process, local in enumerate(others, 1):
        if local != first:
            raise TrainingFailed(
                f"process {process} hosts {local} workers and process 0 {first}: give all processes"
                " the same number"
            )


def check_bare(params: Sequence[Tensor]) -> None:
    """Refuse parameters of a DistributedDataParallel, which would send float32 besides.

    One whose communication hook is torch's ``noop_hook`` sends no gradients.
    """
    if not dist.is_initialized():
        return
    ids = set(map(id, params))
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for found in gc.get_referrers(*kinds):  # its instances are among them
        if (
            type(found) in kinds
            and any(id(param) in ids for param in found.parameters())
            and not any(hook is noop_hook for hook, _ in found._comm_hooks)
        ):
            raise RuntimeError(
                "the model is wrapped in DistributedDataParallel, which would average the gradients"
                " in float32 before any message is made: give the bare model, as this optimizer"
                " takes the place of DistributedDataParallel too; where a framework insists on it,"
                " call its register_comm_hook(None, noop_hook), of"
                " torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"
            )


def check_state(
    parameter: int | str, saved: dict[str, Tensor], own: dict[str, Tensor], worker: Tensor
) -> None:
    """Refuse the saved state of other workers, and of another model or method.

    Args:
        parameter: its number or name.
        saved, own: its tensors by name; ``worker`` says whose they are.
        worker: whose they have to be: ids and the number of workers, int64 ``[k, 2]``.
    """
    owner = local_part(saved.get("worker", worker)).cpu()
    if not torch.equal(owner, worker):
        raise ValueError(
            f"this is the state of {_owner(owner)}, but this process hosts {_owner(worker)}: let"
            " each process load what it has saved itself, with as many processes and virtual"
            " workers; torch.distributed.checkpoint can give it to as many workers on other"
            " processes"
        )
    if _shapes(saved) != _shapes(own):
        differ = {name for name, _ in _shapes(saved).items() ^ _shapes(own).items()}
        if all(name.startswith(EXCHANGE) for name in differ):
            raise ValueError(
                "the saved state of the exchanges does not fit: load it with the bucket_cap_mb,"
                " ties and shards that it was saved with"
            )
        raise ValueError(
            f"the saved state of parameter {parameter} has {_shapes(saved)}, this optimizer has"
            f" {_shapes(own)}: load it into the same model and method"
        )


def _owner(rows: Tensor) -> str:
    """Workers in words, from ids and number of workers, int64 ``[k, 2]``."""
    ids, count = rows[:, 0].tolist(), int(rows[0, 1])
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))} of {count}"


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(local_part(value).shape) for name, value in state.items()}
