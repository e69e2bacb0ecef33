"""A data set and a model of one's own; the files of conf/ beside this one give them names.

PYTHONPATH=examples/own_data python train.py \\
    --config-dir examples/own_data/conf dataset=mine model=mycnn
"""

import torch
from torch import nn

from dlion.suite.data import ImageData, Images


def stripes(size: int = 16, count: int = 2000) -> ImageData:
    """Draw stripes that lie, stand or slope either way, in the place of pictures of one's own.

    What comes back may be any dlion.suite.data.Data: ImageData and ImageFiles have pictures,
    TextData tokens.
    """
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(4, (count,), generator=generator)
    x, y = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")
    phases = size * torch.rand(count, 1, 1, generator=generator)
    waves = torch.sin(torch.stack([y, x, x + y, x - y])[classes] + phases)
    noise = torch.randn(count, size, size, generator=generator)
    pixels = (128 + 60 * (waves + noise)).clamp(0, 255).to(torch.uint8)
    pictures = pixels.unsqueeze(1)  # [count, channels, size, size]
    return ImageData(pictures[200:], classes[200:], pictures[:200], classes[:200], classes=4)


def cnn(data: Images, width: int = 16) -> nn.Module:
    """Build a small CNN; the data set comes first, and says what goes in and out."""
    return nn.Sequential(
        nn.Conv2d(data.channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, data.classes),
    )
