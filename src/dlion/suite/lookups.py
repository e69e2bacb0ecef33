"""Look-ups in settings, ``${other.setting}``: how much text they stand for in the end."""

import re
from typing import Any

_MOST = 10**6  # characters that a configuration may stand for; recorded ones have some thousands
# the innermost of what is looked up: ${a.b}, ${..b}, ${oc.select:a.b,default}
_LOOK_UP = re.compile(r"\$\{(?:oc\.select:)?([^${}:,]*)[^${}]*\}")
_FOUND = "\0"  # in place of an inner one, ${a.${b}.c}


def check_size(node: Any) -> None:
    """Refuse settings whose look-ups of look-ups would stand for more than fits into memory.

    Args:
        node: plain values, with look-ups as they are written.

    Raises:
        ValueError: in that case.
    """
    try:
        _Sizes(node).of(())
    except RecursionError:
        raise ValueError("it looks up what looks up others, thousands of times") from None


class _Sizes:
    """The characters that each part of settings stands for, each counted once."""

    def __init__(self, root: Any):
        self.root = root
        self.known: dict[tuple[str, ...], int | None] = {}  # None: it is being counted

    def of(self, path: tuple[str, ...]) -> int:
        """Return the characters of a part of the settings; 0 of what does not exist."""
        if path not in self.known:
            self.known[path] = None
            size = self.known[path] = self._count(self._at(path), path)
            if size > _MOST:
                raise ValueError(
                    f"{'.'.join(path)} looks up what looks up others, and would stand for more than"
                    f" {_MOST:,} characters"
                )
        return self.known[path] or 0  # omegaconf refuses what looks itself up

    def _at(self, path: tuple[str, ...]) -> Any:
        node = self.root
        for key in path:
            node = {str(each): value for each, value in _entries(node)}.get(key)
        return node

    def _count(self, node: Any, path: tuple[str, ...]) -> int:
        if isinstance(node, dict | list):
            return sum(self.of((*path, str(key))) for key, _ in _entries(node))
        size, text = len(str(node)), str(node)
        while (found := _LOOK_UP.search(text)) is not None:
            size += self._looked_up(found[1].strip(), path)
            text = text[: found.start()] + _FOUND + text[found.end() :]
        return size

    def _looked_up(self, name: str, path: tuple[str, ...]) -> int:
        """Return the characters of a name in a value at a path; dots in front lead upwards.

        A name that is looked up itself may be that of any part of what is above it.
        """
        known, inner, _ = name.partition(_FOUND)
        above = len(known) - len(known.lstrip("."))
        base = path[: len(path) - above] if above else ()
        target = (*base, *re.findall(r"[^.\[\]]+", known))
        if inner:
            target = target if known.endswith((".", "[")) else target[:-1]
            if self.known.get(target, ...) is None:
                raise ValueError(f"{'.'.join(path)} looks up a name in what it is in itself")
        return self.of(target)


def _entries(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, list) else []
