"""`shown`, `near` and `first_sentence`: parts of sentences, from values and from other errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["a_kind", "first_sentence", "near", "shown"]


def a_kind(value: object) -> str:
    """The kind of a value with its article: `an int`, `a Layout`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def near(name: object, names: Iterable[object]) -> str:
    """A question for the name that was meant, perhaps; empty where none is near."""
    close = get_close_matches(str(name), list(map(str, names)), n=1, cutoff=0.7)
    return f"Did you mean {close[0]!r}? " if close else ""


def shown(value: object) -> str:
    """A value as a sentence shows it, on one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:120]}..."


def first_sentence(error: BaseException) -> str:
    """The first sentence of what an error says, without the mark at its end."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = line.removesuffix(", but expected one of:")
    return re.split(r"[.?!] +(?=[A-Z])", line)[0].rstrip(".?! ")
