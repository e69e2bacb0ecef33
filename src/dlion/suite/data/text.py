"""Text as tokens, and a text for every machine: the source of the running Python's library."""

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlion.errors import TrainingFailed, UserError
from dlion.suite.data.base import Batch, Text, to_device
from dlion.suite.data.inputs import TextInput
from dlion.suite.data.tokenizers import BYTES, load_tokenizer
from dlion.values import Count

# tests, installed packages, generated tables, and bundled programs
_LEFT_OUT = {
    "__pycache__",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_TEST_EVERY = 20  # files


@dataclass
class TextData(Text):
    """Tokens for next-token prediction.

    Sample i is the i-th stretch of ``context`` tokens and the token after it.

    Attributes:
        train_tokens, test_tokens: integers ``[T]``.
        vocabulary: number of different tokens.
        context: tokens a model sees at once.
        tokenizer_at: the folder of the tokenizer, or ``bytes``; None: not known.
    """

    train_tokens: Tensor
    test_tokens: Tensor
    vocabulary: int
    context: int
    tokenizer_at: str | None = None

    @property
    def tokenizer(self) -> Any:
        return self.tokenizer_at and load_tokenizer(self.tokenizer_at, "dataset.path")

    @property
    def input(self) -> TextInput | None:
        return TextInput(self.tokenizer, self.context) if self.tokenizer_at else None

    @property
    def train_size(self) -> int:
        return (len(self.train_tokens) - 1) // self.context

    @property
    def test_size(self) -> int:
        return (len(self.test_tokens) - 1) // self.context

    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        """Return tokens ``[B, context]`` and the tokens that follow them, int64.

        The stretches are shifted together by a random offset, so that epochs differ.
        """
        offset = int(torch.randint(self.context, (1,), generator=generator))
        last = len(self.train_tokens) - 1 - self.context
        starts = (indices * self.context + offset).clamp(max=last)
        return self._windows(self.train_tokens, starts, device)

    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        starts = torch.arange(start, min(stop, self.test_size)) * self.context
        return self._windows(self.test_tokens, starts, device)

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> "TextData":
        """Return the same data with the end of the training text as test text."""
        cut = round((1 - fraction) * len(self.train_tokens))
        return replace(
            self, train_tokens=self.train_tokens[:cut], test_tokens=self.train_tokens[cut:]
        )

    def _windows(self, tokens: Tensor, starts: Tensor, device: str) -> Batch:
        """Return the tokens from each start on, and those that follow them."""
        positions = starts.unsqueeze(1) + torch.arange(self.context + 1)
        window = tokens[positions].to(torch.int64)
        if not 0 <= window.min() <= window.max() < self.vocabulary:
            raise TrainingFailed(
                f"the text holds tokens outside 0 .. {self.vocabulary - 1}: its files are damaged,"
                " or of another tokenizer; prepare them again"
            )
        window = to_device(window, device)
        return window[:, :-1], window[:, 1:]


def stdlib_text(context: Count = 64, max_bytes: Count | None = None) -> TextData:
    """Load the standard library's Python files as bytes, about 9 MB; every 20th is for the test.

    Args:
        context: bytes a model sees at once.
        max_bytes: the number of bytes to train on; None: all.

    Raises:
        UserError: if fewer bytes are left than a model sees at once.
    """
    if context < 1:
        raise UserError(f"dataset.context={context} is not possible: give at least 1")
    train, test = (b"".join(part) for part in library_sources())
    train = train[:max_bytes]
    if len(train) <= context or len(test) <= context:
        raise UserError(
            f"dataset.context={context} is more than these {len(train):,} bytes to train on and"
            f" {len(test):,} to test on allow: {smaller_context(len(train), len(test))}"
        )
    return TextData(
        _tokens(train), _tokens(test), vocabulary=256, context=context, tokenizer_at=BYTES
    )


def smaller_context(train: int, test: int) -> str:
    """Say which context to type for so many tokens: one that leaves samples for many workers."""
    fits = min(test - 1, (train - 1) // 256, 1024)
    return f"type dataset.context={fits} or less" if fits > 0 else "take more text"


def library_sources() -> tuple[list[bytes], list[bytes]]:
    """Return the Python files of the standard library to train on, and every 20th to test on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path.read_bytes()
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    train = [file for i, file in enumerate(files) if i % _TEST_EVERY]
    return train, files[::_TEST_EVERY]


def _tokens(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
