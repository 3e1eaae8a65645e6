"""`fixed` and `loop`: the rows of a family, as lines that yield them in several cases at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.testing.discovery.facts import alike
from fdtensor.testing.discovery.search import Found
from fdtensor.testing.discovery.trial import size_cut
from fdtensor.testing.discovery.view import View

__all__ = ["Wanted", "fixed", "indented", "line_of", "loop", "operands_of"]

Wanted = Sequence[dict[tuple[int, ...], Found]]
"""The rows of a family in each case, by their dims."""


def fixed(marks: Any, views: Sequence[View], wanted: Wanted) -> list[str]:
    """A line for each row, with dims counted from the front or the end of an operand."""
    called = dict.fromkeys(_operand(name) for name, _ in marks[0])
    ndims = {t: [v.value(f"{t}.ndim") for v in views] for t in called}
    ndims = {t: known for t, known in ndims.items() if not alike(known)}
    lines = []
    covered: list[set[tuple[int, ...]]] = [set() for _ in views]
    for dims in wanted[0]:
        ways = [
            [str(d), *(f"{t}.ndim - {known[0] - d}" for t, known in ndims.items())] for d in dims
        ]
        for texts in itertools.product(*ways):
            values = [tuple(v.value(t) for t in texts) for v in views]
            if all(s in rows for s, rows in zip(values, wanted, strict=True)):
                lines.append(line_of(marks, texts, wanted))
                for known, s in zip(covered, values, strict=True):
                    known.add(s)
                break
        else:
            return []
    return lines if all(c == set(rows) for c, rows in zip(covered, wanted, strict=True)) else []


def loop(marks: Any, views: Sequence[View], wanted: Wanted) -> list[str]:
    """The rows as a loop over the dims of an operand that is cut."""
    slots = _slots(marks)
    operands = [_operand(n) if n not in ("*",) and not n.isdigit() else "" for n in slots]
    for at, ref in enumerate(operands):
        if not ref:
            continue
        by_ref = [{dims[at]: dims for dims in rows} for rows in wanted]
        if any(len(dims_of) != len(rows) for dims_of, rows in zip(by_ref, wanted, strict=True)):
            continue
        forms = []
        for i, operand in enumerate(operands):
            good = _first(_forms(views, ref, operand), views, by_ref, i)
            if good is not None:
                forms.append(good)
        if len(forms) < len(slots):
            continue
        for span, kept in _heads(views, ref):
            if all(
                _says(v, dims_of, marks, forms, span, kept)
                for v, dims_of in zip(views, by_ref, strict=True)
            ):
                line = line_of(marks, forms, wanted).split("\n")
                inner = [f"if {kept}:", *indented(line)] if kept else line
                return [f"for d in {span}:", *indented(inner)]
    return []


def _first(
    forms: Iterator[str],
    views: Sequence[View],
    by_ref: Sequence[dict[int, tuple[int, ...]]],
    i: int,
) -> str | None:
    """The first form that gives dim `i` of every row."""
    for form in forms:
        try:
            if all(
                v.value(form, d) == dims[i]
                for v, dims_of in zip(views, by_ref, strict=True)
                for d, dims in dims_of.items()
            ):
                return form
        except (ZeroDivisionError, TypeError, AttributeError):
            continue
    return None


def _says(
    view: View,
    dims_of: dict[int, tuple[int, ...]],
    marks: Any,
    forms: Sequence[str],
    span: str,
    kept: str,
) -> bool:
    """Whether a loop gives the rows of a case, and others only for dims of size 1."""
    try:
        values = [d for d in view.value(span) if not kept or view.value(kept, d)]
    except (ZeroDivisionError, TypeError, AttributeError):
        return False
    if not set(dims_of) <= set(values):
        return False
    for d in set(values) - set(dims_of):
        dims = iter([view.value(form, d) for form in forms])
        cuts = {_operand(n): next(dims) for n, kind in marks[0] if kind == "S"}
        if any(k < 0 for k in cuts.values()):
            return False
        placed = [Shard(cuts[n]) if n in cuts else Replicate() for n in view.operands]
        if size_cut(placed, view.sample.ins) is not None:
            return False
    return True


def _heads(views: Sequence[View], operand: str) -> Iterator[tuple[str, str]]:
    """The ranges of a loop, and what it may leave out."""
    ndim = f"{operand}.ndim"
    spans = [f"{a}, {ndim}" if a else ndim for a in (0, 1, 2)]
    spans += [f"{a}, {ndim} - {b}" if a else f"{ndim} - {b}" for b in (1, 2) for a in (0, 1)]
    numbers = [n for n, value in views[0].args.items() if type(value) is int]
    several = [
        n
        for n in views[0].args
        if all(isinstance(v.args[n], tuple) for v in views)
        and all(type(k) is int for v in views for k in v.args[n])
    ]
    for span in spans:
        yield f"range({span})", ""
        yield from ((f"range({span})", f"d != {n} % {ndim}") for n in numbers)
        yield from ((f"range({span})", f"d not in [k % {ndim} for k in {n}]") for n in several)
    yield from ((f"[{n} % {ndim}]", "") for n in numbers)
    yield from ((f"[k % {ndim} for k in {n}]", "") for n in several)
    yield from ((f"range({ndim} - len({n}))", "") for n in several)


def _forms(views: Sequence[View], ref: str, operand: str) -> Iterator[str]:
    """The possible dims of a slot where `ref` is cut along `d`."""
    yield "d"
    if operand:
        yield f"d - {ref}.ndim + {operand}.ndim"
    yield from (f"d {'+' if k > 0 else '-'} {abs(k)}" for k in (-1, 1, -2, 2))
    for name, value in views[0].args.items():
        if type(value) is int:
            yield f"d - (d > {name} % {ref}.ndim)"
            yield f"d + (d >= {name} % ({ref}.ndim + 1))"
        elif isinstance(value, tuple) and all(type(k) is int for k in value):
            yield f"d - sum(d > k % {ref}.ndim for k in {name})"


def line_of(marks: Any, dims: Sequence[str], wanted: Wanted) -> str:
    """The line, or lines, that yield a row."""
    texts = iter(dims)
    cut: list[tuple[str, str]] = []

    def placed(name: str, kind: str) -> str:
        text = kind
        if kind == "S":
            dim = next(texts)
            text = f"S({dim})"
            if not name.isdigit() and name != "*":
                cut.append((_operand(name), dim))
        return f"*[{text}] * len({name[1:]})" if name[:1] == "*" and name != "*" else text

    before = [placed(*mark) for mark in marks[0]]
    after = [placed(*mark) for mark in marks[1]]
    ins = f"({', '.join(before)}{',' if len(before) == 1 else ''})"
    outs = after[0] if len(after) == 1 else f"({', '.join(after)})"
    if marks[1][0][0] == "*":
        count = {len(f.row.outs) for rows in wanted for f in rows.values()}
        outs = f"({after[0]},) * {min(count)}"
    members = [f for rows in wanted for f in rows.values()]
    line = f"yield {ins}, {outs}"
    if any(f.refuses_empty for f in members):
        line += "  # not on empty blocks"
    sizes = [f"{name}.shape[{dim}]" for name, dim in cut]
    shape, number = marks[2]
    if cut and shape:
        at = [name for name, kind in marks[1] if kind == "S"].index(number)
        sizes.append(f"{shape}[{dims[len(cut) + at]}]")
    elif len(cut) < 2 or not any(f.stretches for f in members):
        return line
    return f"if {' == '.join(sizes)}:\n    {line}"


def operands_of(marks: Any) -> set[str]:
    """The operands that a family is of, and the first of each list."""
    return {_operand(name) for name, _ in marks[0]}


def _slots(marks: Any) -> list[str]:
    """The operands that are cut, then the outputs."""
    return [name for name, kind in (*marks[0], *marks[1]) if kind == "S"]


def _operand(name: str) -> str:
    """An operand, or the first one of a list, as an expression."""
    return f"{name[1:]}[0]" if name.startswith("*") else name


def indented(lines: Sequence[str]) -> list[str]:
    """The lines under a line that opens a block."""
    return [f"    {line}" for text in lines for line in text.split("\n")]
