"""`wider`: more options of a call on all axes, beside those that solutions along axes have taken.

Solutions that are made axis by axis stay where no axis alone does better, though two together do:
a product cut in rows by one axis and in columns by the other, not the other way round. Here a call
gets the combinations of the rows of each axis that are best for the operands as they now are made,
and for the readers as they now are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import attrs

from fdtensor.ops.flops import Part, Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.ops.lift import lifted
from fdtensor.ops.rows import CallKey
from fdtensor.programs.choices import Constraints
from fdtensor.programs.ends import open_input, output_node
from fdtensor.programs.moves import about_seconds
from fdtensor.programs.nodes import Node, OnAxes, Option, Place, Placements
from fdtensor.programs.prices import Prices

__all__ = ["wider", "with_options"]

MORE = 8
"""How many combinations a call gets of those best for its operands, and as many for its readers."""

MOST_COMBINATIONS = 512
"""How many combinations of a call are compared at most: rows of an axis that cost most are left."""


class _Combination(NamedTuple):
    """A row on each axis, and what it takes, once for its operands and once with its readers."""

    rows: tuple[Option, ...]
    ins: tuple[tuple[Place, ...], ...]
    outs: tuple[Placements, ...]
    seconds: float
    """Of the call itself."""
    given: float
    """With the moves of its operands."""
    read: float
    """With those of its results too."""


@attrs.frozen(eq=False)
class _Now:
    """Where values are made and wanted in the solution so far."""

    prices: Prices
    made: Mapping[int, Placements]
    wanted: Mapping[int, Sequence[tuple[Place, ...]]]

    def taking(self, v: int, q: tuple[Place, ...]) -> float:
        """About the seconds of moving a value to where an operand is wanted."""
        prices = self.prices
        return about_seconds(prices.fulls[v], prices.mesh.sizes, self.made[v], q, prices.cost)

    def giving(self, v: int, p: Placements) -> float:
        """About the seconds of moving a result from its place to where it is read now."""
        prices = self.prices
        sizes, full = prices.mesh.sizes, prices.fulls[v]
        return sum(about_seconds(full, sizes, p, q, prices.cost) for q in self.wanted.get(v, ()))


def wider(
    graph: Graph,
    nodes: Sequence[Node],
    taken: Sequence[Option],
    rows: Mapping[str, Sequence[Node]],
    free: Sequence[bool],
    prices: Prices,
    constraints: Constraints,
) -> list[Node]:
    """The nodes with more options, near those that were taken.

    `rows` has the nodes of each axis as it were alone, without decompositions; `free` says of each
    output whether its layout is open on all axes.
    """
    made = {
        v: p
        for node, option in zip(nodes, taken, strict=True)
        for v, p in zip(node.outs, option.outs, strict=True)
        if v is not None
    }
    wanted: dict[int, dict[tuple[Place, ...], None]] = {}
    for node, option in zip(nodes, taken, strict=True):
        for v, q in zip(node.ins, option.ins, strict=True):
            wanted.setdefault(v, {})[q] = None
    now = _Now(prices, made, {v: list(places) for v, places in wanted.items()})
    first = len(graph.inputs) + len(graph.constants)
    last = first + len(graph.calls)
    more: list[Node] = [*nodes[:first]]
    known: dict[Hashable, tuple[Option, ...]] = {}
    for k, call in enumerate(graph.calls, first):
        alone = [rows[a][k].options for a in prices.mesh.axes]
        look = _look(now, graph, call, nodes[k], alone)
        if look not in known:  # calls that are alike get the same
            known[look] = _more(now, graph, call, nodes[k], alone)
        more.append(attrs.evolve(nodes[k], options=known[look]))
    starts = _starts(graph, [*more, *nodes[last:]], rows, prices, constraints)
    more[: len(starts)] = starts
    return [*more, *_ends(graph, nodes[last:], more, free, prices, constraints)]


def _starts(
    graph: Graph,
    nodes: Sequence[Node],
    rows: Mapping[str, Sequence[Node]],
    prices: Prices,
    constraints: Constraints,
) -> list[Node]:
    """The inputs; one that is open in any placement in which it is read, or a tied result made."""
    read: dict[int, dict[tuple[Place, ...], None]] = {}
    made: dict[int, list[Placements]] = {}
    for node in nodes:
        for j, v in enumerate(node.ins):
            read.setdefault(v, {}).update((o.ins[j], None) for o in node.options)
        for j, v in enumerate(node.outs):
            made[-1 if v is None else v] = [o.outs[j] for o in node.options]
    starts: list[Node] = []
    for k, v in enumerate(graph.inputs):
        domains = [{o.outs[0] for o in rows[axis][k].options} for axis in prices.mesh.axes]
        places = dict.fromkeys(o.outs[0] for o in nodes[k].options)
        if any(len(domain) > 1 for domain in domains):
            tied = [graph.outs[o].index for o, i in constraints.ties.items() if i == k]
            near = (p for u in (v.index, *tied) for p in (*read.get(u, ()), *made[u]))
            places |= {p: None for p in near if _each_in(p, domains)}
        starts.append(open_input(graph, k, places, prices.mesh, constraints))
    return starts


def _each_in(places: tuple[Place, ...], domains: Sequence[Collection[Place]]) -> bool:
    return all(p in domain for p, domain in zip(places, domains, strict=True))


def _ends(
    graph: Graph,
    ends: Sequence[Node],
    nodes: Sequence[Node],
    free: Sequence[bool],
    prices: Prices,
    constraints: Constraints,
) -> Iterator[Node]:
    """The outputs; where one is open, in any placement that the nodes give and that it may have.

    One that is tied may have those of the input.
    """
    given = {
        v: [option.outs[j] for option in node.options]
        for node in nodes
        for j, v in enumerate(node.outs)
        if v is not None
    }
    for k, (node, is_free) in enumerate(zip(ends, free, strict=True)):
        places = dict.fromkeys(option.ins[0] for option in node.options)
        if k in constraints.ties:
            places = dict.fromkeys(option.outs[0] for option in nodes[constraints.ties[k]].options)
        elif is_free:
            may_end = functools.partial(constraints.may_end, graph.types[node.ins[0]])
            kept = (p for p in given[node.ins[0]] if all(map(may_end, p)))
            places |= dict.fromkeys(kept)
        yield output_node(graph, k, places, constraints, prices)


def with_options(nodes: Sequence[Node], taken: Sequence[Option]) -> list[Node]:
    """The nodes, each with the option that is taken among its own."""
    return [
        node
        if any((o.ins, o.outs) == (option.ins, option.outs) for o in node.options)
        else attrs.evolve(node, options=(*node.options, option))
        for node, option in zip(nodes, taken, strict=True)
    ]


def _look(
    now: _Now, graph: Graph, call: Call, node: Node, alone: Sequence[Sequence[Option]]
) -> Hashable:
    """What the options of a call depend on."""
    sides = [None if v is None else graph.types[v.index] for v in (*call.ins, *call.outs)]
    made = [now.made[v] for v in node.ins]
    wanted = [None if v is None else tuple(now.wanted.get(v, ())) for v in node.outs]
    options = [(o.ins, o.outs, o.seconds) for o in node.options]
    return CallKey.of(call), tuple(sides), tuple(made), tuple(wanted), tuple(options), tuple(alone)


def _more(
    now: _Now, graph: Graph, call: Call, node: Node, alone: Sequence[Sequence[Option]]
) -> tuple[Option, ...]:
    """The options of a call and more; `alone` has those of each axis."""
    known = {(option.ins, option.outs) for option in node.options}
    fresh = [
        c for c in _combinations(now, graph, call, node, alone) if (c.ins, c.outs) not in known
    ]
    best: dict[int, _Combination] = {}
    for order in (sorted(fresh, key=lambda c: c.given), sorted(fresh, key=lambda c: c.read)):
        composed = (c for c in order if id(c) in best or _composes(c, graph, call, now.prices))
        best |= {id(c): c for c in islice(composed, MORE)}
    order, options = now.prices.mesh.axes, list[Option]()
    for c in best.values():
        along = dict(zip(order, c.rows, strict=True))
        options.append(Option(c.ins, c.outs, c.seconds, OnAxes(along, order)))
    return (*node.options, *options)


def _combinations(
    now: _Now, graph: Graph, call: Call, node: Node, alone: Sequence[Sequence[Option]]
) -> Iterator[_Combination]:
    """The combinations of rows; of each axis the rows that cost least while the others stay."""
    axes, sizes = now.prices.mesh.axes, now.prices.mesh.sizes
    most = int(MOST_COMBINATIONS ** (1 / sum(n > 1 for n in sizes)))
    kept: list[list[Option]] = []
    for axis, one in zip(axes, alone, strict=True):
        options = list(one)
        if len(options) > most:
            options.sort(key=lambda o: _beside(now, node, axes.index(axis), o))
        kept.append(options[:most] if now.prices.mesh.axis_size(axis) > 1 else options[:1])
    work = Work(call, graph.types, sizes, now.prices.cost_of(call))
    # few places of one operand make many combinations
    taking = [functools.cache(functools.partial(_side, work, v, now.taking)) for v in node.ins]
    giving = [functools.cache(functools.partial(_side, work, v, now.giving)) for v in node.outs]
    for rows in product(*kept):
        ins = tuple(zip(*(o.ins for o in rows), strict=True))
        outs = tuple(zip(*(o.outs for o in rows), strict=True))
        before = [side(q) for side, q in zip(taking, ins, strict=True)]
        after = [side(p) for side, p in zip(giving, outs, strict=True)]
        seconds = work.seconds(part for part, _ in (*before, *after))
        given = seconds + sum(move for _, move in before)
        read = given + sum(move for _, move in after)
        yield _Combination(rows, ins, outs, seconds, given, read)


def _side(
    work: Work, v: int | None, moving: Callable[[int, Any], float], placements: Any
) -> tuple[Part, float]:
    """The part that an operand or a result has in a call, and about the seconds of its moves."""
    return work.part(v, placements), 0.0 if v is None else moving(v, placements)


def _beside(now: _Now, node: Node, axis: int, option: Option) -> float:
    """About the seconds of the moves for a row of one axis, while the others stay."""
    made = [now.made[v] for v in node.ins]
    wanted = [(*p[:axis], q, *p[axis + 1 :]) for p, q in zip(made, option.ins, strict=True)]
    return sum(now.taking(v, q) for v, q in zip(node.ins, wanted, strict=True))


def _composes(c: _Combination, graph: Graph, call: Call, prices: Prices) -> bool:
    """Whether the rows of a combination hold together; pins have none."""
    rows = {axis: row.note for axis, row in zip(prices.mesh.axes, c.rows, strict=True)}
    return None not in rows.values() and lifted(call, prices.mesh, rows, graph.types) is not None
