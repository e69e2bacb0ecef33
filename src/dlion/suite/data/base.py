"""The interface between the training loop and a data set."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dlion.errors import UserError
from dlion.suite.data.folders import describe

Batch = tuple[Tensor, Tensor]


class Data(ABC):
    """Numbered samples to train on and to test on.

    Attributes:
        train_size, test_size: number of samples.
        test_batch_size: samples in a test batch; fixed, as it may touch the last bit of a result.
        sums: length m of what :meth:`score` returns.
        left_out: number of files, rows or documents that were not taken, by reason.
        input: makes a model's input of a file or text; None: not known.
        label_smoothing: share of each label that :meth:`loss` spreads over all classes, as the run
            sets it.
    """

    test_batch_size: int
    sums: int
    left_out: Mapping[str, int] = {}
    samples = "samples"
    label_smoothing = 0.0

    @property
    def input(self) -> Any:
        return None

    def like(self, source: Any) -> Self:
        """Return the same data as the model of another :attr:`input` takes it."""
        return self

    def describe(self) -> str:
        """Describe the data in a line: size, and what was left out and why."""
        there = f"{self.train_size:,} {self.samples} to train on, {self.test_size:,} to test on"
        return "; ".join(filter(None, [there, describe(self.left_out)]))

    @property
    @abstractmethod
    def train_size(self) -> int: ...

    @property
    @abstractmethod
    def test_size(self) -> int: ...

    @property
    def labels(self) -> Tensor | None:
        """The training samples' labels, int64, if each sample has one."""
        return None

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        """Return training samples: a model's inputs and its targets.

        Args:
            indices: numbers of the samples, int64 ``[B]``.
            generator: makes all random choices, on the CPU.
            device: where the batch shall be.
        """

    @abstractmethod
    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        """Return test samples ``start .. stop - 1``, like :meth:`batch`."""

    @abstractmethod
    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> Self:
        """Return the same data with part of the training set as test set, for tuning."""

    @abstractmethod
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over a batch, a scalar, which training minimises."""

    @abstractmethod
    def score(self, logits: Tensor, y: Tensor, start: int) -> Tensor:
        """Return sums over the test batch that begins at sample ``start``, float64 ``[m]``."""

    @abstractmethod
    def results(self, sums: list[float]) -> dict[str, float]:
        """Return ``test_loss`` (nats) and other results from the sums over all test batches."""

    patience: float = 600  # seconds for a batch of helper processes; of a run: its timeout

    def batches(
        self, requests: Iterable[tuple[Tensor, int]], device: str = "cpu"
    ) -> Iterator[Batch]:
        """Yield a training batch for every (indices, seed of all random choices), in order."""
        for indices, seed in requests:
            yield self.batch(indices, torch.Generator().manual_seed(seed), device)

    def test_batches(self, starts: Iterable[int], device: str = "cpu") -> Iterator[Batch]:
        """Yield the test batches that begin at these samples, in order."""
        for start in starts:
            yield self.test_batch(start, start + self.test_batch_size, device)


class Images(Data):
    """Images, normalised float32 ``[B, C, H, W]``, and labels ``[B]`` or shares ``[B, classes]``.

    Attributes:
        channels: number of colour channels, C.
        image_size: height and width in pixels.
        classes: number of labels.
        names: of the classes, in the order of their numbers; empty if they are not known.
    """

    channels: int
    image_size: int
    classes: int
    names: Sequence[str] = ()
    test_batch_size = 250
    sums = 3
    samples = "pictures"

    def numbered_as(self, names: Sequence[str]) -> Self:
        """Return the same data with the class numbers of a model.

        Raises:
            UserError: if there is a class that the model does not have.
        """
        return self

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y, label_smoothing=self.label_smoothing)

    def score(self, logits: Tensor, y: Tensor, start: int) -> Tensor:
        return torch.cat([_loss(logits, y), (logits.argmax(-1) == y).sum().view(1).double()])

    def results(self, sums: list[float]) -> dict[str, float]:
        loss, count, correct = sums
        return {"test_loss": loss / count, "test_accuracy": correct / count}


class Text(Data):
    """Tokens ``[B, T]`` and the tokens that follow them, int64.

    Attributes:
        vocabulary: number of different tokens.
        context: tokens a model sees at once.
    """

    vocabulary: int
    context: int
    sums = 2

    @property
    def test_batch_size(self) -> int:  # type: ignore[override]
        """Samples in a test batch: as many as make 8,192 tokens."""
        return max(1, 8192 // self.context)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        logits = logits.flatten(0, -2).float()
        return F.cross_entropy(logits, y.flatten(), label_smoothing=self.label_smoothing)

    def score(self, logits: Tensor, y: Tensor, start: int) -> Tensor:
        return _loss(logits, y)

    def results(self, sums: list[float]) -> dict[str, float]:
        loss, count = sums
        return {"test_loss": loss / count}


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; copies to a GPU do not block."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def numbers_of(names: Sequence[str], known: Sequence[str]) -> list[int]:
    """Return the numbers that classes have in a model that knows classes.

    Raises:
        UserError: if it does not know one.
    """
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"the data set has the class {unknown[0]}, which the model was not trained on: it knows"
            f" {', '.join(known[:20])}"
        )
    return [list(known).index(name) for name in names]


def split_off(size: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the samples that stay, and of a random fraction that is held out."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    held_out = round(fraction * size)
    return order[held_out:], order[:held_out]


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the losses and the number of labels; labels of -100 do not count."""
    loss = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="sum")
    return torch.stack([loss.double(), (y != -100).sum().double()])
