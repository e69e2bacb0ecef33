"""Recorded configurations, which may look up values in themselves and elsewhere."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlion.suite.inside import read
from dlion.suite.lookups import check_size

_ALIASES = 10  # with as many, a file can hold at most some 40 times what is in it
_LARGEST = 1 << 21  # bytes, which take a minute
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(folder: Path, name: str) -> Any:
    """Return the contents of a YAML file below a folder as written; None: it does not exist.

    Nothing is resolved or executed.

    Raises:
        OSError: if it cannot be read, or is no regular file of a sensible size.
        OmegaConfBaseException, yaml.YAMLError: if it cannot be parsed.
        ValueError: if it repeats parts by aliases, of which a small file can hold billions.
    """
    content = read(folder, name, _LARGEST)
    if content is None:
        return None
    text = content.decode()
    if "&" in text and "*" in text:  # few files have both, and parsing takes time
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _LOADER))
        if aliases > _ALIASES:
            raise ValueError(f"it has {aliases} aliases, a recorded configuration has none")
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def resolve(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the values that it looks up in itself filled in.

    The configuration may be anybody's, so nothing outside it is read: an interpolation that asks
    the environment, the clock or a running Hydra stays as it was written. A group that looks up
    what is not there stays as it was recorded.

    Raises:
        OmegaConfBaseException: if an interpolation cannot be parsed.
        ValueError: if they would stand for more than fits into memory.
    """
    check_size(recorded)
    outside: list[str] = []
    loaded = OmegaConf.create(_set_aside(recorded, outside))
    resolved = {}
    for key, value in recorded.items():
        resolved[key] = value
        if isinstance(value, dict | list):
            with contextlib.suppress(OmegaConfBaseException):
                group = OmegaConf.to_container(loaded[key], resolve=True)
                resolved[key] = _put_back(group, outside)
    return resolved


def _set_aside(node: Any, outside: list[str]) -> Any:
    """Replace the strings that read something outside the configuration by their numbers."""
    if isinstance(node, dict):
        return {key: _set_aside(value, outside) for key, value in node.items()}
    if isinstance(node, list):
        return [_set_aside(value, outside) for value in node]
    if isinstance(node, str) and _reads_outside(node):
        outside.append(node)
        return f"\0{len(outside) - 1}\0"
    return node


def _reads_outside(text: str) -> bool:
    """Whether an interpolation calls a resolver other than ``oc.select``.

    A colon is the one way to call a resolver; even its name may be the result of a look-up.
    """
    return "${" in text and ":" in text.replace("${oc.select:", "")


def _put_back(node: Any, outside: list[str]) -> Any:
    if isinstance(node, dict):
        return {key: _put_back(value, outside) for key, value in node.items()}
    if isinstance(node, list):
        return [_put_back(value, outside) for value in node]
    if isinstance(node, str):
        return re.sub("\0([0-9]+)\0", lambda match: outside[int(match[1])], node)
    return node
