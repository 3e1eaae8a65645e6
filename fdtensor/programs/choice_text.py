"""Choices as JSON: what is kept of them on disk, and their reading for a graph.

    {"axes": {"x": {"ins": ["S(0)"], "outs": ["R"], "options": [[["S(0)"], ["R"], null]],
     "calls": [0]}}, "nested": null}

An option has operands, results and, of a decomposition, the blocks, the depth and the seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fdtensor.layouts.json_fields import Malformed, items, real, record, whole, word
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement, Ragged, Spans, parse_placement
from fdtensor.ops.graph import Full, Graph, Var
from fdtensor.programs.choices import Body, Choice, Choices, Nesting
from fdtensor.programs.nested import Nested, layout_at
from fdtensor.programs.nodes import Option

__all__ = ["decode", "encode"]


def encode(choices: Choices) -> dict[str, object]:
    """Choices as plain values."""
    nested = choices.nested
    return {
        "axes": {axis: _encoded_choice(choice) for axis, choice in choices.items()},
        "nested": nested
        and {
            "ins": [_encoded_places(p) for p in nested.ins],
            "calls": [list(order) for order in nested.calls],
            "outs": [_encoded_places(p) for p in nested.outs],
        },
    }


def _encoded_choice(choice: Choice) -> dict[str, object]:
    """A choice along one axis; options that many calls take are written once."""
    numbers: dict[str, int] = {}
    calls: list[int] = []
    for option in choice.calls:
        note = option.note
        body = [note.blocks, note.depth, option.seconds] if isinstance(note, Body) else None
        sides = [list(map(str, side)) for side in option.key]
        calls.append(numbers.setdefault(json.dumps([*sides, body]), len(numbers)))
    ends = {"ins": list(map(str, choice.ins)), "outs": list(map(str, choice.outs))}
    return {**ends, "options": [json.loads(text) for text in numbers], "calls": calls}


def _encoded_places(places: Sequence[Any]) -> list[object]:
    order = [[d, list(axes)] for d, axes in places.order] if isinstance(places, Nested) else None
    return [list(map(str, places)), order]


def decode(tree: object, graph: Graph, mesh: Mesh) -> Choices:
    """The choices that a text has for a graph; raises `Malformed` where they do not fit.

    Whether a call has the option that is chosen for it is left to see.
    """
    axes, nested = record(tree, "the choice", "axes", "nested")
    along = record(axes, "axes", *mesh.axes)
    choices = {
        axis: _choice(choice, graph, axis) for axis, choice in zip(mesh.axes, along, strict=True)
    }
    for side in [c.ins for c in choices.values()], [c.outs for c in choices.values()]:
        for places in zip(*side, strict=True):
            if "free" not in places:
                layout_at(mesh, places)  # raises where there is no such layout
    return Choices(choices, None if nested is None else _nesting(nested, graph, mesh, choices))


def _choice(tree: object, graph: Graph, axis: str) -> Choice:
    ins, options, calls, outs = record(tree, axis, "ins", "options", "calls", "outs")
    known = [_option(option, f"{axis}.options") for option in items(options, "options")]
    numbers = [whole(i, "calls") for i in items(calls, "calls")]
    if len(numbers) != len(graph.calls) or not all(0 <= i < len(known) for i in numbers):
        raise Malformed("it is the choice of another graph")
    taken = tuple([known[i] for i in numbers])
    for call, option in zip(graph.calls, taken, strict=True):
        if isinstance(option.note, Body):
            _fits(graph, call.ins, option.ins)
            _fits(graph, call.outs, option.outs)
    first = _fits(graph, graph.inputs, _places(ins, "ins"))
    last = _fits(graph, graph.outs, _places(outs, "outs"))
    return Choice(first, taken, last, 0.0, {})


def _option(tree: object, where: str) -> Option:
    ins, outs, body = _entries(tree, 3, where)
    note, seconds = None, 0.0
    if body is not None:
        blocks, depth, taken = _entries(body, 3, where)
        note = Body(_NO_GRAPH, whole(depth, where), whole(blocks, where))
        seconds = real(taken, where)
    return Option(_places(ins, where), _places(outs, where), seconds, note)


_NO_GRAPH = Graph((), (), (), (), ())


def _places(tree: object, where: str) -> tuple[Any, ...]:
    texts = _words(tree, where)
    return tuple([text if text == "free" else parse_placement(text) for text in texts])


def _fits(graph: Graph, values: Sequence[Var | None], places: tuple[Any, ...]) -> tuple[Any, ...]:
    """The places, if values may have them."""
    if len(values) != len(places):
        raise Malformed("it is the choice of another graph")
    for v, place in zip(values, places, strict=True):
        if v is not None and not _may_have(graph.types[v.index], place):
            raise Malformed(f"a value of shape {graph.types[v.index].shape} cannot be {place}")
    return places


def _may_have(full: Full, place: Placement | str) -> bool:
    match place:
        case Spans():
            return False
        case Ragged(dim, sizes):
            return dim < full.ndim and sum(sizes) == full.shape[dim]
        case _:
            return getattr(place, "dim", -1) < full.ndim


def _nesting(tree: object, graph: Graph, mesh: Mesh, along: Mapping[str, Choice]) -> Nesting:
    ins, calls, outs = record(tree, "nested", "ins", "calls", "outs")
    orders = [_words(order, "calls") for order in items(calls, "calls")]
    if len(orders) != len(graph.calls) or any(sorted(o) != sorted(mesh.axes) for o in orders):
        raise Malformed("its orders are not of the axes")
    first, last = (
        tuple([_nested(end, mesh) for end in items(side, "nested")]) for side in (ins, outs)
    )
    sides = [c.ins for c in along.values()], [c.outs for c in along.values()]
    for ends, side in zip((first, last), sides, strict=True):
        if [tuple(places) for places in ends] != list(zip(*side, strict=True)):
            raise Malformed("its ends differ from those along the axes")
    return Nesting(first, tuple(orders), last)


def _nested(tree: object, mesh: Mesh) -> tuple[Any, ...]:
    texts, order = _entries(tree, 2, "nested")
    places = _places(texts, "nested")
    if len(places) != len(mesh.axes):
        raise Malformed("it is the choice on another mesh")
    if order is not None:
        dims = [_entries(entry, 2, "order") for entry in items(order, "order")]
        named = [(whole(d, "order"), _words(axes, "order")) for d, axes in dims]
        places = Nested(places, tuple(named))
    if "free" not in places:
        layout_at(mesh, places)
    return places


def _words(tree: object, where: str) -> tuple[str, ...]:
    return tuple([word(text, where) for text in items(tree, where)])


def _entries(tree: object, count: int, where: str) -> list[object]:
    entries = items(tree, where)
    if len(entries) != count:
        raise Malformed(f"{where} has {len(entries)} entries, not {count}")
    return entries
