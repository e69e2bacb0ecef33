"""A model's weights: the result of a finished run, and the start of another.

    RUN/model.safetensors   parameters and buffers, under the names of the model's state_dict
    RUN/model/              instead of it, of a model of transformers: what save_pretrained writes

Weights are read as numbers alone: nothing that a file says is executed.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from dlion.errors import TrainingFailed, UserError
from dlion.suite import data as datasets
from dlion.suite import models
from dlion.suite.data import Data
from dlion.suite.data.inputs import PictureInput, TextInput
from dlion.suite.data.next_line import ByteTokenizer
from dlion.suite.data.tokenizers import BYTES, Bytes, load_tokenizer
from dlion.suite.files import opened_tensors, sha256_of, sha256_of_tensors, whole_file, whole_folder
from dlion.suite.inside import read_named
from dlion.suite.record.runs import (
    CONFIG,
    INPUT,
    MODEL,
    PRETRAINED,
    SUMMARY,
    TOKENIZER,
    Run,
    check_model,
    holds_run,
    load_run,
)
from dlion.suite.settings import SPECIAL, with_present_names
from dlion.suite.terminal import in_one_line
from dlion.suite.training.precision import in_precision

_SHOWN = 3  # names in an error message
_ROOMS = {"model": models, "dataset": datasets}
_FROM_ELSEWHERE = ("pretrained", "checkpoint_path")  # where timm's models take weights from


def save_model(model: nn.Module, data: Data, directory: Path) -> str:
    """Write a run's model, completely or not at all, and return the SHA-256 of its weights.

    Tensors with several names (tied embeddings) are written once, under the first of them.

    Raises:
        TrainingFailed: if it cannot be written.
    """
    named = _tensors(model)
    tensors = {
        names[0]: tensor.detach().to("cpu", copy=True).contiguous() for names, tensor in named
    }
    tied = {name: names[0] for names, _ in named for name in names[1:]}
    try:
        if isinstance(model, models.CausalLM):
            _save_folder(model.model, tensors, getattr(data, "input", None), directory)
        else:
            _save_file(tensors, tied, data, directory)
        return sha256_of_tensors(_weight_files(directory))
    except (OSError, SafetensorError) as error:
        raise TrainingFailed(
            f"the model could not be written ({error}): fix this; the same command with"
            " resume=auto resumes"
        ) from error


def load_model(
    run: str | Path,
    *,
    build: Callable[..., nn.Module] | None = None,
    data: Any = None,
    device: str = "cpu",
) -> nn.Module:
    """Return the model of a finished run, in evaluation mode and the run's precision.

    ``model.input`` turns pictures or text into what the model was trained on, and knows the names
    of the classes: :class:`dlion.suite.data.inputs.PictureInput` or ``TextInput``. It is None of
    data of another kind and of runs of earlier versions; a model's own attribute ``input`` stays.
    ::

        model = dlion.load_model("outputs/pets")
        logits = model(model.input("photo.jpg"))  # on the CPU
        print(model.input.names[logits.argmax()])

    Args:
        run: the run's directory.
        build: the function that made the model, where it is not one of ``dlion.suite.models``: no
            code that a recorded configuration names is called.
        data: the data set, or another object that has what ``build`` takes from it; None: what the
            run has recorded, which are the attributes of :class:`dlion.suite.models.ImageShape` or
            :class:`dlion.suite.models.TextShape`.
        device: where the model shall be.

    Raises:
        UserError: if the run is not finished, or has left no model that this can read.
    """
    directory = Path(run).expanduser()
    given = ("model",) if build else ()
    settings = recorded_settings(load_run(directory), ("model", "precision"), given)
    if (directory / PRETRAINED).is_dir():
        model = models.saved_causal_lm(directory / PRETRAINED)
    else:
        if data is None:
            data = _recorded_shape(directory / MODEL)
        make = _maker(settings["model"], build)
        with torch.device("meta"):
            check_weights(make(data), directory)  # before memory is taken for it
        model = make(data)
        load_weights(model, directory)
    made = recorded_input(directory) or getattr(data, "input", None)
    if not hasattr(model, "input"):
        model.input = made
    return in_precision(model, settings.get("precision"), device).eval()


def recorded_input(source: str | Path) -> PictureInput | TextInput | None:
    """Return the input maker of the model in a run, or in another source of weights.

    None: it is not recorded, as in a run of an earlier version.
    """
    file, *_ = _files(source)
    with _opened(file) as weights:
        facts = (weights.metadata() or {}).get("input")
    folder = file.parent
    if facts is None and (folder / INPUT).is_file():
        facts = read_named(folder / INPUT).decode()
    if facts is None:
        if folder.name == PRETRAINED and (folder / "tokenizer_config.json").exists():
            config = json.loads(read_named(folder / "config.json"))
            context = config.get("max_position_embeddings", config.get("n_positions", 1024))
            return TextInput(load_tokenizer(str(folder), str(folder)), context)
        return None
    try:
        found = json.loads(facts)
        if "tokenizer" not in found:
            return PictureInput(**found)
        if found["tokenizer"] == BYTES:
            return TextInput(Bytes(), int(found["context"]))
        place = folder / ("." if found["tokenizer"] == "." else TOKENIZER)  # no other is read
        return TextInput(load_tokenizer(str(place), str(folder)), int(found["context"]))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged (its input): copy it again") from error


def load_weights(model: nn.Module, source: str | Path, left: str | None = None) -> None:
    """Copy weights into a model, in the model's own precision.

    Args:
        model: all of its parameters and buffers are set.
        source: a run's directory, a file, or a folder that ``save_pretrained`` wrote.
        left: a pattern of names (``head.*``) that stay as they are.

    Raises:
        UserError: if they are not those of such a model.
    """
    check_weights(model, source, left)
    by_name = {name: tensor for names, tensor in _tensors(model) for name in names}
    for file in _files(source):
        with _opened(file) as weights, torch.no_grad():
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                if not _is_left([name], left):
                    by_name[name].copy_(weights.get_tensor(name))


def check_weights(model: nn.Module, source: str | Path, left: str | None = None) -> None:
    """Compare the names and shapes of weights with those of a model, which may be on meta.

    ``left``: a pattern of names that are not compared.

    Raises:
        UserError: naming what is missing, unexpected, or of another shape.
    """
    stored_names = _stored(source)
    found = {name: kind for name, kind in stored_names.items() if not _is_left([name], left)}
    missing, misshapen, mistyped = [], [], []
    unexpected = dict.fromkeys(found)
    compared = [(names, tensor) for names, tensor in _tensors(model) if not _is_left(names, left)]
    if left is not None and len(compared) == len(_tensors(model)):
        heads = sorted({f"{name.rpartition('.')[0]}.*" for name in stored_names})
        raise UserError(
            f"init_from_except={left} is the name of no weights of the model: type one such as"
            f" {_several(heads[::-1])}"
        )
    for names, tensor in compared:
        stored = next((name for name in names if name in found), None)
        if stored is None:
            missing.append(names[0])
            continue
        del unexpected[stored]
        shape, kind = found[stored]
        if shape != list(tensor.shape):
            misshapen.append(f"{stored} {shape} instead of {list(tensor.shape)}")
        elif tensor.is_floating_point() and not kind.startswith(("F", "BF")):
            mistyped.append(stored)
    complaints = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    complaints["not of real numbers"] = mistyped
    lists = [f"{what} {_several(list(names))}" for what, names in complaints.items() if names]
    if lists:
        raise UserError(
            f"{source} holds the weights of another model ({'; '.join(lists)}): give weights of"
            " this model, or the settings of the model and the data set that they are of"
            f"{_other_head(misshapen, complaints)}"
        )


def _is_left(names: Iterable[str], pattern: str | None) -> bool:
    """Whether one of a tensor's names fits a pattern."""
    return pattern is not None and any(fnmatchcase(name, pattern) for name in names)


def _other_head(misshapen: list[str], complaints: dict[str, Any]) -> str:
    """Return the advice for weights that differ in the shape of one module only."""
    modules = {entry.split(" ")[0].rpartition(".")[0] for entry in misshapen}
    others = any(found for what, found in complaints.items() if what != "of another shape")
    if others or len(modules) != 1:
        return ""
    return f"; init_from_except={modules.pop()}.* leaves that part out of init_from"


def check_pretrained(model: models.CausalLM, folder: str | Path) -> None:
    """Compare a folder of ``save_pretrained`` with its model on meta, before it is loaded.

    Names that the model does not have may be older ones, which transformers translates: then only
    loading it shows what is missing.

    Raises:
        UserError: if its weights cannot be read, are missing, or of another shape.
    """
    found = _stored(folder)
    prefix = f"{model.model.base_model_prefix}."
    wrong, unknown = [], set(found)
    for names, tensor in _tensors(model):
        stored = [x for name in names for x in (name, name.removeprefix(prefix)) if x in found]
        unknown -= set(stored)
        if not stored and isinstance(tensor, nn.Parameter):
            wrong.append(f"{names[0]} is missing")
        elif stored and (shape := found[stored[0]][0]) != list(tensor.shape):
            wrong.append(f"{stored[0]} is {shape} instead of {list(tensor.shape)}")
    if wrong and not unknown:
        raise UserError(
            f"model.path={folder} does not hold the weights that its config.json describes"
            f" ({_several(wrong)}): copy it again"
        )


def _stored(source: str | Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and type of each stored tensor, as safetensors calls it (``F32``), by name."""
    found = {}
    for file in _files(source):
        with _opened(file) as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                tensor = weights.get_slice(name)
                found[name] = tensor.get_shape(), tensor.get_dtype()
    return found


@functools.cache
def weights_sha256(source: str) -> str:
    """Return the SHA-256 of the files of weights."""
    return sha256_of(_files(source))


def recorded_settings(run: Run, keys: Iterable[str], given: Collection[str] = ()) -> dict[str, Any]:
    """Return settings of a finished run that has left a model.

    They may be anybody's, so they may build only what is dlion's own, and look nothing up.

    Args:
        run: as it was read from its directory.
        keys: which settings; those that an older run did not have are left out.
        given: the groups (``model``, ``dataset``) whose function the user names.

    Raises:
        UserError: if the run is not finished or has no model, or if its settings cannot be trusted.
    """
    directory = run.directory
    if run.summary is None or run.config is None:
        if (directory / Path(CONFIG).name).is_file():
            raise UserError(
                f"{directory} is an export, for use without dlion: give the directory of the run"
            )
        raise UserError(f"{directory} holds no finished run: give the directory of one")
    _files(directory)
    settings = {key: with_present_names(run.config[key]) for key in keys if key in run.config}
    groups = {group: settings[group] for group in _ROOMS if group in settings}
    if "model" not in groups or not all(isinstance(node, dict) for node in groups.values()):
        raise UserError(f"{directory / CONFIG} is damaged: give a run as it was recorded")
    foreign = {
        f"{group}._target_": target
        for group, node in groups.items()
        if group not in given and (target := str(node.get("_target_"))) not in _own(group)
    }
    if foreign:
        words = in_one_line(" ".join(f"{key}={target}" for key, target in foreign.items()))
        raise UserError(
            f"{directory} was made with functions that are not dlion's own and not called unasked:"
            f" type {words}, or in Python build=FUNCTION"
        )
    text = str(settings)
    if "${" in text or text.count("_target_") > len(groups):
        raise UserError(
            f"{directory / CONFIG} looks values up or names more functions than a recorded run"
            " does: give a run as it was recorded"
        )
    if "path" in settings["model"] and (directory / PRETRAINED).is_dir():
        settings["model"]["path"] = str(directory / PRETRAINED)  # where it began may be gone
    for source in _FROM_ELSEWHERE:
        settings["model"].pop(source, None)
    return settings


def _own(group: str) -> set[str]:
    """Return the names that a recorded run may call."""
    room = _ROOMS[group]
    return {f"{room.__name__}.{name}" for name in room.__all__}


def _maker(
    node: dict[str, Any], build: Callable[..., nn.Module] | None
) -> Callable[[Any], nn.Module]:
    """Return the function that builds a recorded model."""
    if build is None:
        return functools.partial(models.build, node)
    options = {key: value for key, value in node.items() if key not in SPECIAL}
    return lambda data: build(data, **options)


def _tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each saved parameter and buffer with all of its names.

    A model of transformers has the names that it has there.
    """
    named = model.model if isinstance(model, models.CausalLM) else model
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _save_file(
    tensors: dict[str, Tensor], tied: dict[str, str], data: Data, directory: Path
) -> None:
    shape, made = models.shape_of(data), getattr(data, "input", None)
    metadata = {"format": "pt", "settings": CONFIG, "data": json.dumps(shape and asdict(shape))}
    metadata["tied"] = json.dumps(tied)
    if isinstance(made, PictureInput):
        metadata["input"] = json.dumps(asdict(made))
    elif isinstance(made, TextInput) and _is_known(made.tokenizer):
        if not _is_bytes(made.tokenizer):
            with whole_folder(directory / TOKENIZER) as part:
                made.tokenizer.save_pretrained(part)
        metadata["input"] = _text_facts(made, TOKENIZER)
    with whole_file(directory / MODEL) as part:
        save_file(tensors, part, metadata)


def _is_bytes(tokenizer: Any) -> bool:
    return isinstance(tokenizer, Bytes | ByteTokenizer)


def _is_known(tokenizer: Any) -> bool:
    return _is_bytes(tokenizer) or hasattr(tokenizer, "save_pretrained")


def _text_facts(made: TextInput, folder: str) -> str:
    """Write what makes the input of a model of text; ``folder``: of its tokenizer's files."""
    tokenizer = BYTES if _is_bytes(made.tokenizer) else folder
    return json.dumps({"tokenizer": tokenizer, "context": made.context})


def _save_folder(model: nn.Module, tensors: dict[str, Tensor], made: Any, directory: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # of one file
    if isinstance(made, TextInput):
        _name_ends(model, made.tokenizer)
    with whole_folder(directory / PRETRAINED) as part:
        model.save_pretrained(part, state_dict=tensors)
        if isinstance(made, TextInput) and _is_known(made.tokenizer):
            if not _is_bytes(made.tokenizer):
                made.tokenizer.save_pretrained(part)
            (part / INPUT).write_text(_text_facts(made, "."), "utf-8")


def _name_ends(model: Any, tokenizer: Any) -> None:
    """Let the configuration name the token that ends texts, with which ``generate`` stops."""
    end, known = getattr(tokenizer, "eos_token_id", None), model.config.eos_token_id
    if end is None or end in (known if isinstance(known, list) else [known]):
        return
    end = end if end < model.config.vocab_size else None
    begin = getattr(tokenizer, "bos_token_id", None)
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
        config.bos_token_id = end if begin is None else begin


def _recorded_shape(file: Path) -> models.Shape:
    """Return the shape of the data that a run's model was made for."""
    with _opened(file) as weights:
        metadata = weights.metadata() or {}
    try:
        return models.shape_from(json.loads(metadata["data"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} does not name the data of its model: load the data set, and give data="
        ) from error


def _files(source: str | Path) -> list[Path]:
    """Return the files that hold weights.

    Raises:
        UserError: if there are none, or they are those that a run had before it got more steps.
    """
    path = Path(source).expanduser()
    if holds_run(path) and not (path / SUMMARY).exists():
        raise UserError(f"{source} is not finished: its model comes with its last step")
    if holds_run(path):
        check_model(path)
    if path.is_file():
        return [path]
    if found := _weight_files(path):
        return found
    if any(path.glob("*.bin")):
        raise UserError(
            f"{source} holds pickled weights, which could run anything when they are read: load the"
            " model where you trust it, and give the folder of its save_pretrained"
        )
    raise UserError(
        f"{source} holds no weights: give the directory of a finished run, a .safetensors file, or"
        f" a folder with {MODEL}"
    )


def _weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights in a folder, or in its folder of save_pretrained."""
    for folder in (directory, directory / PRETRAINED):
        if (folder / MODEL).is_file():
            return [folder / MODEL]
        index = folder / f"{MODEL}.index.json"
        if index.is_file():
            try:
                parts = set(json.loads(read_named(index))["weight_map"].values())
                return [folder / Path(part).name for part in sorted(parts)]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(f"{index} is damaged: copy it again") from error
    return []


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with opened_tensors(file) as weights:
            yield weights
    except PermissionError:
        raise
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is damaged, or no file of safetensors ({error}): copy it again, or give"
            " another"
        ) from error


def _several(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
