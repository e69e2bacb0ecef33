"""Text as tokens in memory-mapped files, as ``python -m dlion.data.prepare`` writes them."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlion.data.hub import use_the_cache_if_offline
from dlion.data.text import TextData
from dlion.errors import UserError

FACTS = "tokens.json"
PARTS = ("train", "val")
TYPES = ("uint16", "int32")


def prepared_text(path: str | None = None, context: int = 1024) -> TextData:
    """Tokens that ``python -m dlion.data.prepare`` has written, read as they are needed.

    Args:
        path: the folder.
        context: tokens a model sees at once.

    Raises:
        UserError: if there is no such folder, or it is not finished, or it holds too few tokens.
    """
    if path is None:
        raise UserError(
            "the text must be prepared: type `python -m dlion.data.prepare Skylion007/openwebtext"
            " -o DIR`, then dataset.path=DIR"
        )
    folder = Path(path).expanduser()
    if not (folder / FACTS).exists():
        raise UserError(
            f"dataset.path={path} has no {FACTS}: prepare it with `python -m dlion.data.prepare"
            f" SOURCE -o {path}`"
        )
    facts = read_facts(folder)
    if facts["documents"] != facts["of"]:
        raise UserError(
            f"dataset.path={path} holds {facts['documents']:,} of {facts['of']:,} documents: go on"
            f" with `python -m dlion.data.prepare {facts['origin']} --held-out {facts['held_out']}"
            f" -o {shlex.quote(str(path))}`"
        )
    parts = []
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
                f"{context}: give a smaller context"
            )
        stored = np.memmap(folder / f"{part}.bin", facts["dtype"], mode="c")
        parts.append(torch.from_numpy(stored))
    return TextData(*parts, vocabulary=facts["vocabulary"], context=context)


def read_facts(folder: Path) -> dict[str, Any]:
    """What a prepared folder says about itself, checked."""
    numbers = ("vocabulary", "documents", "of", "held_out")
    try:
        facts = json.loads((folder / FACTS).read_text())
        found = [facts[name] for name in numbers] + [facts["tokens"][part] for part in PARTS]
        right = all(type(number) is int and number >= 0 for number in found)
        right = right and facts["dtype"] in TYPES and isinstance(facts["origin"], str)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise UserError(
            f"{folder / FACTS} is damaged: copy it again, or delete {folder} and prepare it again"
        )
    return facts


def stored_tokens(folder: Path, part: str, facts: dict[str, Any]) -> int:
    """How many tokens the file of a part holds; none where there is no file."""
    file = folder / f"{part}.bin"
    return file.stat().st_size // np.dtype(facts["dtype"]).itemsize if file.exists() else 0


def load_tokenizer(name: str, setting: str) -> Any:
    """A tokenizer of transformers, from a folder, the cache, or the hub.

    Raises:
        UserError: if there is none of that name, naming the ``setting``.
    """
    from dlion.data.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    from transformers import AutoTokenizer

    if not Path(name).is_dir():
        use_the_cache_if_offline()
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{setting}={name} is neither a folder with a tokenizer of transformers nor one of the"
            " hub that can be reached: give the folder"
        ) from error
