"""Text of ``python train.py --help``, made from the types and docstrings of the settings."""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dlion.errors import UserError
from dlion.suite.config import resolve
from dlion.suite.launch.arguments import Arguments
from dlion.suite.settings import SPECIAL, Settings, component_of, locate
from dlion.values import Folder, Name, describe, did_you_mean, parameters, sentences, show

USAGE = """\
usage: python train.py [GROUP=NAME ...] [KEY=VALUE ...]

  python train.py optimizer=dlion_mavo workers=8              train with 8 workers on this machine
  python train.py -m optimizer=g_lion,dlion_mavo seed=0,1,2   every combination, one by one
  python train.py --help optimizer=dgc                        what a choice is, and its settings

  -m                 run all combinations of values with commas; recipes do so by themselves
  --config-dir DIR   look for files of groups in DIR, too
  --cfg job          print the settings and train nothing
  --version          print the version
  -sc install=bash   print a command that lets bash complete words with Tab: type eval "$(...)"
  --hydra-help       list Hydra's own options
"""
INDENT = 27  # columns before a sentence
PLAIN = (Any, bool, Name, Name | None, Folder, Folder | None)  # of which nothing is to say


class Entry(NamedTuple):
    """A setting in the help.

    Attributes:
        typed: the setting and its value, as they are typed: ``seed=0``.
        sentence: the meaning.
        kind: the allowed values; empty where any is.
    """

    typed: str
    sentence: str
    kind: str


def help_text(arguments: Arguments, conf: Path) -> str:
    """Return the help on the words beside ``--help``: choices, keys, or nothing.

    Raises:
        UserError: if the key is unknown, or Python has left out the docstrings.
        HydraException: if the choice is unknown.
    """
    if sys.flags.optimize > 1:
        raise UserError(
            "the help is made of docstrings, which python -OO leaves out: use python -O"
        )
    words = [word for word in arguments.settings if "=" in word]
    keys = [word for word in arguments.settings if "=" not in word]
    with opened(conf, arguments.options.config_dir) as loader:
        config = compose("config", overrides=words, return_hydra_config=True)
        names = {group: loader.get_group_options(group) for group in _groups()}
        settings: Any = OmegaConf.to_container(resolve(config, config.hydra))
    choices = config.hydra.runtime.choices
    typed_groups = [word.partition("=")[0] for word in words if word.partition("=")[0] in names]
    if typed_groups:
        folders = [source.path for source in loader.get_sources() if source.scheme() == "file"]
        parts = (_choice(group, choices[group], settings, folders) for group in typed_groups)
    elif keys:
        parts = (_key(key, settings) for key in keys)
    else:
        parts = _overview(names, choices, settings)
    return "\n".join(parts)


@contextmanager
def opened(conf: Path, own: str | None) -> Iterator[ConfigLoader]:
    """Give what loads files of ``conf`` and, if it is given, of a folder of the user's own."""
    with initialize_config_dir(str(conf), version_base="1.3"):
        if own:
            path = GlobalHydra.instance().config_loader().get_search_path()
            path.prepend("command-line", f"file://{Path(own).resolve()}", "schema")
            GlobalHydra.instance().hydra.config_loader = ConfigLoaderImpl(path)
        yield GlobalHydra.instance().config_loader()


def _groups() -> list[str]:
    """Return the names of the folders of conf/ that a file can be chosen from."""
    hints = parameters(Settings)
    return [*(key for key, hint in hints.items() if component_of(hint)), "experiment"]


def _overview(
    names: dict[str, list[str]], choices: Mapping[str, Any], settings: dict[str, Any]
) -> Iterator[str]:
    """Yield usage, groups and all settings that do not depend on a choice."""
    yield USAGE
    yield "Groups\n"
    said = {**sentences(Settings), "experiment": "a recipe; NAME_full is the paper's size"}
    for group, options in names.items():
        default = f" [{choices[group]}]" if choices.get(group) else ""
        yield _entry(f"{group}=NAME", f"{_as_typed(said[group])}{default}\n{', '.join(options)}")
    yield "\nSettings\n"
    yield from map(_line, settings_of_runs(settings))


def _choice(group: str, name: str, settings: dict[str, Any], folders: list[str]) -> str:
    """Return the description of a choice, and its settings."""
    file = next(f for folder in folders if (f := Path(folder, group, f"{name}.yaml")).exists())
    comments, body = [], file.read_text("utf-8").strip().splitlines()
    while body and body[0].startswith("#"):
        comments.append(body.pop(0).lstrip("# "))
    lines = [f"{group}={name}", *(c for c in comments if not c.startswith("@package")), ""]
    if group == "experiment":
        return "\n".join([*lines, *body, ""])
    return "\n".join([*lines, *map(_line, settings_of_choice(group, settings[group]))])


def _key(key: str, settings: dict[str, Any]) -> str:
    """Return the help on one setting that does not depend on a choice."""
    hints = parameters(Settings)
    first = key.partition(".")[0]
    if first not in hints and first not in _groups():
        raise UserError(
            f"{key} is not a setting{did_you_mean(key, hints)}: see `python train.py --help`"
        )
    if first not in hints or component_of(hints[first]):
        raise UserError(f"{first} is a group: type `python train.py --help {first}=NAME`")
    sentence = sentences(Settings)[first]
    return "\n".join(map(_line, _entries(first, settings[first], hints[first], sentence)))


def settings_of_runs(settings: dict[str, Any]) -> Iterator[Entry]:
    """Yield the settings that do not depend on a choice."""
    said = sentences(Settings)
    for key, hint in parameters(Settings).items():
        if component_of(hint) is None:
            yield from _entries(key, settings[key], hint, said.get(key, ""))


def settings_of_choice(group: str, node: dict[str, Any]) -> Iterator[Entry]:
    """Yield the settings of a choice of a group: ``node`` has its values."""
    component = component_of(parameters(Settings)[group])
    assert component is not None
    target = locate(node["_target_"], group) if "_target_" in node else component.own
    for source in filter(None, (target, component.shared)):
        hints, said = parameters(source), sentences(source)
        for key in (key for key in hints if key in node and key not in SPECIAL):
            yield from _entries(f"{group}.{key}", node[key], hints[key], said.get(key, ""))


def _entries(key: str, value: Any, hint: Any, sentence: str) -> Iterator[Entry]:
    """Yield the entry of a setting, or of all settings in it."""
    if inspect.isclass(hint) and isinstance(value, dict):
        hints, said = parameters(hint), sentences(hint)
        for name, inner in hints.items():
            yield from _entries(f"{key}.{name}", value[name], inner, said[name])
    else:
        kind = "" if hint in PLAIN else describe(hint)
        yield Entry(f"{key}={show(value)}", _as_typed(sentence), kind)


def _line(entry: Entry) -> str:
    """Return an entry as it is printed."""
    kind = f" ({entry.kind})" if entry.kind else ""
    return _entry(entry.typed, entry.sentence + kind)


def _as_typed(sentence: str) -> str:
    """Return a sentence of a docstring in the words of the command line."""
    plain = re.sub(r":\w+:`([^`]*)`", r"\1", sentence).replace("``", "")
    return re.sub(r"\bNone\b", "null", plain).rstrip(".")


def _entry(title: str, text: str) -> str:
    """Return a title with a text beside it, or below where the title is long."""
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    blank = " " * INDENT
    lines = [
        line
        for paragraph in text.splitlines()
        for line in textwrap.wrap(
            paragraph, width, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False
        )
    ]
    title = f"  {title}"
    if len(title) + 1 < INDENT and lines:
        lines[0] = title + lines[0][len(title) :]
        return "\n".join(lines)
    return "\n".join([title, *lines])
