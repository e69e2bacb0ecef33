"""A model that takes its time until the file that MARKER names is there."""

import os
import time
from pathlib import Path

import torch


class Slow(torch.nn.Linear):
    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not Path(os.environ["MARKER"]).exists():
            self.passes += 1
            time.sleep(0.1 if self.passes < 100 else 1)
        return super().forward(x.flatten(1))


def model(data, **options):
    return Slow(data.image_size**2, data.classes)
