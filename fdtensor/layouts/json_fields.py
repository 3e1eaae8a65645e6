"""JSON text from outside as plain values, each of the kind that is expected where it stands.

`parsed` bounds what a text may cost, `record`, `items`, `whole`, `real` and `word` take its parts.
All raise `Malformed`, which says in a few words what is wrong, and where.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import NoReturn

from fdtensor.layouts.kinds import is_dict, is_list

__all__ = [
    "MOST_CHARACTERS",
    "Malformed",
    "items",
    "parsed",
    "real",
    "record",
    "shown",
    "whole",
    "word",
]

MOST_CHARACTERS = 1 << 25
"""Longer texts are not read: parsed, a text takes up to 20 times as many bytes."""


class Malformed(Exception):
    """A text that has something else than what belongs in its place."""


def parsed(text: object) -> object:
    """The values of a JSON text; no key may come twice, and no number be infinite or no number."""
    if not isinstance(text, str):
        raise Malformed(f"it is {_shown(text)}, not a str")
    if len(text) > MOST_CHARACTERS:
        raise Malformed(f"it has {len(text)} characters, and {MOST_CHARACTERS} are the most")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise Malformed("it is nested too deep") from None
    except ValueError as error:
        raise Malformed(f"it is no JSON: {error}") from error


def shown(text: object) -> str:
    """The beginning of a text that could not be read, for a message; empty for no text."""
    return repr(text[:60]) + "..." * (len(text) > 60) if isinstance(text, str) else ""


def record(value: object, where: str, *names: str) -> list[object]:
    """The values of an object that has just these keys, in the order that is asked for."""
    if not is_dict(value):
        raise Malformed(f"{where} is {_shown(value)}, not an object")
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown key, {_shown(unknown[0])}"
        raise Malformed(f"{where} {what}")
    return [value[name] for name in names]


def items(value: object, where: str) -> list[object]:
    """The entries of a list."""
    return value if is_list(value) else _refuse(value, where, "a list")


def whole(value: object, where: str) -> int:
    """An int, which a bool is not."""
    return value if type(value) is int else _refuse(value, where, "an int")


def real(value: object, where: str) -> float:
    """A finite number."""
    if type(value) is float and isfinite(value):
        return value
    if type(value) is int and abs(value) < 1 << 53:
        return float(value)
    return _refuse(value, where, "a finite number")


def word(value: object, where: str) -> str:
    """A str that can be printed."""
    if isinstance(value, str) and value.isprintable():
        return value
    return _refuse(value, where, "a printable text")


def _refuse(value: object, where: str, what: str) -> NoReturn:
    raise Malformed(f"{where} is {_shown(value)}, not {what}")


def _shown(value: object) -> str:
    """A value as a message shows it."""
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case int() if not isinstance(value, bool) and abs(value) >= 1 << 64:
            return "a huge int"
        case _:
            text = repr(value)
            return text if len(text) <= 40 else f"{text[:40]}..."


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
