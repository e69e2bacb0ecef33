"""Images that fit in memory, as tensors: a batch is cut by index, without helper processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dlion.suite.data.base import Batch, Images, numbers_of, split_off, to_device
from dlion.suite.data.inputs import PictureInput


@dataclass
class ImageData(Images):
    """Images and their labels.

    Attributes:
        train_x, test_x: uint8 ``[N, C, H, W]``, square.
        train_y, test_y: int64 ``[N]``.
        classes: number of labels.
        crop: shift training images by up to an eighth of their size.
        flip: mirror every other training image.
        names: of the classes, in the order of their numbers.
        left_out: number of files or rows that were not taken, by reason.
        recorded: of the model that the images are for; None: a new one, which the statistics of the
            training images are for.
        levels: as in :class:`PictureInput`.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    crop: bool = False
    flip: bool = False
    names: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    recorded: PictureInput | None = None
    levels: Sequence[float] | None = None

    @property
    def channels(self) -> int:
        return self.train_x.shape[1]

    @property
    def image_size(self) -> int:
        return self.train_x.shape[-1]

    @property
    def train_size(self) -> int:
        return len(self.train_x)

    @property
    def labels(self) -> Tensor:
        return self.train_y

    @property
    def test_size(self) -> int:
        return len(self.test_x)

    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        images = self.train_x[indices]
        if self.crop or self.flip:
            padding = self.image_size // 8 if self.crop else 0
            images = crop_and_flip(images, padding, 0.5 if self.flip else 0.0, generator)
        labels = to_device(self.train_y[indices], device)
        return self._normalise(to_device(images, device)), labels

    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        labels = to_device(self.test_y[start:stop], device)
        return self._normalise(to_device(self.test_x[start:stop], device)), labels

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> "ImageData":
        train, test = split_off(self.train_size, fraction, seed)
        return replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            test_x=self.train_x[test],
            test_y=self.train_y[test],
        )

    @cached_property
    def input(self) -> PictureInput:
        if self.recorded is not None:
            names = tuple(self.names)
            return replace(self.recorded, image_size=self.image_size, names=names)
        mean, deviation = self._statistics
        return PictureInput(
            channels=self.channels,
            image_size=self.image_size,
            mean=mean.flatten().tolist(),
            deviation=deviation.flatten().tolist(),
            names=tuple(self.names),
            levels=self.levels,
        )

    def like(self, source: PictureInput) -> "ImageData":
        return replace(
            self,
            train_x=source.in_its_colours(self.train_x),
            test_x=source.in_its_colours(self.test_x),
            recorded=source,
        )

    def numbered_as(self, names: Sequence[str]) -> "ImageData":
        numbers = torch.tensor(numbers_of(self.names, names))
        return replace(
            self,
            train_y=numbers[self.train_y],
            test_y=numbers[self.test_y],
            names=names,
            classes=len(names),
        )

    @property
    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each channel, from at most 10,000 training images.

        They are taken evenly, as the classes may lie one behind the other.
        """
        sample = self.train_x[:: -(-self.train_size // 10_000)].to(torch.float32)
        deviation, mean = torch.std_mean(sample, dim=(0, 2, 3), correction=0, keepdim=True)
        return mean[0], deviation[0].clamp(min=1)

    def _normalise(self, images: Tensor) -> Tensor:
        return self.input.normalise(images)


def crop_and_flip(
    images: Tensor, padding: int, flip_probability: float, generator: torch.Generator
) -> Tensor:
    """Shift each image by up to ``padding`` pixels each way (zeros come in), and mirror some.

    The usual augmentation of CIFAR-10 (4 pixels at 32), for the whole batch at once.
    """
    count, _, size, _ = images.shape
    shift = torch.randint(2 * padding + 1, (2, count), generator=generator)
    flip = torch.rand(count, generator=generator) < flip_probability
    padded = torch.nn.functional.pad(images, 4 * (padding,))
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # [N, C, 2 padding + 1, same, S, S]
    cut = windows[torch.arange(count), :, shift[0], shift[1]]
    return torch.where(flip.view(-1, 1, 1, 1), cut.flip(-1), cut)
