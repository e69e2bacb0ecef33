"""Turn text into tokens once and for all: OpenWebText and its like.

    dlion prepare Skylion007/openwebtext -o DIR      # from the hub
    dlion prepare a.jsonl b.jsonl -o DIR             # from files of one kind

writes ``train.bin``, ``val.bin`` (uint16, or int32 for vocabularies above 65,536) and
``tokens.json``. After an interruption the same command continues.
"""

import json
import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dlion.arguments import make_parser
from dlion.data.parquet import open_hub
from dlion.data.tokens import FACTS, PARTS, load_tokenizer, read_facts, stored_tokens
from dlion.errors import UserError
from dlion.files import write_atomically

_BATCH = 1000  # documents


def prepare(
    table: Any,
    tokenizer: Any,
    folder: Path,
    column: str = "text",
    held_out: int = 2000,
    origin: str = "",
) -> None:
    """Write the tokens of all documents, each followed by the end-of-text token.

    Args:
        table: a table of ``datasets``, or anything that gives ``table[start:stop][column]``.
        tokenizer: one of ``transformers``.
        folder: where the files go; those of an earlier call are continued.
        column: the one that holds the documents.
        held_out: every ``held_out``-th document is for the test.
        origin: the typed names of table, column and tokenizer; only the same can continue a folder.

    Raises:
        UserError: if the tokenizer has no such token, a document is not text, or the folder was
            begun with something else or is damaged.
    """
    from rich.progress import Progress

    if tokenizer.eos_token_id is None:
        raise UserError(
            "--tokenizer has no end-of-text token (eos_token) to put after documents: give another"
        )
    facts: dict[str, Any] = {
        "documents": 0,
        "of": len(table),
        "tokens": dict.fromkeys(PARTS, 0),
        "vocabulary": len(tokenizer),
        "dtype": "uint16" if len(tokenizer) <= 2**16 else "int32",
        "held_out": held_out,
        "origin": origin,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FACTS).exists():
        facts = _continued(read_facts(folder), facts, folder)
    with Progress() as progress, ExitStack() as stack:
        bar = progress.add_task("documents", total=facts["of"], completed=facts["documents"])
        files = {part: stack.enter_context(_open_part(folder, part, facts)) for part in PARTS}
        while facts["documents"] < facts["of"]:
            start = facts["documents"]
            texts = table[start : start + _BATCH][column]
            _check_texts(texts, start, column)
            documents = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
            _append(documents, files, facts)
            write_atomically(folder / FACTS, json.dumps(facts, indent=2) + "\n")
            progress.update(bar, completed=facts["documents"])


def _open_part(folder: Path, part: str, facts: dict[str, Any]) -> BinaryIO:
    """Open the file of a part, without what was written after the last count."""
    file = (folder / f"{part}.bin").open("ab")
    file.truncate(facts["tokens"][part] * np.dtype(facts["dtype"]).itemsize)
    return file


def _append(documents: list[list[int]], files: dict[str, BinaryIO], facts: dict[str, Any]) -> None:
    """Write documents to the files of their parts, on the disk for sure, and count them."""
    for number, ids in enumerate(documents, facts["documents"]):
        part = "val" if number % facts["held_out"] == 0 else "train"
        files[part].write(np.array(ids, facts["dtype"]).tobytes())
        facts["tokens"][part] += len(ids)
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    facts["documents"] += len(documents)


def _continued(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the facts of a folder that was begun with the settings of this call.

    Raises:
        UserError: if it was begun with others, or lacks tokens that were counted.
    """
    for key in ("origin", "of", "vocabulary", "dtype", "held_out"):
        if old[key] != new[key]:
            raise UserError(
                f"{folder} was begun with {key}={old[key]}, now it is {new[key]}: repeat what began"
                f" it, or choose another folder"
            )
    for part, count in old["tokens"].items():
        stored = stored_tokens(folder, part, old)
        if stored < count:
            raise UserError(
                f"{folder / part}.bin holds {stored:,} tokens, but {FACTS} says {count:,}: delete"
                " the folder and begin again"
            )
    return old


def _check_texts(texts: list[Any], start: int, column: str) -> None:
    """Refuse a document that is not text; the first of ``texts`` is document ``start``, from 0."""
    for number, text in enumerate(texts, start + 1):
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise UserError(
                f"document {number:,}, counted from 1, has no text in the column {column} but"
                f" {kind}: leave it out of the source"
            )


def _load_documents(sources: list[str], split: str) -> Any:
    """Return the table of files of one kind, or of a split of one data set on the hub."""
    from datasets import load_dataset

    kinds = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if len(sources) == 1 and not Path(sources[0]).exists():
        try:
            return open_hub(sources[0], split=split)
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            raise UserError(
                f"{sources[0]} is neither a file nor a data set of the hub that can be reached"
            ) from error
    for source in sources:
        if not Path(source).is_file():
            raise UserError(f"{source} is not a file")
    used_kinds = {kinds.get(Path(source).suffix) for source in sources}
    if len(used_kinds) != 1 or None in used_kinds:
        raise UserError(
            f"{', '.join(sources)}: give files of one kind, {', '.join(kinds)}, or one name of the"
            " hub"
        )
    try:
        return load_dataset(used_kinds.pop(), data_files=sources, split="train")
    except Exception as error:  # pyarrow and datasets have many, all about the files
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(
            f"{', '.join(sources)} cannot be read ({reason or 'no documents'}): give whole files"
            " with the same columns"
        ) from error


def _resolved(name: str) -> str:
    """Return the same text for every way to type a path; a name of the hub stays as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def main(arguments: list[str]) -> None:
    """Prepare what the command line names."""
    parser = make_parser("prepare", __doc__, "a.jsonl b.jsonl -o DIR")
    parser.add_argument("sources", nargs="+", help="files, or one name of the hub")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", default="gpt2", help="of the hub, or a folder")
    parser.add_argument("--column", default="text", help="that holds the documents")
    parser.add_argument("--split", default="train", help="of a data set of the hub")
    parser.add_argument(
        "--held-out", type=int, default=2000, help="every so many documents one is for the test"
    )
    args = parser.parse_args(arguments)
    if args.held_out < 2:
        raise UserError(f"--held-out={args.held_out} leaves nothing to train on: give 2 or more")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output={args.output} is a file: give a folder")
    table = _load_documents(args.sources, args.split)
    if args.column not in table.column_names:
        raise UserError(f"--column={args.column}: there are {', '.join(table.column_names)} only")
    try:
        prepare(
            table,
            load_tokenizer(args.tokenizer, "--tokenizer"),
            args.output,
            args.column,
            args.held_out,
            origin=shlex.join(
                [*map(_resolved, args.sources), "--split", args.split, "--column", args.column]
                + ["--tokenizer", _resolved(args.tokenizer)]
            ),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("type the same command again to go on") from None
    facts = read_facts(args.output)
    counts = ", ".join(f"{count:,} {part}" for part, count in facts["tokens"].items())
    print(f"{args.output}: {counts} tokens; type dataset.path={args.output}")
