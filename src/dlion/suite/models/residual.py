"""A residual network for CIFAR-10 that a laptop trains to the end."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stage(nn.Module):
    """A convolution, pooled, and residual ones, ``[B, C, H, W]`` -> ``[B, width, H/2, W/2]``."""

    def __init__(self, channels: int, width: int, blocks: int):
        super().__init__()
        self.entry = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.entry_norm = nn.BatchNorm2d(width)
        self.residuals = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.entry_norm(F.max_pool2d(self.entry(x), 2)))
        for residual in self.residuals:
            x = x + residual(x)
        return x


class SmallResNet(nn.Module):
    """Three stages, each of half the resolution and twice the width of the one before.

    Images ``[B, C, H, W]`` -> logits ``[B, classes]``. After David Page's ResNet-9 (How to train
    your ResNet, 2018), which is wider, and has residuals of two convolutions in two of its stages.
    """

    def __init__(self, channels: int, classes: int, blocks: int, width: int):
        super().__init__()
        self.stem = nn.Conv2d(channels, width // 2, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width // 2)
        self.stages = nn.Sequential(
            Stage(width // 2, width, blocks),
            Stage(width, 2 * width, blocks),
            Stage(2 * width, 4 * width, blocks),
        )
        self.head = nn.Linear(4 * width, classes)
        self.to(memory_format=torch.channels_last)  # faster on a CPU

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.stem_norm(self.stem(x))))
        return self.head(x.amax((2, 3)))
