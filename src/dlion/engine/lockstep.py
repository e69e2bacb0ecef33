"""Checks of values that must be equal on all processes.

At construction the processes compare hashes of what they were given. In every step the header of a
message says in which step its sender is, and a checksum of its hyperparameters.
"""

import hashlib
import json
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlion.engine.shards import local_part
from dlion.errors import TrainingFailed
from dlion.exchange import Channel, is_broken
from dlion.transfer import download
from dlion.wire import Headers
from dlion.workers import Workers

_PLAIN = (int, float, str, bool, list, tuple, type(None))


def plain_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return numbers, texts and lists among named values; objects are of one process alone."""
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, _PLAIN) and name not in ("params", "param_names")
    }


def facts_about(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of parameter groups that processes must agree on."""
    params = [tensor for group in groups for tensor in group["params"]]
    return {
        "hyperparameters": [plain_values(group) for group in groups],
        "parameter groups": [len(group["params"]) for group in groups],
        "parameter names": [group.get("param_names") for group in groups],
        "parameter shapes": [list(local_part(tensor).shape) for tensor in params],
        "parameter dtypes": [str(tensor.dtype) for tensor in params],
        "frozen parameters": [tensor.requires_grad for tensor in params],
    }


def check_equal(workers: Workers, facts: dict[str, Any]) -> None:
    """Compare the arguments of all processes of the workers by hash.

    Args:
        facts: the same keys on all processes, in words for the message; values are written as JSON.

    Raises:
        TrainingFailed: naming a process that differs from the first, and in what.
    """
    texts = (json.dumps(fact, default=str).encode() for fact in facts.values())
    digests = b"".join(hashlib.sha256(text).digest()[:8] for text in texts)
    own = torch.frombuffer(bytearray(digests), dtype=torch.int64)
    everyone = gather(own, workers)
    first, *_ = ranks = workers.ranks
    for process, row in zip(ranks, everyone, strict=True):
        different = (row != everyone[0]).tolist()
        if any(different):
            what = [fact for fact, differs in zip(facts, different, strict=True) if differs]
            raise TrainingFailed(
                f"process {process} made its optimizer with other {' and other '.join(what)} than"
                f" process {first}: give all processes the same, in the same order"
            )


def check_local_workers(workers: Workers) -> None:
    """Compare how many workers the processes host.

    Raises:
        TrainingFailed: naming a process that differs from process 0.
    """
    if workers.processes == 1:
        return
    first, *others = gather(torch.tensor([workers.local]), workers).flatten().tolist()
    for process, local in enumerate(others, 1):
        if local != first:
            raise TrainingFailed(
                f"process {process} hosts {local} workers and process 0 {first}: give all processes"
                " the same number"
            )


def gather(values: Tensor, workers: Workers) -> Tensor:
    """Return values in main memory of all processes, ``[...]`` -> ``[P, ...]``.

    Raises:
        RuntimeError: if another process does not come.
    """
    try:
        return Channel(replace(workers, local=1).with_cpu_group()).gather(values[None])
    except RuntimeError as error:
        if not is_broken(error):
            raise
        raise RuntimeError(
            f"the processes could not be compared ({error}): another has ended, see its error, or"
            " hangs, or makes another number of optimizers than this one"
        ) from error


def check_data(params: Sequence[Tensor], workers: Workers) -> None:
    """Warn where the gradients of all processes are equal: they read the same samples."""
    grads = [local_part(tensor.grad) for tensor in params if tensor.grad is not None]
    known = (grad for grad in grads if not grad.is_sparse and grad.numel())  # not empty shards
    hashes = [torch.hash_tensor(grad).view(torch.int64) for grad in known]
    own = torch.stack(download(hashes)) if hashes else torch.zeros(1, dtype=torch.int64)
    digest = zlib.crc32(own.numpy().tobytes()) if own.any() else -1
    everyones = gather(torch.tensor(digest), workers)
    if digest >= 0 and workers.rank == 0 and bool((everyones == digest).all()):
        warnings.warn(
            f"all {workers.processes} processes have the same gradients in this step: if they read"
            " the same samples, give each its own, with"
            " torch.utils.data.distributed.DistributedSampler say",
            stacklevel=2,
        )


def hyperparameters(groups: Sequence[dict[str, Any]]) -> str:
    """Return the hyperparameters of groups as text, equal where they are equal."""
    apart = {"steps": None}  # headers tell them by themselves
    return repr([sorted((plain_values(group) | apart).items()) for group in groups])


def check_in_step(
    headers: Headers,
    senders: Sequence[int],
    kind: str,
    names: Sequence[str],
    step: int,
    groups: Sequence[dict[str, Any]],
) -> None:
    """Compare all senders, a ``kind`` of such numbers, with the first.

    Args:
        headers: those of the senders.
        names: of the parameters that the messages are about.
        step: of this process.
        groups: of the parameters here, for the message.

    Raises:
        TrainingFailed: if one has a gradient that is not finite, is in another step, or has other
            hyperparameters.
    """
    for sender, broken in zip(senders, headers.broken, strict=True):
        if broken is not None:
            raise not_finite(names[broken], f"{kind} {sender}", step)
    first, *others = zip(senders, headers.steps, headers.checksums, strict=True)
    for sender, their_step, their_checksum in others:
        if their_step != first[1]:
            raise TrainingFailed(
                f"{kind} {sender} is in step {their_step + 1}, {kind} {first[0]} in step"
                f" {first[1] + 1}: all processes must load the same state and call step() equally"
                " often"
            )
        if their_checksum != first[2]:
            rates = ", ".join(map(str, dict.fromkeys(group["lr"] for group in groups)))
            raise TrainingFailed(
                f"in step {first[1] + 1} {kind} {sender} has other hyperparameters or frozen"
                f" parameters than {kind} {first[0]} (here: lr={rates}): all processes must"
                " set the same, and call step() of the optimizer and of its schedules equally often"
            )


def not_finite(name: str, whose: str, step: int) -> TrainingFailed:
    """Return the error for a gradient that is not finite."""
    return TrainingFailed(
        f"the gradient of {name} is not finite on {whose} in step {step + 1}: lower the learning"
        " rate, or leave such gradients out with nonfinite=skip"
    )
