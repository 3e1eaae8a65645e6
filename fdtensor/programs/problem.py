"""`ProblemBuilder`: the choice of layouts along one axis as the nodes that the solver takes.

Inputs, constants, calls and outputs of a graph are nodes. A call has options: the rows of its rule,
and decompositions whose pieces have rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

from fdtensor.layouts.placement import Cut, Partial, Placement, Ragged, Shard
from fdtensor.ops.flops import work
from fdtensor.ops.graph import Call, Full, Graph, Var
from fdtensor.ops.lift import rows_compose
from fdtensor.ops.notation.core import R, Row, rule_of
from fdtensor.ops.pins import pinned
from fdtensor.ops.rows import CallKey, kinds_of, recut_rows, rows_of, variants
from fdtensor.programs.boundary import Boundary, boundary_of
from fdtensor.programs.choices import Body, Choice, Constraints
from fdtensor.programs.deterministic import on_whole, on_whole_operands
from fdtensor.programs.ends import any_place, block, input_node, open_places, output_node
from fdtensor.programs.nearest import Past, kinds
from fdtensor.programs.nodes import Node, Option, Place
from fdtensor.programs.prices import AxisPrices, LeastPrices, Prices

__all__ = ["BodyOptions", "ProblemBuilder"]

BodyOptions = Callable[..., Sequence[Option]]
"""`(key, fulls, read, starts, before, mesh, axis, cost, depth, within)` to the options of a
call that is decomposed, one for each of `starts`: an operand, its placement, a number of blocks."""


class ProblemBuilder:
    """Builds the nodes of a graph on one axis, where the axes of `before` have their choices.

    With `at_uses` a move is priced with those of the other axes at the same use, else alone. The
    options that were `taken` of calls are among theirs. What calls depend on gives their options,
    which `known` has, for all problems with the same axis, cost, depth and `inside` of constraints.
    """

    def __init__(
        self,
        graph: Graph,
        axis: str,
        boundary: Boundary,
        before: Mapping[str, Choice],
        prices: Prices,
        constraints: Constraints,
        body_options: BodyOptions,
        depth: int = 0,
        at_uses: bool = False,
        taken: Sequence[Option] = (),
        known: dict[Hashable, tuple[Option, ...]] | None = None,
    ) -> None:
        self.graph, self.axis, self.boundary = graph, axis, boundary
        self.mesh, self.cost, self.count = prices.mesh, prices.cost, prices.mesh.axis_size(axis)
        self.before, self.depth, self.at_uses, self.cost_of = before, depth, at_uses, prices.cost_of
        self.constraints, self.body_options = constraints, body_options
        self.taken = taken
        self.whole = on_whole_operands(graph) if constraints.deterministic else frozenset[int]()
        self.known = {} if known is None else known
        self.domain: dict[Var, dict[Placement, None]] = {}
        """The placements in which a value may be computed."""
        like = None if constraints.like is None else constraints.like[axis]
        self.like = like and Past(like, graph, self.mesh, axis, self.domain)
        self.left = tuple([self._left(Var(i), full) for i, full in enumerate(graph.types)])
        placed: dict[int, dict[str, Placement]] = {}
        for other, choice in before.items():
            for v, p in choice.placements.items():
                placed.setdefault(v.index, {})[other] = p
        least = LeastPrices(prices, ()) if constraints.pending else None
        self.prices = AxisPrices(prices, axis, placed, least)

    def _left(self, v: Var, full: Full) -> Full:
        """The largest block that the other axes leave of a value."""
        sizes = [self.mesh.axis_size(axis) for axis in self.before]
        return block(full, [c.placements.get(v, R) for c in self.before.values()], sizes)

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes: inputs, constants, calls and outputs, in the order of the data."""
        graph = self.graph
        nodes: list[Node] = []
        for v, end in zip(graph.inputs, self.boundary.ins, strict=True):
            nodes.append(self._input(len(nodes), v, end))
        for v, _ in graph.constants:
            self.domain[v] = {R: None}
            nodes.append(Node((), (v.index,), (Option((), (R,), 0.0),)))
        for i, call in enumerate(graph.calls):
            options = self._with_taken(i, self._options(i, call))
            for k, v in enumerate(call.outs):
                if v is not None:
                    self.domain[v] = {o.outs[k]: None for o in options}
            outs = tuple(None if v is None else v.index for v in call.outs)
            others = {a: c.calls[i].ins for a, c in self.before.items()}
            uses = [{a: ins[j] for a, ins in others.items()} for j in range(len(call.ins))]
            ins = tuple(v.index for v in call.ins)
            nodes.append(Node(ins, outs, options, self._uses(uses)))
        for k, (v, end) in enumerate(zip(graph.outs, self.boundary.outs, strict=True)):
            places = self._results(k, v) if end == "free" else [end]
            uses = self._uses([{a: choice.outs[k] for a, choice in self.before.items()}])
            nodes.append(output_node(graph, k, places, self.constraints, self.prices, uses))
        return tuple(nodes)

    def _with_taken(self, i: int, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """The options with the one that was taken, as other choices on other axes gave it."""
        same = [t for t in self.taken[i : i + 1] if t.key not in {o.key for o in options}]
        return (*options, *same)

    def _uses(self, wanted: Sequence[Mapping[str, Place]]) -> tuple[Any, ...]:
        """The placements that other axes want of each operand, as prices take them."""
        return tuple([tuple(entry.items()) for entry in wanted]) if self.at_uses else ()

    def _results(self, k: int, v: Var) -> list[Placement]:
        """The placements that output `k`, value `v`, may have where it is free."""
        if self.like is not None:
            return [self.like.result(k)]
        if k in self.constraints.ties:
            return list(self.domain[self.graph.inputs[self.constraints.ties[k]]])
        ends = [choice.outs[k] for choice in self.before.values()]
        ragged = [p.dim for p in ends if isinstance(p, Ragged)]  # one axis may cut a dim so
        kept = (p for p in self.domain[v] if not (isinstance(p, Ragged) and p.dim in ragged))
        may_end = functools.partial(self.constraints.may_end, self.graph.types[v.index])
        each = dict.fromkeys([*filter(may_end, kept), *self._any(v)])
        # of equal ones the first is taken: rather one that cuts no dim again
        return sorted(each, key=lambda p: _cut(p) and any(_cut(q) and q.dim == p.dim for q in ends))

    def _input(self, k: int, v: Var, end: Place) -> Node:
        """The node of input `k`, value `v`."""
        known = self.left[v.index], self.count, self.constraints
        places = open_places(self.graph, k, *known) if end == "free" else {end: 0}
        # of equal ones the first is taken: rather one that holds less
        each = list(places) if self.depth else sorted(places, key=places.__getitem__)
        self.domain[v] = dict.fromkeys(each)
        return input_node(self.graph, k, each, places, self.constraints)

    def _any(self, v: Var) -> list[Placement]:
        return any_place(self.graph.types[v.index], self.constraints.uncut.get(v, ()))

    def _options(self, i: int, call: Call) -> tuple[Option, ...]:
        """The options of a call; those of calls that are alike are built once."""
        key = self._look(i, call)
        if key not in self.known:
            self.known[key] = tuple(self._built(i, call))
        return self.known[key]

    def _look(self, i: int, call: Call) -> Hashable:
        """What the options of a call depend on."""
        types, uncut = self.graph.types, self.constraints.uncut
        sides = [
            None if v is None else (types[v.index], self.left[v.index], uncut.get(v))
            for v in (*call.ins, *call.outs)
        ]
        ins = tuple([tuple(self.domain[v]) for v in call.ins])
        past = tuple([(axis, choice.calls[i]) for axis, choice in self.before.items()])
        cuts = [tuple([c.placements.get(v) for c in self.before.values()]) for v in call.ins]
        rest = (
            i in self.whole,
            self.cost_of(call) is not self.cost,
            self.like and self.like.looks(i),
        )
        return CallKey.of(call), tuple(sides), ins, past, tuple(cuts), rest

    def _built(self, i: int, call: Call) -> list[Option]:
        graph = self.graph
        pin = pinned(call)
        if pin is not None:
            return [Option((pin[self.axis],), (pin[self.axis],), 0.0)]
        if i in self.whole:
            return [on_whole(call)]
        places = dict.fromkeys(p for v in call.ins for p in self.domain[v])
        kinds = kinds_of(places)
        if self.like is not None and isinstance(self.like.choice.calls[i].note, Body):
            return self._constrained(i, call, self.like.bodies(i))
        sides = [None if v is None else graph.types[v.index] for v in (*call.ins, *call.outs)]
        rows = [r for r in rows_of(call, graph.types, self.count) if self._may_cut(call, r)]
        for row in list(rows):
            rows += variants(row, self._kinds(call, row, kinds), sides)
        rows += recut_rows(call, graph.types, self.count, kinds)
        options: dict[tuple[tuple[Place, ...], tuple[Placement, ...]], Option] = {}
        past = [(axis, choice.calls[i]) for axis, choice in self.before.items()]
        bodies = self._bodies(call, rows, past) if self.like is None else ()
        for row in self._as_like(i, rows):
            if self._composes(call, past, row):
                seconds = self._seconds(call, row, past)
                options[row.ins, row.outs] = Option(row.ins, row.outs, seconds, row)
        for option in bodies:
            known = options.get((option.ins, option.outs))
            if known is None or known.seconds > option.seconds:
                options[option.ins, option.outs] = option
        return self._constrained(i, call, list(options.values()))

    def _may_cut(self, call: Call, row: Row) -> bool:
        """Whether a row cuts more than dims of one index, or an operand comes so."""
        if self.like is not None:  # dims that are longer where it was chosen
            return True
        cuts = [(v, p) for v, p in zip(call.ins, row.ins, strict=True) if _cut(p)]
        large = any(self.graph.types[v.index].shape[p.dim] > 1 for v, p in cuts)
        return large or not cuts or any(p in self.domain[v] for v, p in cuts)

    def _as_like(self, i: int, rows: Sequence[Row]) -> Iterable[Row]:
        """The different rows of a call; that which was chosen at other sizes, where one was."""
        kind = None if self.like is None else kinds(self.like.choice.calls[i].key)
        return dict.fromkeys(r for r in rows if kind in (None, kinds((r.ins, r.outs))))

    def _kinds(self, call: Call, row: Row, kinds: Iterable[Placement]) -> Iterator[Placement]:
        """The kinds that a row may be cut in: those that an operand has along the dim it cuts."""
        for kind in kinds:
            if not isinstance(kind, Cut) or any(
                isinstance(p, Shard) and p.dim == kind.dim and kind in self.domain[v]
                for v, p in zip(call.ins, row.ins, strict=True)
            ):
                yield kind

    def _constrained(self, i: int, call: Call, options: list[Option]) -> list[Option]:
        """The options that keep to the constraints."""
        if self.like is not None:
            options = [self.like.nearest(options, i)]
        uncut = self.constraints.uncut
        if not uncut:
            return options
        sides = [uncut.get(v, ()) if v is not None else () for v in (*call.ins, *call.outs)]
        return [
            o
            for o in options
            if not any(
                _cut(p) and p.dim in dims for p, dims in zip((*o.ins, *o.outs), sides, strict=True)
            )
        ]

    def _composes(self, call: Call, past: Sequence[tuple[str, Option]], row: Row) -> bool:
        rows = {axis: option.note for axis, option in past if isinstance(option.note, Row)}
        return not rows or rows_compose(call, self.mesh, rows, self.axis, row, self.graph.types)

    def _seconds(self, call: Call, row: Row, past: Sequence[tuple[str, Option]]) -> float:
        share = 1.0
        for axis, option in past:
            if any(map(_cut, (*option.ins, *option.outs))):
                share /= self.mesh.axis_size(axis)
        ins = [(self.left[v.index], p) for v, p in zip(call.ins, row.ins, strict=True)]
        results = zip(call.outs, row.outs, strict=True)
        outs = [(self.left[v.index], p) for v, p in results if v is not None]
        return work(call, self.graph.types, ins, outs, self.count, share, self.cost_of(call))

    def _bodies(
        self, call: Call, rows: Sequence[Row], past: Sequence[tuple[str, Option]]
    ) -> Sequence[Option]:
        """The options of a call's decomposition, for the cuts that none of its rows takes.

        For an op without a rule also for pending operands.
        """
        if self.depth > 1:
            return ()
        fulls = tuple(self.graph.types[v.index] for v in call.ins)
        read = tuple(v is not None for v in call.outs)
        taken = {(i, p.dim) for row in rows for i, p in enumerate(row.ins) if _cut(p)}
        missing = tuple(
            (i, d)
            for i, full in enumerate(fulls)
            for d, n in enumerate(full.shape)
            if n > 1 and (i, d) not in taken
        )
        starts: list[tuple[int, Placement, int]] = []
        if self._may_come_cut(call, missing):
            starts += [(i, Shard(d), self._blocks(call.ins[i], d)) for i, d in missing]
        if rule_of(call.op) is None:
            for i, v in enumerate(call.ins):
                pending = [p for p in self.domain[v] if isinstance(p, Partial)]
                starts += [(i, p, self.count) for p in pending]
        if not starts:
            return ()
        before = tuple((axis, boundary_of(option, read)) for axis, option in past)
        return self.body_options(
            *(CallKey.of(call), fulls, read, tuple(starts), before),
            *(self.mesh, self.axis, self.cost, self.depth, self.constraints.inside),
        )

    def _blocks(self, v: Var, dim: int) -> int:
        """The number of blocks of a dim that this axis and, if even, those before it cut."""
        placed = ((axis, choice.placements.get(v)) for axis, choice in self.before.items())
        cutting = [axis for axis, p in placed if _cut(p) and p.dim == dim]
        total = self.count * prod(self.mesh.axis_size(axis) for axis in cutting)
        return self.count if self.graph.types[v.index].shape[dim] % total else total

    def _may_come_cut(self, call: Call, cuts: Sequence[tuple[int, int]]) -> bool:
        """Whether an operand may come with one of these cuts: its number and a dim."""
        return any(_cut(p) and p.dim == d for i, d in cuts for p in self.domain[call.ins[i]])


def _cut(p: object) -> TypeGuard[Cut]:
    return isinstance(p, Cut)
