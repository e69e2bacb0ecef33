"""Comparisons of processes before the first step, of hashes of what they were given.

In later steps the header of every message is compared, see ``header.py``.
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

from dlion.core.header import plain_values
from dlion.errors import TrainingFailed
from dlion.exchange import Channel, is_broken
from dlion.extensions.shards import local_part
from dlion.transfer import download
from dlion.workers import Workers


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
