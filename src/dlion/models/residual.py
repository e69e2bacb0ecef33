"""The residual network that He et al. made for CIFAR-10, small enough for a laptop."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, ``[B, C, H, W]`` -> ``[B, width, H', W']``."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Three stages of residual blocks, each of half the resolution and twice the width.

    Images ``[B, C, H, W]`` -> logits ``[B, classes]``. Source: He et al. 2016 (arXiv 1512.03385),
    section 4.2, with projections where the shape changes.
    """

    def __init__(self, channels: int, classes: int, blocks: int, width: int):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        widths = [width] * blocks + [2 * width] * blocks + [4 * width] * blocks
        strides = [1 if i % blocks or i == 0 else 2 for i in range(3 * blocks)]
        inputs = [width, *widths]
        self.blocks = nn.Sequential(*map(Residual, inputs, widths, strides))
        self.head = nn.Linear(4 * width, classes)
        self.to(memory_format=torch.channels_last)  # faster on a CPU

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))
