"""Types of settings: each says which values a setting may have, to people and to programs.

A setting is a parameter of a function or class, so its type is that parameter's annotation. Ranges
stand in it as :class:`Limits`, or as pydantic's ``Field``, choices as ``Literal``.
"""

import difflib
import json
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin


@dataclass(frozen=True)
class Limits:
    """Limits of the values of a type, in its annotation, by the names that pydantic gives them."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Answer pydantic, which asks this when it checks values; the library does without it."""
        from pydantic import Field

        return handler(Annotated[source, Field(**vars(self))])


class Called(NamedTuple):
    """What people call the values of a type, in its annotation: "a rate such as 100mbit"."""

    words: str


Count = Annotated[int, Limits(ge=1)]
Whole = Annotated[int, Limits(ge=0)]
Positive = Annotated[float, Limits(gt=0)]
NotNegative = Annotated[float, Limits(ge=0)]
Share = Annotated[float, Limits(ge=0, le=1)]
PositiveShare = Annotated[float, Limits(gt=0, le=1)]
Probability = Annotated[float, Limits(ge=0, lt=1)]
Betas = Annotated[
    tuple[Probability, Probability], Called("two numbers, [B1, B2], each at least 0 and below 1")
]
Name = Annotated[str, Limits(min_length=1)]
Folder = Annotated[str, Limits(min_length=1), Called("a folder")]

_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "null",
}
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value, as YAML has it, is one of a type; true for a type that says nothing.

    A list may stand for a tuple and a whole number for a float, but nothing is converted: True is
    no number, 1 is not true, "4" is not 4, and NaN and infinity are no numbers.
    """
    adapter = _adapter(hint)
    if adapter is None:
        return True
    from pydantic import ValidationError

    if isinstance(value, bool) and choices(hint):
        return any(value is choice for choice in choices(hint))  # True == 1
    try:
        adapter.validate_json(json.dumps(value, default=str))
    except ValidationError:
        return False
    return True


def describe(hint: Any) -> str:
    """Say which values a type has: "a whole number, at least 1, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, *limits = arguments
        limits = [part for limit in limits for part in getattr(limit, "metadata", [limit])]
        for limit in limits:
            if isinstance(limit, Called):
                return limit.words
        return ", ".join(filter(None, (describe(kind), " and ".join(map(_limit, limits)))))
    if origin is Literal:
        return _either([show(choice) for choice in arguments])
    if origin in (Union, types.UnionType):
        if get_origin(arguments[0]) is Literal:  # the choices go on
            return _either([*map(show, get_args(arguments[0])), *map(describe, arguments[1:])])
        *nouns, last = map(describe, arguments)
        return f"{', '.join(nouns)}{',' if ',' in nouns[-1] else ''} or {last}"
    if origin is tuple and ... not in arguments:
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    if origin in (list, tuple, Sequence):
        return f"a list, [A, B, ...], each {describe(arguments[0])}"
    return _NOUNS.get(hint, f"a value of type {getattr(hint, '__name__', hint)}")


def advice(hint: Any) -> str:
    """Say what to type for a value of a type: "give a whole number, at least 1"."""
    verb = "choose" if choices(hint) else "type" if hint is bool else "give"
    return f"{verb} {describe(hint)}"


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a type lists, None among them if null is allowed, or nothing."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        parts = [(None,) if part is types.NoneType else choices(part) for part in get_args(hint)]
        return tuple(choice for part in parts for choice in part) if all(parts) else ()
    return ()


def show(value: Any) -> str:
    """Write a value as it is typed."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    return str(value)


@cache
def _adapter(hint: Any) -> Any:
    """Return what pydantic makes of a type; None: it knows nothing of values that YAML has."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
    except PydanticUserError:
        return None


def _limit(limit: Any) -> str:
    """Return the words of a limit; nothing for what is none."""
    bounds = {words: getattr(limit, name, None) for name, words in _LIMITS.items()}
    return " and ".join(f"{words} {at}" for words, at in bounds.items() if at is not None)


def _either(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """Return the most similar of the known words as a question in parentheses, or nothing."""
    close = difflib.get_close_matches(word, sorted(map(str, known)), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
