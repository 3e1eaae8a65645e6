"""`told_apart`: what tells two programs apart, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from fdtensor.inspect.explanation.tables import columns, counted, microseconds
from fdtensor.ops.graph import Call, Graph, Var
from fdtensor.plans.collectives import is_local
from fdtensor.plans.text import bytes_text
from fdtensor.plans.traffic import most_received
from fdtensor.programs.program import Program, op_name

__all__ = ["told_apart"]

MOST = 12
"""How many moves of a program, and how many values, are told."""


def told_apart(first: Program, second: Program) -> str:
    """The figures of two programs side by side, then what only one has."""
    if first == second:
        return f"{first.name} on {first.mesh!r}: equal programs"
    rows = [("", "first", "second"), *_figures(first, second)]
    lines = columns(rows, "<>>", indent=0)
    for word, a, b in (("in", first.inputs, second.inputs), ("out", first.outs, second.outs)):
        lines += _types(word, first, second, a, b)
    both = _moves(first) & _moves(second)
    for name, program in (("first", first), ("second", second)):
        lines += _only(name, _moves(program) - both)
    return "\n".join([*lines, *_values(first, second)])


def _figures(first: Program, second: Program) -> Iterator[tuple[str, str, str]]:
    def both(name: str, text: Any) -> tuple[str, str, str]:
        return name, text(first), text(second)

    yield both("name", lambda p: p.name)
    if first.mesh is not second.mesh:
        yield both("mesh", lambda p: repr(p.mesh))
    yield both("lines", lambda p: str(len(p.eqns)))
    yield both("collectives", lambda p: str(len(p.collectives)))
    yield both("received per rank", lambda p: bytes_text(p.received_bytes))
    yield both("peak", lambda p: bytes_text(p.peak_bytes))
    yield both("moves take", lambda p: microseconds(p.seconds))
    if first.cost is not second.cost:
        yield both("priced for", lambda p: p.cost.name)


def _types(
    word: str, first: Program, second: Program, a: Sequence[Var], b: Sequence[Var]
) -> list[str]:
    """The inputs or outputs whose types differ."""
    rows = []
    for i in range(max(len(a), len(b))):
        mine = _typed(first, a[i]) if i < len(a) else "-"
        other = _typed(second, b[i]) if i < len(b) else "-"
        if mine.partition(":")[2] != other.partition(":")[2]:
            rows.append((f"{word} {i}", mine, other))
    return _listed(f"other types of {word}puts", rows, "<<<")


def _typed(program: Program, v: Var) -> str:
    return f"{v}:{program.type_of(v)}"


def _moves(program: Program) -> Counter[tuple[str, str, int]]:
    return Counter(
        (str(s.collective), f"{s.src} -> {s.dst}", most_received((s,)))
        for s in program.steps
        if not is_local(s)
    )


def _only(name: str, moves: Counter[tuple[str, str, int]]) -> list[str]:
    """The moves of one program that the other lacks, those with most bytes first."""
    most = sorted(moves.items(), key=lambda item: -item[0][2] * item[1])
    rows = [
        (f"{count} x", step, types, bytes_text(moved * count))
        for (step, types, moved), count in most
    ]
    return _listed(f"only in {name}: {counted(moves.total(), 'move')}", rows, "><<>")


def _values(first: Program, second: Program) -> list[str]:
    """The values that both functions make, in other layouts."""
    if first.origin is None or second.origin is None:
        return []
    rows = []
    for call, other in _paired(first.origin.graph, second.origin.graph):
        for v, w in zip(call.outs, other.outs, strict=True):
            if v is not None and w is not None:
                a, b = first.origin.values[v], second.origin.values[w]
                if first.type_of(a).layout is not second.type_of(b).layout:
                    rows.append((op_name(call.op), _typed(first, a), _typed(second, b)))
    return _listed(f"{counted(len(rows), 'value')} made in another layout", rows, "<<<")


def _paired(first: Graph, second: Graph) -> Iterator[tuple[Call, Call]]:
    """The calls of two graphs that do the same, in order."""
    a, b = ([_key(graph, call) for call in graph.calls] for graph in (first, second))
    if a == b:
        yield from zip(first.calls, second.calls, strict=True)
        return
    for i, j, n in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from zip(first.calls[i : i + n], second.calls[j : j + n], strict=True)


def _key(graph: Graph, call: Call) -> Any:
    types = tuple(graph.types[v.index] for v in call.ins)
    return call.op, types, tuple(v is not None for v in call.outs)


def _listed(title: str, rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """A title with the first of the rows below it; nothing without rows."""
    if not rows:
        return []
    lines = ["", title, *columns(rows[:MOST], align)]
    if len(rows) > MOST:
        lines.append(f"  {len(rows) - MOST} more")
    return lines
