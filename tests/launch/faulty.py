"""A model and an optimizer that fail in process 1 where the environment says: FAULT=KIND[:COUNT].

KIND is ``building``, ``forward``, ``error``, ``drift`` or ``nan`` (COUNT: forward passes),
``exchange`` or ``saving`` (COUNT: steps). Used as ``model._target_`` and ``optimizer._target_``; a
fault happens once if MARKER names a file.
"""

import os
import signal
from pathlib import Path

import torch

from dlion.optim import DLion


def _now(kind: str, count: int = 0) -> bool:
    wanted, _, when = os.environ.get("FAULT", "").partition(":")
    if wanted != kind or os.environ.get("RANK") != "1" or count != int(when or 0):
        return False
    marker = os.environ.get("MARKER")
    if marker and Path(marker).exists():
        return False
    if marker:
        Path(marker).touch()
    return True


def _die(kind: str, count: int = 0) -> None:
    if _now(kind, count):
        os.kill(os.getpid(), signal.SIGKILL)


class Linear(torch.nn.Linear):
    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        _die("forward", self.passes)
        if _now("error", self.passes):
            raise ValueError("boom in the forward pass")
        if _now("drift", self.passes):
            self.weight.data += 1
        if _now("nan", self.passes):
            x = x * torch.nan
        return super().forward(x.flatten(1))


def model(data, **options):
    _die("building")
    return Linear(data.channels * data.image_size**2, data.classes)


class Optimizer(DLion):
    def encode(self, bucket, local):
        super().encode(bucket, local)
        _die("exchange", bucket.step)  # while the others wait for its message

    def worker_state(self, i):
        _die("saving", self.param_groups[0]["steps"])
        return super().worker_state(i)
