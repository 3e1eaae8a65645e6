"""`wider`: more options of a call on all axes, beside those that solutions along axes have taken.

Solutions that are made axis by axis stay where no axis alone does better, though two together do:
a product cut in rows by one axis and in columns by the other, not the other way round. Here a call
gets the combinations of the rows of each axis that are best for the operands as they now are made,
and for the readers as they now are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.layouts.placement import Placement
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.ops.lift import lifted
from fdtensor.ops.rows import CallKey
from fdtensor.programs.choices import Constraints
from fdtensor.programs.ends import open_input, output_node
from fdtensor.programs.nodes import Node, OnAxes, Option, Place, Placements
from fdtensor.programs.prices import Prices
from fdtensor.programs.rough_moves import Ends, about_seconds, about_seconds_along

__all__ = ["wider", "with_options"]

Floats = NDArray[np.float64]

MORE = 8
"""How many combinations a call gets of those best for its operands, and as many for its readers."""

MOST_COMBINATIONS = 512
"""How many combinations of a call are compared at most: rows of an axis that cost most are left."""


@attrs.frozen(eq=False)
class _Combinations:
    """All combinations of a row on each axis, and what each takes."""

    axes: tuple[str, ...]
    kept: Sequence[Sequence[Option]]
    """The rows of each axis; those of the last one run fastest."""
    seconds: Floats
    """Of the call itself."""
    given: Floats
    """With the moves of its operands."""
    read: Floats
    """With those of its results too."""

    def along(self, number: int) -> dict[str, Option]:
        """The row of a combination on each axis."""
        where = np.unravel_index(number, [*map(len, self.kept)])
        rows = [options[int(k)] for options, k in zip(self.kept, where, strict=True)]
        return dict(zip(self.axes, rows, strict=True))

    def option(self, number: int) -> Option:
        """The option that a combination makes."""
        along = self.along(number)
        ins, outs = (
            tuple(zip(*(getattr(o, side) for o in along.values()), strict=True))
            for side in ("ins", "outs")
        )
        return Option(ins, outs, float(self.seconds[number]), OnAxes(along, self.axes))


@attrs.frozen(eq=False)
class _Now:
    """Where values are made and wanted in the solution so far."""

    prices: Prices
    made: Mapping[int, Placements]
    wanted: Mapping[int, Sequence[tuple[Place, ...]]]

    def taking(self, v: int, along: Sequence[Sequence[Place]]) -> Floats:
        """About the seconds of moving a value to where an operand is wanted.

        For all combinations of a place along each axis.
        """
        ends = [[(p, q) for q in places] for p, places in zip(self.made[v], along, strict=True)]
        return self._seconds(v, ends)

    def giving(self, v: int, along: Sequence[Sequence[Placement]]) -> Floats:
        """About the seconds of moving a result from its place to where it is read now."""
        seconds = np.zeros([*map(len, along)])
        for wanted in self.wanted.get(v, ()):
            ends = [[(p, q) for p in places] for q, places in zip(wanted, along, strict=True)]
            seconds = seconds + self._seconds(v, ends)
        return seconds

    def _seconds(self, v: int, ends: Sequence[Sequence[Ends]]) -> Floats:
        prices = self.prices
        return about_seconds_along(prices.fulls[v], prices.mesh.sizes, ends, prices.cost)


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
    combinations = _combinations(now, graph, call, node, alone)
    composes = functools.cache(functools.partial(_composes, combinations, graph, call, now.prices))
    best: dict[int, Option] = {}
    for seconds in (combinations.given, combinations.read):
        numbers: list[int] = np.argsort(seconds, kind="stable").tolist()
        options = ((k, combinations.option(k)) for k in numbers)
        fresh = ((k, o) for k, o in options if (o.ins, o.outs) not in known and composes(k))
        best |= islice(fresh, MORE)
    return (*node.options, *best.values())


def _combinations(
    now: _Now, graph: Graph, call: Call, node: Node, alone: Sequence[Sequence[Option]]
) -> _Combinations:
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

    ins = [
        _side(work, v, [[o.ins[i] for o in options] for options in kept], now.taking)
        for i, v in enumerate(node.ins)
    ]
    outs = [
        _side(work, v, [[o.outs[i] for o in options] for options in kept], now.giving)
        for i, v in enumerate(node.outs)
    ]
    computing = work.seconds((nbytes, cuts) for nbytes, cuts, _ in (*ins, *outs))
    seconds = np.broadcast_to(computing, prod(map(len, kept)))
    given = seconds + sum(moves for _, _, moves in ins)
    read = given + sum(moves for _, _, moves in outs)
    return _Combinations(axes, kept, seconds, given, read)


def _side(
    work: Work, v: int | None, rows: Sequence[Sequence[Place]], moving: Callable[..., Floats]
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """The parts of an operand or result, and its moves, for each combination of rows.

    `rows` has its place in each row of each axis.
    """
    each = [list(dict.fromkeys(places)) for places in rows]
    nbytes, cuts = work.parts(v, each)
    moves = np.zeros(cuts.shape) if v is None else moving(v, each)
    at = np.ix_(*([own.index(p) for p in places] for own, places in zip(each, rows, strict=True)))
    return nbytes[at].ravel(), cuts[at].ravel(), moves[at].ravel()


def _beside(now: _Now, node: Node, axis: int, option: Option) -> float:
    """About the seconds of the moves for a row of one axis, while the others stay."""
    total, prices = 0.0, now.prices
    for v, q in zip(node.ins, option.ins, strict=True):
        p = now.made[v]
        wanted = (*p[:axis], q, *p[axis + 1 :])
        total += about_seconds(prices.fulls[v], prices.mesh.sizes, p, wanted, prices.cost)
    return total


def _composes(
    combinations: _Combinations, graph: Graph, call: Call, prices: Prices, number: int
) -> bool:
    """Whether the rows of a combination hold together; pins have none."""
    rows = {axis: row.note for axis, row in combinations.along(number).items()}
    return None not in rows.values() and lifted(call, prices.mesh, rows, graph.types) is not None
