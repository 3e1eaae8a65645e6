"""`facts_of`: what the rows of a call may depend on, and the conditions that tell calls apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fdtensor.ops.graph import Full
from fdtensor.testing.discovery.view import View

__all__ = ["alike", "conditions_of", "groups", "guard"]


def facts_of(views: Sequence[View], numbers: bool = False) -> dict[str, list[Any]]:
    """The facts that rows may depend on: numbers of dims, flags, dims that are given, by case.

    With `numbers`, also all other arguments that have a text.
    """
    texts: dict[str, None] = {}
    for name in dict.fromkeys(name for v in views for name in v.args):
        values = [v.args.get(name) for v in views]
        lists = [isinstance(x, tuple) and any(isinstance(t, Full) for t in x) for x in values]
        if any(isinstance(x, Full) for x in values):
            texts[f"{name} is None" if None in values else f"{name}.ndim"] = None
        elif all(lists):
            texts |= {f"len({name})": None, f"{name}[0].ndim": None}
        elif not any(lists) and all(map(_plain, values)):
            flags = all(isinstance(x, (bool, str, type(None))) for x in values)
            if numbers or flags or "dim" in name or "axis" in name:
                listed = all(isinstance(x, tuple) for x in values)  # a default is a list
                texts[f"tuple({name})" if listed else name] = None
    return {text: [v.value(text) for v in views] for text in texts}


def _plain(value: Any) -> bool:
    """Whether the repr of an argument says what it is."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    finite = not isinstance(value, float) or math.isfinite(value)
    return finite and isinstance(value, (bool, str, int, float, type(None)))


def equal(facts: Mapping[str, Any], negated: bool = False) -> str:
    """The condition that facts have these values."""
    ((first, value), *rest) = facts.items()
    if not rest and isinstance(value, bool):
        return first if value != negated else f"not {first}"
    sign = "!=" if negated else "=="
    return f"{_tuple(facts)} {sign} {_tuple(map(repr, facts.values()))}"


def guard(views: Sequence[View]) -> Iterator[str]:
    """A return where a call differs from all samples in what they have in common."""
    fixed = {t: known[0] for t, known in facts_of(views).items() if alike(known)}
    if fixed:
        yield f"if {equal(fixed, negated=True)}:"
        yield "    return"


def conditions_of(views: Sequence[View]) -> tuple[str, ...]:
    """The conditions, one for each case, that tell it from cases with other facts."""
    varied = {t: known for t, known in facts_of(views, True).items() if not alike(known)}
    return tuple(
        equal({t: known[i] for t, known in varied.items()}) if varied else ""
        for i in range(len(views))
    )


def groups(views: Sequence[View]) -> dict[str, list[int]]:
    """The cases by their flags, since rows seldom depend on those as on a number."""
    facts = facts_of(views)
    flags = [k for k in facts.values() if any(isinstance(x, (bool, str, type(None))) for x in k)]
    by_flags: dict[Any, list[int]] = {}
    for i in range(len(views)):
        by_flags.setdefault(repr([known[i] for known in flags]), []).append(i)
    groups: dict[str, list[int]] = {}
    for members in by_flags.values():
        common = {
            t: known[members[0]]
            for t, known in facts.items()
            if not alike(known) and alike([known[i] for i in members])
        }
        groups[equal(common) if common else ""] = members
    return groups


def alike(values: Sequence[Any]) -> bool:
    """Whether all are the same, as text: 1 and True differ."""
    return len(set(map(repr, values))) == 1


def _tuple(texts: Any) -> str:
    listed = list(texts)
    return listed[0] if len(listed) == 1 else f"({', '.join(listed)})"
