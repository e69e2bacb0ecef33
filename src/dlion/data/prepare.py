"""Turn text into tokens once and for all: OpenWebText and its like.

    python -m dlion.data.prepare Skylion007/openwebtext -o DIR      # from the hub
    python -m dlion.data.prepare a.jsonl b.jsonl -o DIR             # from files of one kind

writes ``train.bin``, ``val.bin`` (uint16, or int32 for vocabularies above 65,536) and
``tokens.json``. Stopped half-way, the same command goes on where it was. Exit codes: 0 finished, 2
wrong input, 130 interrupted.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

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
        table: of ``datasets``, or anything that gives ``table[start:stop][column]``.
        tokenizer: of ``transformers``.
        held_out: every so many documents one is for the test.
        origin: what was typed to name table, column and tokenizer; another one cannot go on.

    Raises:
        UserError: if the tokenizer has no such token, a document is not text, or the folder was
            begun with something else or is damaged.
    """
    from rich.progress import Progress

    if tokenizer.eos_token_id is None:
        raise UserError(
            "--tokenizer has no end-of-text token (eos_token) to put after documents: give another"
        )
    dtype = "uint16" if len(tokenizer) <= 2**16 else "int32"
    facts: dict[str, Any] = {
        "documents": 0,
        "of": len(table),
        "tokens": dict.fromkeys(PARTS, 0),
        "vocabulary": len(tokenizer),
        "dtype": dtype,
        "held_out": held_out,
        "origin": origin,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FACTS).exists():
        facts = _resume(read_facts(folder), facts, folder)
    with Progress() as progress:
        bar = progress.add_task("documents", total=facts["of"], completed=facts["documents"])
        with (folder / "train.bin").open("ab") as train, (folder / "val.bin").open("ab") as val:
            files = {"train": train, "val": val}
            for part, file in files.items():  # what was written after the last count
                file.truncate(facts["tokens"][part] * np.dtype(dtype).itemsize)
            while facts["documents"] < facts["of"]:
                start = facts["documents"]
                texts = table[start : start + _BATCH][column]
                _check_texts(texts, start, column)
                for i, ids in enumerate(tokenizer(texts)["input_ids"], start):
                    part = "val" if i % held_out == 0 else "train"
                    document = np.array([*ids, tokenizer.eos_token_id], dtype)
                    files[part].write(document.tobytes())
                    facts["tokens"][part] += len(document)
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                facts["documents"] = start + len(texts)
                write_atomically(folder / FACTS, json.dumps(facts, indent=2) + "\n")
                progress.update(bar, completed=facts["documents"])


def _resume(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    for key in ("origin", "of", "vocabulary", "dtype", "held_out"):
        if old[key] != new[key]:
            raise UserError(
                f"{folder} was begun with {key}={old[key]}, now it is {new[key]}: repeat what began"
                f" it, or choose another folder"
            )
    for part, count in old["tokens"].items():
        have = stored_tokens(folder, part, old)
        if have < count:
            raise UserError(
                f"{folder / part}.bin holds {have:,} tokens, but {FACTS} says {count:,}: delete the"
                " folder and begin again"
            )
    return old


def _check_texts(texts: list[Any], start: int, column: str) -> None:
    for number, text in enumerate(texts, start + 1):
        if not isinstance(text, str):
            found = "null" if text is None else type(text).__name__
            raise UserError(
                f"document {number:,}, counted from 1, has no text in the column {column} but"
                f" {found}: leave it out of the source"
            )


def _open(sources: list[str], split: str) -> Any:
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
    found = {kinds.get(Path(source).suffix) for source in sources}
    if len(found) != 1 or None in found:
        raise UserError(
            f"{', '.join(sources)}: give files of one kind, {', '.join(kinds)}, or one name of the"
            " hub"
        )
    try:
        return load_dataset(found.pop(), data_files=sources, split="train")
    except Exception as error:  # pyarrow and datasets have many, all about the files
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(
            f"{', '.join(sources)} cannot be read ({reason or 'no documents'}): give whole files"
            " with the same columns"
        ) from error


def _whole(name: str) -> str:
    """A path in full, so that every way to type it is the same; a name of the hub as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.data.prepare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("sources", nargs="+", help="files, or one name of the hub")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", default="gpt2", help="of the hub, or a folder")
    parser.add_argument("--column", default="text", help="that holds the documents")
    parser.add_argument("--split", default="train", help="of a data set of the hub")
    parser.add_argument(
        "--held-out", type=int, default=2000, help="every so many documents one is for the test"
    )
    args = parser.parse_args()
    try:
        if args.held_out < 2:
            raise UserError(
                f"--held-out={args.held_out} leaves nothing to train on: give 2 or more"
            )
        if args.output.exists() and not args.output.is_dir():
            raise UserError(f"--output={args.output} is a file: give a folder")
        table = _open(args.sources, args.split)
        if args.column not in table.column_names:
            raise UserError(
                f"--column={args.column}: there are {', '.join(table.column_names)} only"
            )
        prepare(
            table,
            load_tokenizer(args.tokenizer, "--tokenizer"),
            args.output,
            args.column,
            args.held_out,
            origin=shlex.join(
                [*map(_whole, args.sources), "--split", args.split, "--column", args.column]
                + ["--tokenizer", _whole(args.tokenizer)]
            ),
        )
    except UserError as error:
        _leave(f"error: {error}", 2)
    except KeyboardInterrupt:
        _leave("interrupted: type the same command again to go on", 130)
    facts = read_facts(args.output)
    counts = ", ".join(f"{count:,} {part}" for part, count in facts["tokens"].items())
    print(f"{args.output}: {counts} tokens; type dataset.path={args.output}")


def _leave(sentence: str, code: int) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
