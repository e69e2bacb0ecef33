"""Turn text into tokens once: a file of your own, OpenWebText or another data set.

    dlion prepare book.txt -o DIR                    # bytes, nothing is downloaded
    dlion prepare a.jsonl b.jsonl -o DIR             # from files of one kind
    dlion prepare Skylion007/openwebtext -o DIR      # from the hub, GPT-2's tokens

writes ``train.bin``, ``val.bin`` (uint16, or int32 for vocabularies above 65,536) and
``tokens.json``, and says what to type to train on them. After an interruption the same command
continues.
"""

import codecs
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Collection
from contextlib import ExitStack, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dlion.errors import UserError
from dlion.suite.arguments import make_parser, whole
from dlion.suite.data.compressed import SUFFIXES, bare_name, compression, unpack
from dlion.suite.data.hub import check_cache
from dlion.suite.data.parquet import be_quiet, open_hub, saved_tables
from dlion.suite.data.tokenizers import BYTES, Bytes, load_tokenizer, vocabulary_of
from dlion.suite.data.tokens import (
    FACTS,
    PARTS,
    TOKENIZER,
    dtype_of,
    prepared_text,
    read_facts,
    stored_tokens,
)
from dlion.suite.files import naming_full_disk, whole_folder, write_atomically
from dlion.suite.inside import open_inside

_BATCH = 1000  # documents
_FEW = 20  # documents, of which whole ones would be too much or too little to test on
_LEAST_TEST = 1025  # tokens that the end of few documents shall hold together: a context of 1,024
_SAMPLES = 256  # the fewest to train on: a batch of each worker, unless others are typed
_TABLES = {  # other files are text
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_BINARY = (
    f"not text, but binary: give text, or {', '.join(_TABLES)}, also compressed"
    f" ({', '.join(SUFFIXES)})"
)
_MARKS = {  # that of UTF-32 begins with one of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_PRINTED = bytes([*range(7, 14), 27, *range(32, 256)])  # what text has; others are control codes


class Texts:
    """Documents in memory, which are asked for like those of a table of ``datasets``."""

    column_names = ["text"]

    def __init__(self, texts: list[str]):
        self.texts = [text for text in texts if text is None or text.strip()]
        self.empty = len(texts) - len(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, part: slice) -> dict[str, list[str]]:
        return {"text": self.texts[part]}


def prepare(
    table: Any,
    tokenizer: Any,
    folder: Path,
    column: str = "text",
    held_out: int | None = None,
    origin: str = "",
    size: int = 0,
) -> None:
    """Write the tokens of all documents, each followed by the end-of-text token.

    Args:
        table: a table of ``datasets``, or anything that gives ``table[start:stop][column]``.
        tokenizer: one of ``transformers``.
        folder: where the files go; those of an earlier call are continued.
        column: the one that holds the documents.
        held_out: every ``held_out``-th document is for the test; 0: the last tenth of each, or more
            of a short text; None: 0 for few documents, else 10 to 2000, which makes about a
            thousand for the test.
        origin: the typed names of table, column and tokenizer; only the same can continue a folder.
        size: bytes of the source files, which must still be the same, too; 0: of the hub.

    Raises:
        UserError: if the tokenizer has no such token, a document is not text, or the folder was
            begun with something else, is damaged, or holds files of these names from elsewhere.
    """
    from rich.progress import Progress

    if tokenizer.eos_token_id is None:
        raise UserError(
            "--tokenizer has no end-of-text token (eos_token) to put after documents: give another"
        )
    if held_out is None:
        held_out = 0 if len(table) < _FEW else min(max(len(table) // 1000, 10), 2000)
    facts: dict[str, Any] = {
        "documents": 0,
        "of": len(table),
        "tokens": dict.fromkeys(PARTS, 0),
        "vocabulary": vocabulary_of(tokenizer),
        "dtype": dtype_of(vocabulary_of(tokenizer)),
        "held_out": held_out,
        "origin": origin,
        "size": size,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FACTS).exists():
        facts = _continued(read_facts(folder), facts, folder)
    else:
        _check_not_foreign(folder)
        own = folder / TOKENIZER
        if hasattr(tokenizer, "save_pretrained") and not _is_of(tokenizer, own):
            with whole_folder(own) as part:  # goes with the models that are trained on it
                tokenizer.save_pretrained(part)
        _write_facts(folder, facts)
    with Progress() as progress, ExitStack() as stack:
        bar = progress.add_task("documents", total=facts["of"], completed=facts["documents"])
        files = {part: stack.enter_context(_open_part(folder, part, facts)) for part in PARTS}
        while facts["documents"] < facts["of"]:
            start = facts["documents"]
            texts = table[start : start + _BATCH][column]
            try:
                _check_texts(texts, start, column)
            except UserError:
                if not start:
                    _remove(folder)
                raise
            tokens = tokenizer(texts)["input_ids"]
            with naming_full_disk(folder):
                _append(tokens, tokenizer.eos_token_id, files, facts)
            _write_facts(folder, facts)
            progress.update(bar, completed=facts["documents"])


def _write_facts(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / FACTS, json.dumps(facts, indent=2) + "\n")


def _check_not_foreign(folder: Path) -> None:
    """Refuse to replace files of the same names that others wrote; ours never lack their facts."""
    for part in PARTS:
        file = folder / f"{part}.bin"
        if file.exists() and file.stat().st_size:
            raise UserError(f"{file} is there already, without {FACTS}: choose another folder")


def _is_of(tokenizer: Any, own: Path) -> bool:
    """Whether a folder is the one that the tokenizer was loaded from.

    Raises:
        UserError: if it holds something else.
    """
    if not own.exists():
        return False
    if Path(tokenizer.name_or_path).resolve() != own.resolve():
        raise UserError(f"{own} is there already, without {FACTS}: choose another folder")
    return True


def _remove(folder: Path) -> None:
    """Delete the written files of a folder, and the folder if it is then empty."""
    for name in (FACTS, *(f"{part}.bin" for part in PARTS)):
        (folder / name).unlink(missing_ok=True)
    if {path.name for path in folder.iterdir()} == {TOKENIZER}:
        shutil.rmtree(folder / TOKENIZER)
    with suppress(OSError):
        folder.rmdir()


def _open_part(folder: Path, part: str, facts: dict[str, Any]) -> BinaryIO:
    """Open the file of a part, cut off after the last counted token."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.fdopen(open_inside(folder, f"{part}.bin", flags), "ab")
    file.truncate(facts["tokens"][part] * np.dtype(facts["dtype"]).itemsize)
    return file


def _append(
    documents: list[Any], end: int, files: dict[str, BinaryIO], facts: dict[str, Any]
) -> None:
    """Write documents to the files of their parts, on the disk for sure, and count them.

    Args:
        documents: the tokens of each.
        end: the token that follows each.
        files, facts: of the folder; what was added is counted.
    """
    for number, ids in enumerate(documents, facts["documents"]):
        if len(ids) and ids[-1] == end:  # some tokenizers add it themselves
            ids = ids[:-1]
        tokens = np.array(ids, facts["dtype"])
        for part, stretch in _parts_of(tokens, number, facts).items():
            files[part].write(stretch.tobytes() + np.array(end, facts["dtype"]).tobytes())
            facts["tokens"][part] += len(stretch) + 1
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    facts["documents"] += len(documents)


def _parts_of(tokens: np.ndarray, number: int, facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the pieces of a document and their parts."""
    if facts["held_out"]:
        return {"train" if number % facts["held_out"] else "val": tokens}
    least = min(_LEAST_TEST // facts["of"], len(tokens) // 2)
    cut = len(tokens) - max(len(tokens) // 10, least)
    return {"train": tokens[:cut], "val": tokens[cut:]}


def _continued(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the facts of a folder that was begun with the settings of this call.

    Raises:
        UserError: if it was begun with others, or lacks tokens that were counted.
    """
    if not old["documents"]:
        return new
    if old.get("size", new["size"]) != new["size"]:
        raise UserError(
            f"{folder} was made of {old['size']} bytes of text, of which there are {new['size']}"
            " now: delete it, or choose another folder"
        )
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


def _load_documents(sources: list[str], split: str, separator: str | None) -> Any:
    """Return the table of files of one kind, or of a split of one data set on the hub."""
    from datasets import load_dataset

    if len(sources) == 1 and not Path(sources[0]).exists():
        try:
            return open_hub(sources[0], split=split)
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            raise UserError(
                f"{sources[0]} is neither a file nor a data set of the hub that can be reached"
            ) from error
    if len(sources) == 1 and (saved := saved_tables(Path(sources[0]))):
        if split not in saved:
            raise UserError(f"--split={split}: there are {', '.join(saved)} only")
        return saved[split]
    if split != "train":
        raise UserError(f"--split={split} is for the hub and for save_to_disk: leave it out")
    for source in sources:
        if not Path(source).is_file():
            raise UserError(f"{source} is not a file")
    suffixes = {bare_name(Path(source)).suffix.lower() for source in sources}
    kinds = {_TABLES.get(suffix, "text") for suffix in suffixes}
    if len(kinds) != 1:
        raise UserError(
            f"{', '.join(sources)}: give files of one kind, {', '.join(_TABLES)} or text, or one"
            " name of the hub"
        )
    (kind,) = kinds
    if kind == "text":
        texts = [text for source in sources for text in _read_text(source, separator)]
        if separator and len(texts) == len(sources):
            raise UserError(
                f"--separator={separator} stands between no documents of {', '.join(sources)}:"
                " look how they are written there, or leave it out"
            )
        return Texts(texts)
    if separator:
        raise UserError(f"--separator={separator} cuts text files only: leave it out")
    be_quiet()
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [
                _unpacked(Path(source), Path(folder, str(i))) for i, source in enumerate(sources)
            ]
            for file, source in zip(files, sources, strict=True):
                with file.open("rb") as opened:
                    encoding = _marked_encoding(opened.read(4))
                if encoding and kind != "parquet":
                    raise _other_encoding(source, encoding)
            options = _as_text(files, suffixes) if kind == "csv" else {}
            names = [escape(str(file)) for file in files]
            return load_dataset(kind, data_files=names, split="train", **options)
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets have many, all about the files
        check_cache(error)
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise _other_encoding(", ".join(sources), "latin1") from error
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(
            f"{', '.join(sources)} could not be read ({reason or 'no documents'}): give whole files"
            " with the same columns"
        ) from error


def _unpacked(file: Path, folder: Path) -> Path:
    """Return a file, or what it holds in compressed form, which is written into a new folder."""
    if compression(file) is None:
        return file
    folder.mkdir()
    unpack(file, folder / bare_name(file).name)
    return folder / bare_name(file).name


def _as_text(files: list[Path], suffixes: Collection[str]) -> dict[str, Any]:
    """Return the options that let every cell of CSV or TSV be text, "NA" and 12 too."""
    import pandas as pd
    from datasets import Features, Value

    if len(suffixes) > 1:
        raise UserError("give files of one kind, .csv or .tsv")
    usual = "\t" if ".tsv" in suffixes else ","
    # spreadsheets write semicolons where the comma is in numbers
    found = {
        sep: pd.read_csv(files[0], nrows=0, sep=sep).columns for sep in (usual, ";", "\t", ",")
    }
    sep = next((sep for sep, columns in found.items() if len(columns) > 1), usual)
    features = Features({str(name): Value("string") for name in found[sep]})
    return {"sep": sep, "keep_default_na": False, "features": features}


def _marked_encoding(content: bytes) -> str | None:
    """Return the name of UTF-16 or UTF-32, if a text begins with the mark of one."""
    return next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)


def _other_encoding(source: str, encoding: str, where: str = "") -> UserError:
    """Return the error about a file that is not in UTF-8."""
    return UserError(
        f"{source} is not text in UTF-8{where}: convert it, with `iconv -f {encoding} -t utf-8`"
        " for instance"
    )


def _read_text(source: str, separator: str | None) -> list[str]:
    """Return the documents of a text file as they are, with their newlines.

    UTF-16 and UTF-32 are known by their mark.

    Raises:
        UserError: if the file is not text, or of another encoding.
    """
    with tempfile.TemporaryDirectory() as folder:
        content = _unpacked(Path(source), Path(folder, "0")).read_bytes()
    marked = _marked_encoding(content)
    try:
        if b"\0" in content[:4096] and not marked:
            raise UserError(f"{source} is {_BINARY}")
        text = content.decode(marked or "utf-8-sig")
    except UnicodeDecodeError as error:
        if content[:4096].translate(None, _PRINTED):
            raise UserError(f"{source} is {_BINARY}") from error
        raise _other_encoding(source, "latin1", f" (byte {error.start:,})") from error
    marker = separator and separator.replace("\\n", "\n").replace("\\t", "\t")
    documents = text.split(marker) if marker else [text]
    if not text.strip():
        raise UserError(f"{source} holds no text")
    return documents


def how_to_train(folder: Path) -> str:
    """Return the command that trains on a prepared folder, after checking its contents.

    Its context is the longest power of two, at most 256 bytes or 1,024 other tokens, that the test
    has and that cuts the text into enough samples.

    Raises:
        UserError: if there is too little text for any.
    """
    facts = read_facts(folder)
    train, test = (facts["tokens"][part] for part in PARTS)
    most = 256 if facts["vocabulary"] == len(Bytes()) else 1024
    fitting = [2**k for k in range(3, 11) if 2**k <= most and 2**k < min(train // 4, test)]
    if not fitting:
        raise UserError(
            f"{folder} holds {train:,} tokens to train on and {test:,} to test on, which is too"
            " little: prepare more text"
        )
    context = max([c for c in fitting if train // c > _SAMPLES] + [min(32, fitting[-1])])
    data = prepared_text(str(folder), context)
    data.test_batch(0, _SAMPLES)  # refuses tokens that the vocabulary does not have
    typed = f"python train.py dataset=prepared_text dataset.path={shlex.quote(str(folder))}"
    typed += f" dataset.context={context}"
    if data.train_size < _SAMPLES:
        typed += f" workers=2 batch_size={data.train_size // 4}"
    return typed


def _resolved(name: str) -> str:
    """Return the same text for every way to type a path; a name of the hub stays as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def main(arguments: list[str]) -> None:
    """Prepare the text that the command line names."""
    parser = make_parser("prepare", __doc__, "book.txt -o DIR")
    parser.add_argument(
        "sources", nargs="+", help="files, one folder of save_to_disk, or one name of the hub"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--tokenizer",
        help="bytes, a folder, or a name of the hub; default: bytes for files, gpt2 for the hub",
    )
    parser.add_argument("--column", default="text", help="that holds the documents")
    parser.add_argument("--split", default="train", help="of the hub or of save_to_disk")
    parser.add_argument(
        "--separator",
        help="what stands between documents in text files (\\n: newline); default: a file is one",
    )
    parser.add_argument(
        "--held-out",
        type=whole(0),
        metavar="N",
        help="every so many documents one is for the test; 0: the last tenth of each; default: by"
        " the number of documents",
    )
    options = parser.parse_args(arguments)
    options.output = options.output.expanduser()
    if options.held_out == 1:
        raise UserError("--held-out 1 leaves nothing to train on: give 2 or more, or 0")
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output={options.output} is a file: give a folder")
    table = _load_documents(options.sources, options.split, options.separator)
    tokenizer = options.tokenizer or (BYTES if Path(options.sources[0]).exists() else "gpt2")
    if options.column not in table.column_names:
        raise UserError(
            f"--column={options.column} is not a column: choose {', '.join(table.column_names)}"
        )
    origin = [*map(_resolved, options.sources), "--split", options.split]
    origin += ["--column", options.column, "--tokenizer", _resolved(tokenizer)]
    origin += ["--separator", options.separator] if options.separator else []
    try:
        prepare(
            table,
            load_tokenizer(tokenizer, "--tokenizer"),
            options.output,
            options.column,
            options.held_out,
            origin=shlex.join(origin),
            size=sum(p.stat().st_size for p in map(Path, options.sources) if p.is_file()),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("type the same command again to resume") from None
    try:
        command = how_to_train(options.output)
    except UserError:
        _remove(options.output)
        raise
    facts = read_facts(options.output)
    counts = ", ".join(f"{count:,} {part}" for part, count in facts["tokens"].items())
    documents = f"{facts['documents']:,} document{'s' * (facts['documents'] != 1)}"
    left = f" ({table.empty:,} empty ones left out)" if getattr(table, "empty", 0) else ""
    print(f"{documents} of {len(options.sources)} sources{left}")
    print(f"{options.output}: {counts} tokens; train on them with\n{command}")
