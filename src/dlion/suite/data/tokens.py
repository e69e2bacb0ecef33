"""Text as tokens in memory-mapped files, as ``dlion prepare`` writes them."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlion.errors import UserError
from dlion.suite.data.text import TextData, smaller_context
from dlion.suite.data.tokenizers import BYTES, Bytes
from dlion.suite.inside import read_named
from dlion.values import Count, Folder

FACTS = "tokens.json"
PARTS = ("train", "val")
DTYPES = ("uint16", "int32")
TOKENIZER = "tokenizer"  # the folder of one of transformers, beside its tokens
_COUNTS = ("vocabulary", "documents", "of", "held_out")
_MOST_TOKENS = 2**22  # of a vocabulary; a model would fill the memory with more


def prepared_text(path: Folder | None = None, context: Count = 1024) -> TextData:
    """Map tokens that ``dlion prepare`` has written into memory.

    Args:
        path: the folder that was prepared.
        context: tokens a model sees at once.

    Raises:
        UserError: if the folder is missing or not finished, or holds too few tokens.
    """
    if path is None:
        raise UserError(
            "the text must be prepared: type `dlion prepare FILE -o DIR`, then dataset.path=DIR"
        )
    folder = Path(path).expanduser()
    if folder.is_file() and (folder.parent / FACTS).exists():
        raise UserError(f"dataset.path={path} is a file: type dataset.path={folder.parent}")
    if folder.is_file():
        raise UserError(
            f"dataset.path={path} is a file: type `dlion prepare {path} -o DIR`,"
            " then dataset.path=DIR"
        )
    if not (folder / FACTS).exists():
        raise UserError(
            f"dataset.path={path} has no {FACTS}: prepare it with `dlion prepare SOURCE -o {path}`"
        )
    facts = read_facts(folder)
    if facts["documents"] != facts["of"]:
        raise UserError(
            f"dataset.path={path} holds {facts['documents']:,} of {facts['of']:,} documents: resume"
            f" with `dlion prepare {facts['origin']} --held-out {facts['held_out']}"
            f" -o {shlex.quote(str(path))}`"
        )
    tensors = []
    for part in PARTS:
        size = stored_tokens(folder, part, facts)
        if size != facts["tokens"][part]:
            raise UserError(
                f"{folder / part}.bin holds {size:,} tokens, but {FACTS} says"
                f" {facts['tokens'][part]:,}: copy it again, or prepare it again"
            )
        if size <= context:
            raise UserError(
                f"{folder / part}.bin holds {size} tokens, not more than dataset.context="
                f"{context}: {smaller_context(*(facts['tokens'][each] for each in PARTS))}"
            )
        stored = np.memmap(folder / f"{part}.bin", facts["dtype"], mode="c")
        tensors.append(torch.from_numpy(stored))
    at = BYTES if facts["vocabulary"] == len(Bytes()) else str(folder / TOKENIZER)
    if at != BYTES and not Path(at).is_dir():  # prepared by an earlier version
        at = None
    return TextData(*tensors, vocabulary=facts["vocabulary"], context=context, tokenizer_at=at)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that a prepared folder records.

    Raises:
        UserError: if the file that says it is damaged.
    """
    try:
        facts = json.loads(read_named(folder / FACTS))
        if _are_valid(facts):
            return facts
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(
        f"{folder / FACTS} is damaged: copy it again, or delete {folder} and prepare it again"
    )


def _are_valid(facts: Any) -> bool:
    """Whether facts have the right types; those that lack a key or are no dict raise an error."""
    counts = [facts[name] for name in _COUNTS] + [facts["tokens"][part] for part in PARTS]
    return (
        all(type(count) is int and count >= 0 for count in counts)  # True is no count
        and 0 < facts["vocabulary"] <= _MOST_TOKENS
        and facts["dtype"] == dtype_of(facts["vocabulary"])
        and isinstance(facts["origin"], str)
    )


def dtype_of(vocabulary: int) -> str:
    """Return the type of integers that tokens are stored in."""
    return DTYPES[vocabulary > 2**16]


def stored_tokens(folder: Path, part: str, facts: dict[str, Any]) -> int:
    """Return how many tokens the file of a part holds: 0 if it does not exist."""
    file = folder / f"{part}.bin"
    return file.stat().st_size // np.dtype(facts["dtype"]).itemsize if file.exists() else 0
