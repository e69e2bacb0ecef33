"""Tokenizers: those of transformers, and bytes."""

from pathlib import Path
from typing import Any

import numpy as np

from dlion.errors import UserError
from dlion.suite.data.hub import use_the_cache_if_offline
from dlion.suite.data.torchvision_ops import declare_missing_operators

BYTES = "bytes"  # the name of the tokenizer that needs no files


class Bytes:
    """A tokenizer for documents: a token is a byte of UTF-8, and 256 is the end of a document."""

    eos_token_id = 256

    def __len__(self) -> int:
        return 257

    def __call__(self, texts: list[str]) -> dict[str, list[np.ndarray]]:
        return {"input_ids": [np.frombuffer(text.encode(), np.uint8) for text in texts]}

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def load_tokenizer(name: str, setting: str) -> Any:
    """Load a tokenizer of transformers from a folder, the cache, or the hub; or :class:`Bytes`.

    No code that comes with it is run.

    Raises:
        UserError: if none has that name; the message says that ``setting`` is wrong.
    """
    if name == BYTES:
        return Bytes()
    declare_missing_operators()
    from transformers import AutoTokenizer

    if not Path(name).is_dir():
        use_the_cache_if_offline()
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{setting}={name} is a tokenizer with code of its own, which is not run: give one"
                " of transformers"
            ) from error
        raise UserError(
            f"{setting}={name} is neither a folder with a tokenizer of transformers nor one of the"
            " hub that can be reached: give the folder"
        ) from error


def vocabulary_of(tokenizer: Any) -> int:
    """Return one more than the largest token, which sparse numbers make more than there are."""
    tokens = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else ()
    return max(len(tokenizer), *(1 + token for token in tokens), 0)
