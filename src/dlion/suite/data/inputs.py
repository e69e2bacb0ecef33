"""Model inputs made from pictures or texts: a part of the model that leaves a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dlion.errors import UserError
from dlion.suite.data.pictures import Source, read_picture
from dlion.suite.data.torchvision_ops import declare_missing_operators

_PICTURES = (Path, bytes, Image.Image)


@dataclass(frozen=True)
class PictureInput:
    """Turns pictures into the input that a model was trained on.

    ::

        model = dlion.load_model("outputs/pets")
        logits = model(model.input("photo.jpg"))
        print(model.input.names[logits.argmax()])

    Attributes:
        channels: 1 (grey) or 3.
        image_size: height and width in pixels, S.
        scale, mean, deviation: of values from 0 to 255: ``(value / scale - mean) / deviation`` for
            each channel.
        names: of the classes, in the order of the logits; empty if they are not known.
        center_crop: cut the middle out of a picture that was made a little larger, as is usual for
            ImageNet, instead of out of the whole picture.
        levels: the grey values of pictures of more than 8 bits that become black and white; None:
            the training pictures had 8 bits.
    """

    channels: int
    image_size: int
    mean: Sequence[float]
    deviation: Sequence[float]
    scale: float = 1.0
    names: Sequence[str] = ()
    center_crop: bool = False
    levels: Sequence[float] | None = None

    def __call__(self, *pictures: str | Source | Sequence[str | Source]) -> Tensor:
        """Return pictures as a batch, float32 ``[B, C, S, S]``.

        Args:
            pictures: files, contents of files, Pillow's images, or pixels, uint8 ``[H, W]`` or
                ``[H, W, 3]``; or a list of such.

        Raises:
            UserError: if one cannot be read.
        """
        if len(pictures) == 1 and isinstance(pictures[0], list | tuple):
            pictures = tuple(pictures[0])
        if not pictures:
            raise UserError("there are no pictures: give one or more")
        return self.normalise(torch.stack([self.pixels(picture) for picture in pictures]))

    def pixels(self, picture: str | Source) -> Tensor:
        """Return a picture in the size of the model, uint8 ``[C, S, S]``."""
        source = Path(picture).expanduser() if isinstance(picture, str) else picture
        is_array = isinstance(source, np.ndarray)
        known = source.dtype == np.uint8 if is_array else isinstance(source, _PICTURES)
        if not known and not hasattr(source, "read"):
            kind = f"an array of {source.dtype}" if is_array else type(source).__name__
            raise UserError(
                "a picture is a file, the content of one, Pillow's image, or a uint8 array [H, W]"
                f" or [H, W, 3], not {kind}"
            )
        name = str(source) if isinstance(source, Path) else "the picture"
        image = read_picture(source, name, keep_grey=True, levels=self.levels)
        image = self.cut(image.convert("L" if self.channels == 1 else "RGB"))
        values = torch.from_numpy(np.array(image))
        return values.unsqueeze(0) if self.channels == 1 else values.permute(2, 0, 1)

    def cut(self, image: Image.Image) -> Image.Image:
        """Cut the middle out of a picture, in the size of the model."""
        size = self.image_size
        if self.center_crop:
            declare_missing_operators()
            from torchvision.transforms import v2

            return v2.CenterCrop(size)(v2.Resize(round(size * 256 / 224))(image))
        return image if image.size == (size, size) else ImageOps.fit(image, (size, size))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return values from 0 to 255, ``[B, C, S, S]``, as the model takes them, float32."""
        if pixels.device not in self._on:
            there = (torch.tensor(c, device=pixels.device) for c in (self.mean, self.deviation))
            self._on[pixels.device] = tuple(c.view(-1, 1, 1) for c in there)
        mean, deviation = self._on[pixels.device]
        return (pixels.to(torch.float32) / self.scale - mean) / deviation

    def in_its_colours(self, pixels: Tensor) -> Tensor:
        """Return uint8 ``[N, C, S, S]`` in grey or colour, as the model takes it."""
        if pixels.shape[1] == self.channels:
            return pixels
        if self.channels == 3:
            return pixels.expand(-1, 3, -1, -1).contiguous()
        weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)  # ITU-R 601, as in Pillow
        grey = [((part * weights).sum(1, keepdim=True) + 2**15) >> 16 for part in pixels.split(512)]
        return torch.cat(grey).to(torch.uint8)

    @cached_property
    def _on(self) -> dict[torch.device, tuple[Tensor, ...]]:
        """Mean and deviation, by device."""
        return {}


@dataclass(frozen=True)
class TextInput:
    """Turns text into tokens: ``model(model.input("Once upon"))``.

    Attributes:
        tokenizer: one of transformers, or an object that is called in the same way.
        context: the most tokens that the model sees at once.
    """

    tokenizer: Any
    context: int

    def __call__(self, text: str) -> Tensor:
        """Return the last ``context`` tokens of a text, int64 ``[1, T]``.

        Raises:
            UserError: if it is no text, or has no tokens.
        """
        if not isinstance(text, str):
            raise UserError(f"give one text, not {type(text).__name__}: texts differ in length")
        (ids,) = self.tokenizer([text])["input_ids"]
        if not len(ids):
            raise UserError("the text has no tokens: give at least a character")
        return torch.tensor([list(map(int, ids))[-self.context :]], dtype=torch.int64)

    def text(self, tokens: Tensor) -> str:
        """Return the text of tokens ``[T]``."""
        return self.tokenizer.decode(tokens.tolist())
