"""Copy the trained model of a finished run into a folder.

FOLDER then has model.safetensors, parameters and buffers by name, or what from_pretrained reads of
a model of transformers, and config.yaml and summary.json, which say what the model is and how good.
input.json says what the model's input is made by: mean and deviation, size, names of the classes.
With --format state_dict it has model.pt instead, for torch.load and load_state_dict.
"""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.suite.arguments import DEFAULT_RUNS, make_parser
from dlion.suite.files import opened_tensors, sha256_of_tensors, whole_file, write_atomically
from dlion.suite.inside import open_inside
from dlion.suite.record.runs import (
    CONFIG,
    INPUT,
    MODEL,
    PRETRAINED,
    SUMMARY,
    TOKENIZER,
    Run,
    check_model,
    check_own,
)
from dlion.suite.record.studies import find_runs
from dlion.suite.terminal import in_one_line

FORMATS = ("safetensors", "state_dict")
EXPORT = "export"  # the folder in the run's directory, without -o
_WEIGHTS = re.compile(r"model(-[0-9]+)?(-of-[0-9]+)?\.safetensors")
# what save_pretrained writes of models and of tokenizers, besides weights
_OF_MODELS = ("config.json", "generation_config.json", f"{MODEL}.index.json", INPUT)
_OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("bpe.codes", "emoji.json", "entity_vocab.json", "normalizer.json", "sentencepiece.model"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model"),
)


def export(run: Run, folder: Path, form: str = "safetensors") -> None:
    """Write the model of a run into a folder; files of the same names are replaced.

    Raises:
        UserError: if the run is not finished, or holds no model, or another than it has left.
    """
    if run.directory.parent.is_file():
        raise UserError(f"{run.directory} is packed, without its model: give its directory")
    if not run.finished:
        raise UserError(f"{run.directory} is not finished: its model comes with its last step")
    check_model(run.directory)
    weights = _weights(run.directory)
    for file in weights:
        _tensors(file, load=False)  # whoever takes it away finds it damaged elsewhere
    recorded = (run.summary or {}).get("model_sha256")
    if recorded not in (None, sha256_of_tensors(weights)):
        raise UserError(
            f"{weights[0]} is not the model that the run has left, as its SHA-256 is not that of"
            f" {SUMMARY}: copy it again"
        )
    check_own(folder, (TOKENIZER,))
    folder.mkdir(parents=True, exist_ok=True)
    if form == "state_dict":
        with whole_file(folder / "model.pt") as part:
            _save_state_dict(weights, part)
    else:
        for file in weights:
            _copy(file.parent, file.name, folder)
        if weights[0].parent != run.directory:
            _copy_known(weights[0].parent, (*_OF_MODELS, *_OF_TOKENIZERS), folder)
    _export_input(weights[0], folder)
    for name in (CONFIG, SUMMARY):
        _copy(run.directory, name, folder)


def _weights(directory: Path) -> list[Path]:
    """Return the files with the tensors of a run's model; a large one has several."""
    file = directory / MODEL
    parts = sorted((directory / PRETRAINED).glob(f"{Path(MODEL).stem}*"))
    found = [file] if file.exists() else [part for part in parts if _WEIGHTS.fullmatch(part.name)]
    if not found:
        raise UserError(
            f"{directory} holds no {MODEL}: runs leave it at their end, so train this one again"
        )
    return found


def _export_input(file: Path, folder: Path) -> None:
    """Write the description of the model's input: input.json, and the tokenizer's files."""
    from safetensors import SafetensorError

    try:
        with opened_tensors(file) as stored:
            made = (stored.metadata() or {}).get("input")
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}): copy it again") from error
    if made is not None:
        write_atomically(folder / INPUT, made + "\n")
    if (file.parent / TOKENIZER).is_dir():
        (folder / TOKENIZER).mkdir(exist_ok=True)
        _copy_known(file.parent / TOKENIZER, _OF_TOKENIZERS, folder / TOKENIZER)


def _save_state_dict(weights: list[Path], file: Path) -> None:
    import torch

    tensors = {name: value for part in weights for name, value in _tensors(part).items()}
    try:
        with file.open("wb") as stream:  # a name would stand in it
            torch.save(tensors, stream)
    except RuntimeError as error:  # it tells no more of a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error


def _tensors(file: Path, load: bool = True) -> dict[str, Any]:
    """Return the tensors of a file by all of their names; without ``load`` look whether it can.

    Raises:
        UserError: if it is damaged.
    """
    from safetensors import SafetensorError

    try:
        with opened_tensors(file) as stored:
            read = stored.get_tensor if load else stored.get_slice
            tensors = {name: read(name) for name in stored.keys()}  # noqa: SIM118
            tied = json.loads((stored.metadata() or {}).get("tied", "{}"))
        return tensors | {name: tensors[first] for name, first in tied.items()}
    except (SafetensorError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{file} is damaged ({error}): copy it again") from error


def _copy_known(source: Path, names: tuple[str, ...], folder: Path) -> None:
    """Copy files of these names, and say which others stay where they are."""
    for name in names:
        _copy(source, name, folder)
    others = {file.name for file in source.iterdir() if not _WEIGHTS.fullmatch(file.name)}
    for name in sorted(others - {*names}):
        print(
            in_one_line(f"left out: {source / name}, which is no file of a model"), file=sys.stderr
        )


def _copy(source: Path, name: str, folder: Path) -> None:
    """Copy a file, if it exists."""
    try:
        descriptor = open_inside(source, name)
    except (FileNotFoundError, NotADirectoryError):
        return
    with (
        os.fdopen(descriptor, "rb") as stream,
        whole_file(folder / Path(name).name) as part,
        part.open("wb") as copy,
    ):
        shutil.copyfileobj(stream, copy)


def main(arguments: list[str]) -> None:
    parser = make_parser("export", __doc__, "outputs/2026-05-04/10-11-12 -o digits")
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=DEFAULT_RUNS,
        metavar="RUN",
        help="the directory of a run, or one above no other; default: %(default)s",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="default: export in the run's directory"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if options.output and options.output.suffix in (".safetensors", ".pt"):
        raise UserError(f"-o {options.output} is a folder, for several files: type one")
    run, *others = find_runs([options.run])
    if others:
        raise UserError(
            f"{options.run} holds {1 + len(others)} runs: name one of them, such as {run.directory}"
        )
    folder = options.output or run.directory / EXPORT
    if options.output is None:
        check_own(run.directory, (EXPORT,))
    export(run, folder, options.format)
    print(folder)
