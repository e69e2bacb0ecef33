"""The words of the command line, before Hydra reads them."""

import difflib
import os
import re
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString
from hydra.errors import HydraException

from dlion.errors import UserError
from dlion.suite.config import expand_home
from dlion.suite.settings import Settings, component_of
from dlion.values import parameters

_SHORT = {"elastic=true": "elastic.lighthouse=here", "elastic=false": "elastic.lighthouse=null"}


class Arguments:
    """Command line: Hydra's options, and settings on both sides of them.

    Attributes:
        options: Hydra's, as it reads them.
        settings: words of the form KEY=VALUE or ~KEY; with ``--help`` any words.
    """

    def __init__(self, words: list[str]):
        """Tell options from settings.

        Raises:
            UserError: what to type instead of a word that is neither.
        """
        if words[:1] in (["help"], ["version"]):
            words = [f"--{words[0]}", *words[1:]]
        words = [_with_quotes(_with_home(_whole(word))) for word in words]
        parser = get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign]
        self._words = words
        self.options, unknown = parser.parse_known_args([w for w in words if w != "--version"])
        self.options.version = "--version" in words
        if self.options.experimental_rerun is not None:
            raise UserError("--experimental-rerun is not supported: type the command again")
        folder = self.options.config_dir
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"--config-dir {folder} is not a folder: give one with files of groups")
        rest = {*self.options.overrides, *unknown}
        self.settings = [word for word in words if word in rest]
        if not self.options.help:
            for word, following in zip(words, [*words[1:], ""], strict=True):
                if word in rest:
                    _check_word(word, following)

    def ordered(self) -> list[str]:
        """Return the words with all settings before the options, as argparse needs them.

        Hydra composes the settings of a default run, but those of ``evaluate=RUN`` are the run's:
        settings of groups may be added where the groups of a default run lack them.
        """
        settings, options = self.settings, [w for w in self._words if w not in self.settings]
        if any(word.startswith("evaluate=") for word in settings):
            in_group = re.compile(r"(?!hydra\.)\w+\.[\w.]+=")
            settings = [f"++{word}" if in_group.match(word) else word for word in settings]
        return [*settings, *options]


def check_own_files(folder: str, conf: Path) -> None:
    """Refuse files of the user's own that Hydra does not read, as conf/ has others of that name.

    Raises:
        UserError: naming the first.
    """
    for own in sorted(Path(folder).rglob("*.yaml")):
        ours = conf / own.relative_to(folder)
        if own.is_file() and ours.is_file() and own.read_bytes() != ours.read_bytes():
            raise UserError(
                f"{own} is not read, as conf/{own.relative_to(folder)} comes first: give it another"
                " name"
            )


def _whole(word: str) -> str:
    """Write out ``elastic=true``: Hydra would put a truth in place of a group."""
    return _SHORT.get(word, word)


def _with_home(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{key}={expand_home(key, value)}" if value.startswith("~") else word


def _with_quotes(word: str) -> str:
    """Quote the path of an existing file or folder that Hydra would not read as one word.

    Its grammar knows ASCII words: ``/data/日本``, ``run (1)`` and ``lr=0.1`` are errors in it, a
    comma makes a sweep. The shell's quotes do not help, as they do not reach Hydra.
    """
    key, _, value = word.partition("=")
    is_plain = re.fullmatch(r"[\w/.:+$%*@?|\\ -]*", value, re.ASCII)
    if is_plain or "/" not in value or "${" in value or not re.fullmatch(r"\+*[\w.]+", key):
        return word
    if not os.path.exists(value):  # noqa: PTH110 - raises nothing, whatever the value
        return word
    escaped = value.replace('"', '\\"')
    return f'{key}="{escaped}"'


def _check_word(word: str, following: str) -> None:
    """Refuse a word that is no setting, and say what to type."""
    key = word.lstrip("-")
    if ("=" in key.lstrip("=") and key == word) or word.startswith("~"):
        group, _, name = word.partition("=")
        if group == "hydra.run.dir":  # Hydra would make it
            raise UserError(f"hydra.run.dir is not used: type output_dir={name}")
        is_group = component_of(parameters(Settings).get(group)) is not None
        if name in ("", "null") and is_group:
            raise UserError(f"{group} is required: type {group}=NAME")
        if re.fullmatch(r"\[.*\]", name) and (is_group or group == "experiment"):
            first = name.strip("[]").partition(",")[0] or "NAME"
            raise UserError(
                f"{group}={name} is a list, of which one is taken: type {group}={first}, or"
                f" {group}=A,B and -m for all"
            )
        if (is_group or group == "experiment") and not _may_be_files(word):
            raise UserError(
                f"{word} is not a file of conf/{group}: see `python train.py --help` for names"
            )
        return
    value = "VALUE" if "=" in following or following[:1] in ("", "-") else following
    name, equals, given = key.partition("=")
    name = name.replace("-", "_")
    if key == word:
        similar = difflib.get_close_matches(word, parameters(Settings), n=1)
        hint = f"type {similar[0]}={value}" if similar else "see `python train.py --help`"
        if word == "=" or following.startswith("="):
            hint = "leave out the spaces around ="
        if word.startswith("@"):
            hint = "settings are not read from files"
        raise UserError(f"{word} is not a setting of the form KEY=VALUE: {hint}")
    raise UserError(f"{word} is not an option: type {name}={given if equals else value}")


def _may_be_files(word: str) -> bool:
    """Whether the values of a word may be names of files; what Hydra cannot read it refuses."""
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return True
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    names = [name.text if isinstance(name, QuotedString) else name for name in names]
    plain = (isinstance(n, str) and len(n) < 256 and "${" not in n for n in names)
    return isinstance(value, Glob) or all(plain)


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}: see `python train.py --help`")
