"""Comparisons of processes, which must be given the same and stay in step.

Before the first step hashes of what they were given; in every step a checksum that goes with each
message. A process that differs ends training on all of them, with one sentence.
"""

import hashlib
import json
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.checks import check_alone, check_bare, check_unsplit, plain
from dlion.core.bucket import Bucket
from dlion.core.header import Headers
from dlion.core.layout import local_part
from dlion.errors import TrainingFailed
from dlion.exchange import Channel, is_broken
from dlion.extensions.protocol import Extension
from dlion.transfer import download
from dlion.workers import Workers, check_gpus

_SIMPLE = {int, float, str, bool, type(None)}
_PLAIN = (*_SIMPLE, list, tuple)


class Lockstep(Extension):
    """Compares the processes of an optimizer's workers.

    Raises:
        TrainingFailed: if they were given other parameters or settings, are in different steps, or
            have different hyperparameters.
        RuntimeError: if the model is wrapped in a DistributedDataParallel, or the optimizer was
            made before the process group.
    """

    header_bytes = 4

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        self._workers = optimizer.workers
        named_later = optimizer.options.get("manager") is not None
        self._met_nobody = not (optimizer._named or named_later or dist.is_initialized())
        self._first, self._checksum = True, b""
        self._local: int | None = None  # whose messages it goes with
        check_unsplit()
        check_local_workers(self._workers)
        check_equal(self._workers, {"settings": settings_of(optimizer)})

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        params = [tensor for group in groups for tensor in group["params"]]
        for tensor in params[:1]:
            check_gpus(self._workers, tensor.device)
        check_equal(self._workers, facts_about(groups))
        check_bare(params)

    def before_step(self) -> bool:
        if self._first:
            params = self.optimizer.params
            check_bare(params)
            several = self._workers.processes > 1 and self._workers.local == 1
            if several and not self.optimizer.schedule.deferred:
                check_data(params, self._workers)
            if self._met_nobody:
                check_alone()
        return True

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        optimizer = self.optimizer
        if optimizer.schedule.at_step or local != self._local:  # else once for all buckets
            self._local = local
            trained = sum(tensor.requires_grad for tensor in optimizer.frozen)
            for bucket in optimizer.buckets:
                trained += len(bucket.slots)
            facts = f"{trained} {hyperparameters(optimizer.param_groups)}"
            self._checksum = struct.pack("<I", zlib.crc32(facts.encode()))

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        return self._checksum

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        if any(step >= 2**31 for step in headers.steps):  # vetoed: the numbers say nothing
            return
        rows = headers.extra[:, self.place].tolist()
        first, *others = zip(senders, headers.steps, rows, strict=True)
        for sender, step, checksum in others:
            if step != first[1]:
                raise TrainingFailed(
                    f"{sender} is in step {step + 1}, {first[0]} in step {first[1] + 1}: all"
                    " processes must load the same state and call step() equally often"
                )
            if checksum != first[2]:
                here = "; ".join(dict.fromkeys(map(_shown, self.optimizer.param_groups)))
                raise TrainingFailed(
                    f"in step {step + 1} {sender} has other hyperparameters or frozen parameters"
                    f" than {first[0]} (here: {here}): all processes must set the same, and call"
                    " step() of the optimizer and of its schedules equally often"
                )

    def after_step(self, counts: bool) -> None:
        self._first, self._local = self._first and not counts, None


def plain_values(facts: dict[str, Any]) -> dict[str, Any]:
    """Return numbers, texts and lists among named values; objects are of one process alone."""
    found = {}
    for name, value in facts.items():
        if name not in ("params", "param_names"):
            parts = value if type(value) is tuple else (value,)
            value = value if {*map(type, parts)} <= _SIMPLE else plain(value)
            if isinstance(value, _PLAIN):
                found[name] = value
    return found


def hyperparameters(groups: Sequence[dict[str, Any]]) -> str:
    """Return the hyperparameters of groups as text, equal where they are equal."""
    apart = {"steps": None}  # headers tell them by themselves
    return repr([sorted((plain_values(group) | apart).items()) for group in groups])


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return what describes an optimizer: its public attributes and options."""
    public = {name: value for name, value in optimizer.__dict__.items() if name[0] != "_"}
    known = plain_values(public | optimizer.options)
    lists = {name for name, value in known.items() if isinstance(value, list | tuple)}
    objects = {name for name in lists if not all(isinstance(each, int) for each in known[name])}
    return {"method": optimizer.__class__.__name__} | {
        name: value for name, value in known.items() if name not in objects
    }


def _shown(group: dict[str, Any]) -> str:
    hidden = "steps", "added"
    apart = {name: value for name, value in plain_values(group).items() if name not in hidden}
    return ", ".join(f"{name}={value}" for name, value in apart.items())


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
