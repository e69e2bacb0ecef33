"""Types of settings: the allowed values, for people and for programs.

A setting is a parameter of a function or class, so its type is that parameter's annotation. Ranges
stand in it as :class:`Limits`, or as pydantic's ``Field``, which has them by the same names;
choices as ``Literal``.
"""

import difflib
import inspect
import json
import operator
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)


@dataclass(frozen=True)
class Limits:
    """Limits of the values of a type, in its annotation."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_length: int | None = None
    pattern: str | None = None


class Called(NamedTuple):
    """Description of a type's values, in its annotation: "a rate such as 100mbit"."""

    words: str


Count = Annotated[int, Limits(ge=1)]
Whole = Annotated[int, Limits(ge=0)]
Depth = Annotated[int, Limits(ge=1, le=1000)]  # layers, or steps of an iteration
Pixels = Annotated[int, Limits(ge=1, le=2**14)]  # of a picture's side; a larger one is no use
Positive = Annotated[float, Limits(gt=0)]
NotNegative = Annotated[float, Limits(ge=0)]
Share = Annotated[float, Limits(ge=0, le=1)]
PositiveShare = Annotated[float, Limits(gt=0, le=1)]
Probability = Annotated[float, Limits(ge=0, lt=1)]
Betas = Annotated[
    tuple[Probability, Probability], Called("two numbers, [B1, B2], each at least 0 and below 1")
]
Name = Annotated[str, Limits(pattern=r"\S")]
Folder = Annotated[str, Limits(pattern=r"^(?!\w+://|\s*$)"), Called("a folder of this machine")]

_LARGEST = 3.4028234663852886e38  # of float32
_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "null",
}
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is one of a type; true for a type without constraints.

    A list may stand for a tuple and a whole number for a float, but nothing is converted: True is
    no number, 1 is not true, "4" is not 4, and NaN and what neither int64 nor float32 holds are no
    numbers.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return accepts(arguments[0], value) and all(_within(value, of) for of in _limits(hint))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(accepts(part, value) for part in arguments)
    if origin is Callable:
        return callable(value)
    if origin is dict:
        key, item = arguments
        return isinstance(value, Mapping) and all(
            accepts(key, k) and accepts(item, v) for k, v in value.items()
        )
    if origin in (list, tuple, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False
        if origin is not tuple or ... in arguments:
            return all(accepts(arguments[0], item) for item in value)
        return len(value) == len(arguments) and all(map(accepts, arguments, value))
    if hint in (int, float) and isinstance(value, Integral):
        return not isinstance(value, bool) and abs(int(value)) < 2**63
    if hint is float:
        return isinstance(value, Real) and abs(float(value)) <= _LARGEST
    return isinstance(value, hint) if hint in _NOUNS else True


def describe(hint: Any) -> str:
    """Say which values a type has: "a whole number, at least 1, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = _limits(hint)
        for limit in limits:
            if isinstance(limit, Called):
                return limit.words
        return ", ".join(filter(None, (describe(arguments[0]), " and ".join(map(_limit, limits)))))
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


def refusal(value: Any, hint: Any) -> str | None:
    """Return the fault of a value and the advice, to stand behind its name; or None."""
    if accepts(hint, value):
        return None
    known = choices(hint)
    guess = did_you_mean(value, known) if isinstance(value, str) else ""
    wrong = "unknown" if isinstance(value, str) and known else "not possible"
    return f"is {wrong}{guess}: {advice(hint)}{_beyond(value)}"


def _beyond(value: Any) -> str:
    """Return the limits of all numbers, for one beyond them."""
    if not isinstance(value, Real) or not abs(float(value)) >= 2**63:
        return ""
    return f" (whole numbers below 2^63, others up to {_LARGEST:.2g})"


def advice(hint: Any) -> str:
    """Return the advice for a value of a type: "give a whole number, at least 1"."""
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


def _limits(hint: Any) -> list[Any]:
    """Return the constraints of an annotated type; pydantic's ``Field`` has several."""
    return [part for said in hint.__metadata__ for part in getattr(said, "metadata", [said])]


def _within(value: Any, limit: Any) -> bool:
    """Whether a value is inside a limit; true for other annotations."""
    holds = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    bounds = ((holds[name], getattr(limit, name, None)) for name in holds)
    shortest, pattern = (getattr(limit, name, None) for name in ("min_length", "pattern"))
    return (
        all(at is None or compare(value, at) for compare, at in bounds)
        and (shortest is None or len(value) >= shortest)
        and (pattern is None or re.search(pattern, value) is not None)
    )


def _limit(limit: Any) -> str:
    """Return the words of a limit; empty for other annotations."""
    bounds = {words: getattr(limit, name, None) for name, words in _LIMITS.items()}
    return " and ".join(f"{words} {at}" for words, at in bounds.items() if at is not None)


def _either(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


@cache
def signature(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # it is written in C, or no function
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


@cache
def hints(target: Any) -> dict[str, Any]:
    """Return the annotations of a class's or function's parameters."""
    try:
        function = target.__init__ if isinstance(target, type) else target
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # names that only a type checker knows
        return {}


@cache
def parameters(target: Any) -> dict[str, Any]:
    """Return the types of a class's or function's parameters by name, ``Any`` where it has none.

    Of keyword arguments, ``**name: Unpack[...]``, it has those that the TypedDict's Args describe.
    """
    known = hints(target)
    named = {
        name: known.get(name, Any) if parameter.default is not None else known.get(name, Any) | None
        for name, parameter in signature(target).items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for options in _options(target):
        said, every = sentences(options), get_type_hints(options, include_extras=True)
        named |= {key: hint for key, hint in every.items() if key in said}
    return named


def sentences(target: Any) -> dict[str, str]:
    """Return the sentence about each parameter in the Args of a docstring."""
    _, _, text = inspect.cleandoc(target.__doc__ or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    for options in _options(target):
        found |= sentences(options)
    section = re.split(r"\n(?=\S)", text)[0]
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(section).strip()):
        names, _, sentence = entry.partition(": ")
        found |= {name: " ".join(sentence.split()) for name in names.split(", ")}
    return found


def _options(target: Any) -> list[Any]:
    """Return the TypedDict of a class's or function's keyword arguments, if there is one."""
    return [get_args(hint)[0] for hint in hints(target).values() if get_origin(hint) is Unpack]


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """Return the most similar of the known words as a question in parentheses, or nothing."""
    close = difflib.get_close_matches(word, sorted(map(str, known)), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
