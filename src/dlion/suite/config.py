"""The settings of a run, from what Hydra composed, and the objects that they describe."""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

import dlion.suite.search  # noqa: F401 - its resolvers are those of recipes
from dlion.errors import UserError
from dlion.suite.lookups import check_size
from dlion.suite.settings import (
    Settings,
    check_complete,
    check_table,
    component_of,
    root_cause,
    with_present_names,
)
from dlion.values import did_you_mean, parameters

_WORD = re.compile(r"[\w.]+").findall
_PREFERRED = {"optimizer=dlion": "dlion_mavo", "optimizer=signum": "signum_mavo"}
_OF_A_RESOLVER = "UserError raised while resolving interpolation: "
_GROUPS = (  # folders of conf/
    *(key for key, hint in parameters(Settings).items() if component_of(hint) is not None),
    *("experiment", "search"),
)
_OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "gpus": "processes",
    "output": "output_dir",
}


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``_target_`` of a node with its other values, but without ``name``.

    Unlike with hydra.utils.instantiate alone, errors of the target arrive as they are.

    Raises:
        UserError: if the target takes no such arguments, or needs others.
    """
    options = {"_convert_": "all", **{key: node[key] for key in node if key != "name"}}
    call = hydra.utils.instantiate(options, _partial_=True)
    try:
        signature = inspect.signature(call)
    except ValueError:  # it is written in C
        return call(*args, **kwargs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{node['_target_']} does not accept its settings: {error}") from error
    return call(*args, **kwargs)


def resolve(config: DictConfig, hydra_node: DictConfig) -> DictConfig:
    """Return the settings of a run as plain values, without interpolations.

    The recipe's table ``methods.NAME`` replaces settings of ``optimizer=NAME``, and typed or swept
    values replace both. A method that the recipe does not list keeps its own settings.

    Args:
        config: what Hydra composed; it is not changed.
        hydra_node: its ``hydra`` node, which lists the chosen files and the typed values.

    Raises:
        UserError: if the table names an unknown setting, or a setting refers to another that does
            not exist.
    """
    try:
        kept = [key for key in config if key not in ("hydra", "methods")]
        settings = OmegaConf.masked_copy(config, kept)
    except OmegaConfBaseException as error:
        raise UserError(_unresolved(config) or explain(error)) from error
    try:
        check_size(OmegaConf.to_container(settings, resolve=False))
    except ValueError as error:
        raise UserError(f"{error}: type values, or look up less") from error
    words: Any = OmegaConf.to_container(hydra_node.overrides.task, resolve=False)
    typed = {override.lstrip("+~").partition("=")[0] for override in words}
    _check_places(config, hydra_node, words)
    check_complete(settings.keys())
    for group in _GROUPS:
        if OmegaConf.is_list(node := settings._get_node(group)):
            check_table(group, OmegaConf.to_container(node, resolve=False))
    method = hydra_node.runtime.choices.get("optimizer")
    if method is None:
        raise UserError(
            "optimizer=[...] is a list: choose one, or type optimizer=A,B and -m for all"
        )
    try:
        tables = OmegaConf.select(config, "methods")  # None after ~methods
        own = OmegaConf.select(config, f"methods.{method}")
        if not all(isinstance(table, DictConfig | None) for table in (tables, own)):
            raise UserError(
                f"methods.{method} is a table of settings: type methods.{method}.KEY=VALUE"
            )
        for key, value in (own or {}).items():
            if key not in settings.optimizer:
                raise UserError(
                    f"methods.{method}.{key} is not a setting of optimizer={method}"
                    f"{did_you_mean(key, settings.optimizer)}"
                )
            if f"optimizer.{key}" not in typed:
                settings.optimizer[key] = value
        plain = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_unresolved(settings) or explain(error)) from error
    if str(plain["output_dir"]).startswith("~"):
        plain["output_dir"] = expand_home("output_dir", plain["output_dir"])
    return OmegaConf.create(with_present_names(plain), flags={"struct": True})


def _unresolved(node: Any) -> str | None:
    """Name the first setting whose interpolation fails, and say why."""
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        if key == "hydra":
            continue
        full = node._get_full_key(key)
        try:
            value = node[key]
        except MissingMandatoryValue:
            continue  # which the checks name
        except OmegaConfBaseException as error:
            reason = _first_line(error)
            if (said := reason.removeprefix(_OF_A_RESOLVER)) != reason:
                return f"{full}: {said}"
            written = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
            return f"{full}={written} could not be resolved ({reason}): type {full}=VALUE"
        if isinstance(value, DictConfig | ListConfig) and (said := _unresolved(value)):
            return said
    return None


def expand_home(key: str, value: str) -> str:
    """Return a path that begins with ~ by its whole name, as not all shells do.

    Raises:
        UserError: if it is the home of nobody.
    """
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise UserError(
            f"{key}={value} names an unknown user's home folder: type the whole path"
        ) from None


def _check_places(config: DictConfig, hydra_node: DictConfig, words: list[str]) -> None:
    """Refuse settings where nothing reads them, and files that put theirs there.

    A recipe may have tables of its own, which its settings look values up in.
    """
    for group in (group for group in _GROUPS if group in config):
        _check_group(group, config._get_node(group), hydra_node.runtime.choices.get(group))
    known = {*parameters(Settings), "methods", "hydra"}
    lost = [group for group in _GROUPS if group in known and group not in config]
    strange = [key for key in config if key not in known and not _is_read(key, config, hydra_node)]
    if not lost and not strange:
        return
    loader, name = GlobalHydra.instance().config_loader(), hydra_node.job.config_name
    chosen = [w for w in words if loader.get_group_options(w.lstrip("+~").partition("=")[0])]
    files = loader.load_configuration(name, chosen, RunMode.RUN)  # typed values replace look-ups
    strange = [key for key in strange if key not in files or not _is_read(key, files, files.hydra)]
    for default in loader.compute_defaults_list(name, chosen, RunMode.RUN).defaults:
        file, package = f"{default.config_path}.yaml", default.package or ""
        if file.partition("/")[0] in lost:
            raise UserError(
                f"{file} puts its settings into {package or 'those of the run'}, and"
                f" {file.partition('/')[0]} gets none: leave out its line `# @package`"
            )
        if package.partition(".")[0] in strange:
            raise UserError(
                f"{file} puts its settings below {package}, where nothing reads them: make"
                " `# @package _global_` its first line"
            )
    for key in strange:
        node = config._get_node(key)
        inside = [name for name in node if name in known] if OmegaConf.is_dict(node) else []
        typed = [word.lstrip("+").partition("=")[0] for word in words if word[0] == "+"]
        typed = [name for name in typed if name.partition(".")[0] == key]
        if inside and not typed:
            raise UserError(
                f"nothing reads what is below {key}: write {', '.join(inside)} at the beginning of"
                f" a line, without {key}"
            )
        keys = _keys(OmegaConf.to_container(OmegaConf.masked_copy(config, [*known])), "")
        raise UserError(_not_a_setting([*typed, key][0], keys))


def _check_group(group: str, node: Any, choice: str | None) -> None:
    """Refuse a group whose settings a file gives one level too deep, or in one word."""
    plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else None
    if plain is None and isinstance(word := node._value(), str) and "${" not in word:
        raise UserError(
            f"{group}: {word} chooses nothing in a file: write - override /{group}: {word} below"
            " defaults:"
        )
    if isinstance(plain, dict) and "name" not in plain and isinstance(plain.get(group), dict):
        raise UserError(
            f"{group}.{group} is not a setting: in the file of {group}={choice}, leave out the line"
            f" {group}: and the spaces before those below it"
        )


def _is_read(key: str, config: DictConfig, hydra_node: DictConfig) -> bool:
    """Whether other settings look up what is at or below a key."""
    others = OmegaConf.masked_copy(config, [name for name in config if name != key])
    folders = OmegaConf.masked_copy(hydra_node, ["sweep", "sweeper", "launcher"])
    words = looked_up(others) | looked_up(folders)
    return any(word.partition(".")[0] == key for word in words)


def looked_up(config: DictConfig) -> set[str]:
    """Return the words in settings that look others up: names of settings are among them."""
    texts = _texts(OmegaConf.to_container(config, resolve=False))
    return {word.strip(".") for text in texts if "${" in text for word in _WORD(text)}


def _texts(node: Any) -> Iterator[str]:
    """Yield all texts in a configuration."""
    if isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def unlisted_method(config: DictConfig, hydra_node: DictConfig) -> str | None:
    """Return the chosen method's name if the recipe has a table of methods without it."""
    method, table = hydra_node.runtime.choices.optimizer, config.get("methods")
    return method if table is None or (table and method not in table) else None


def explain(error: Exception) -> str:
    """Say in one sentence what Hydra or OmegaConf refused, and what is allowed."""
    reason = _first_line(error)
    if (said := reason.removeprefix(_OF_A_RESOLVER)) != reason:
        return said
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        unknown = _unknown_choice(error.missing_cfg_file, error.options or ())
        named_by = re.match("In '(.+)': Could not load", reason)
        inside = named_by and named_by[1] != "config"
        return f"the defaults of {named_by[1]}.yaml: {unknown}" if inside else unknown
    if isinstance(error, InstantiationException):
        return _first_line(root_cause(error))
    if several := re.match("(?:Ambiguous value for argument|Sweep parameters) '(.+)'", reason):
        return f"{several[1]} names several values: add -m to run them all"
    if slash := re.match(r"In '(.+)': Could not override '[^']+/(\w+)(?:@\w+)?'", reason):
        return f"the defaults of {slash[1]}.yaml: write override /{slash[2]}: NAME, with a slash"
    if known := re.search(r"remove \+ prefix: '(.+)'", str(error)):
        return f"{known[1].partition('=')[0]} is there already: type {known[1]}, without +"
    if elsewhere := re.match("Could not override '(.+@.*)'", reason):
        return _not_a_setting(elsewhere[1], parameters(Settings))
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return _unknown(cause)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key} is not known ({reason}): type {error.full_key}=VALUE"
    return (
        f"{reason}: {_first_line(cause)}" if isinstance(cause, OmegaConfBaseException) else reason
    )


def _unreadable(override: str) -> str:
    """Say what to type instead of a word that Hydra cannot read."""
    key, _, value = override.partition("=")
    if value.endswith(","):
        return f"{override} ends with a comma: type {override.rstrip(',')}, or a value behind it"
    if re.search(r"""["'\[\](){}]""", value) or not value:
        return f"cannot read {override}: write KEY=VALUE; a list is [A,B], and ( or ' are quoted"
    return f"cannot read {override}: type '{key}=\"{value}\"', with both kinds of quotes"


def _unknown_choice(file: str, options: Collection[str]) -> str:
    """Say that a group has no such file, and which one was probably meant."""
    group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    if group not in _GROUPS and not file.startswith("hydra/"):
        return f"--config-name {file} is not a file of conf/: leave it out"
    if group == "hydra/launcher":
        options = {*options, "basic"}
    beginnings = sorted(option for option in options if option.startswith(name))
    preferred = _PREFERRED.get(f"{group}={name}")
    guess = f" (did you mean {preferred or beginnings[0]}?)" if preferred or beginnings else ""
    if not name:
        return f"{group}= names nothing: type a name behind it, or leave it out"
    few = 0 < len(options) <= 20
    choices = (
        f"choose one of {', '.join(sorted(options))}" if few else "see `python train.py --help`"
    )
    return f"{group}={name} is unknown{guess or did_you_mean(name, options)}: {choices}"


def _unknown(error: ConfigAttributeError | ConfigKeyError) -> str:
    """Say that a typed key does not exist, and which one was probably meant."""
    key = error.full_key
    if key == "scale":
        return (
            "scale= is not a setting: experiment=NAME is the small form of a recipe,"
            " experiment=NAME_full the paper's"
        )
    parent, prefix = error.parent_node, key.rpartition(".")[0]
    node = OmegaConf.to_container(parent) if isinstance(parent, DictConfig) else {}
    return _not_a_setting(key, _keys(node, f"{prefix}." if prefix else ""))


def _not_a_setting(key: str, known: Iterable[str]) -> str:
    """Say that a key does not exist, and which of the known ones was probably meant."""
    known = [name for name in known if not name.startswith("hydra.")]
    group, _, last = key.rpartition(".")
    last = _OTHER_NAMES.get(last, last)
    meant = f"{group}.{last}" if group else last
    same_end = sorted(name for name in known if name == meant or name.endswith(f".{meant}"))
    guess = f" (did you mean {same_end[0]}?)" if same_end else did_you_mean(key, known)
    return f"{key} is not a setting{guess}: see `python train.py --help`"


def _keys(node: Any, prefix: str) -> set[str]:
    """Return the dotted names of all keys at or below a node."""
    if not isinstance(node, dict):
        return set()
    inner = {f"{prefix}{key}": value for key, value in node.items()}
    return set(inner).union(*(_keys(value, f"{key}.") for key, value in inner.items()))


def _first_line(error: BaseException | None) -> str:
    """Return the first line of a message, or of its cause's if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else _first_line(error.__cause__) if error else ""
