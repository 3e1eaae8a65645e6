"""`source`: the rows that were found as a rule in Python, said for all samples at once if possible.

Rows that differ in their dims only are one family. A family is written as a loop over the dims of
an operand, or with dims counted from the front or the end, where that says exactly its rows of
every case; otherwise case by case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fdtensor.layouts.torch_private import OpOverload
from fdtensor.testing.discovery.facts import alike, conditions_of, groups, guard
from fdtensor.testing.discovery.family import Wanted, fixed, indented, line_of, loop, operands_of
from fdtensor.testing.discovery.view import View, parameters, shown_text, signature, view_of

__all__ = ["source"]


def source(op: Any, cases: Sequence[Any]) -> str:
    """The module text of the rule of an op for cases of samples."""
    if not any(case.found for case in cases):
        return f"# no rows of {_name(op)} but that of all R"
    views = [view_of(op, case) for case in cases]
    body = "\n".join(indented(_lines(views)))
    names = [n for n in ("P", "R", "S") if re.search(rf"\b{n}\b", body)]
    head = [
        "import torch",
        "",
        f"from fdtensor.ops.rules import {', '.join([*names, 'rule'])}",
        "",
        "",
    ]
    if "Partial(" in body:
        head.insert(2, "from fdtensor.layouts.placement import Partial")
    if not isinstance(op, OpOverload):
        head.append("# a plain function has no rule: make it an op with torch.library.custom_op")
    first = cases[0].samples[0]
    head.append(f"@rule({_name(op)}{_options(cases)})")
    head.append(f"def rows({signature(op, first)}):")
    shown = list(dict.fromkeys(shown_text(s) for case in cases for s in case.samples))
    return "\n".join([*head, f'    """The rows that hold on {_wrapped(shown)}"""', body])


def _lines(views: Sequence[View]) -> list[str]:
    """The body of the generator of rows."""
    lines = list(guard(views))
    under: dict[str, list[str]] = {"": []}
    for marks in dict.fromkeys(m for v in views for m in v.families):
        for condition, inner in _blocks(marks, views):
            under.setdefault(condition, []).extend(inner)
    lines += under.pop("")
    for condition, inner in under.items():
        lines += [f"if {condition}:", *indented(inner)]
    return lines


def _options(cases: Sequence[Any]) -> str:
    """The options of the rule, besides the op."""
    rows = [f for case in cases for f in case.found]
    options = ""
    resized = {f.attempt.resized[0] for f in rows if f.attempt.resized}
    if resized:
        first = cases[0].samples[0]
        names = parameters(first.call.op, first)
        sizes = {names[place] if isinstance(place, int) else place: n for place, n in resized}
        options += ", sizes={" + ", ".join(f'"{k}": {n}' for k, n in sizes.items()) + "}"
    return options + ", contiguous=True" * any(f.row.contiguous for f in rows)


Block = tuple[str, list[str]]
"""A condition, or none, and the lines under it."""


def _blocks(marks: Any, views: Sequence[View]) -> list[Block]:
    """The source that yields the rows of a family."""
    wanted = [v.families.get(marks, {}) for v in views]
    alternatives = groups(views)
    lines_of = {
        equal: _general(marks, [views[i] for i in members], [wanted[i] for i in members])
        for equal, members in alternatives.items()
    }
    if all(lines_of.values()) and alike(list(lines_of.values())):
        return [("", next(iter(lines_of.values())) or [])]
    blocks: list[Block] = []
    for equal, members in alternatives.items():
        lines = lines_of[equal]
        if lines:
            blocks.append((equal, lines))
            continue
        conditions = conditions_of(views)
        for i in members:
            inner = [
                line_of(marks, list(map(str, dims)), [{dims: f}]) for dims, f in wanted[i].items()
            ]
            blocks.append((conditions[i], inner))
    return [(condition, lines) for condition, lines in blocks if lines]


def _general(marks: Any, views: Sequence[View], wanted: Wanted) -> list[str] | None:
    """The lines that yield the rows of a family in all these cases, if there are such."""
    if not any(dims for rows in wanted for dims in rows):
        return [line_of(marks, [], wanted)] if all(() in rows for rows in wanted) else None
    if not all(operands_of(marks) <= set(v.operands) for v in views):
        return None
    ways = [fixed, loop] if alike([len(rows) for rows in wanted]) else [loop, fixed]
    return ways[0](marks, views, wanted) or ways[1](marks, views, wanted) or None


def _wrapped(samples: Sequence[str]) -> str:
    """The samples in the docstring, a line each where there are several."""
    if len(samples) == 1:
        return f"{samples[0]}."
    return "these samples.\n\n" + "".join(f"    {s}\n" for s in samples) + "    "


def _name(op: Any) -> str:
    """An op as source."""
    is_op = isinstance(op, OpOverload)
    return f"torch.ops.{op}" if is_op else getattr(op, "__name__", repr(op))
