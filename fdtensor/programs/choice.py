"""`chosen`: a row for every call of a graph, so that the whole takes the least time.

Axes are chosen one after the other, each priced on the blocks that the axes before it leave. On an
axis every call has options: the rows of its rule, and decompositions whose pieces have rows. The
moves between them are priced by the planner, and `solver.cheapest` takes the best together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, TypeGuard

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError, TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Cut,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Spans,
    StridedShard,
)
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.decompositions import DECOMPOSITIONS, decomposition_of
from fdtensor.ops.flops import work
from fdtensor.ops.graph import Call, Full, Graph, Var, is_view, tensors_of
from fdtensor.ops.lift import agreeable
from fdtensor.ops.notation.core import R, Row, rule_of
from fdtensor.ops.pins import pinned
from fdtensor.ops.precision import HALVES, is_sum, wide_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.ops.rows import Exact, arguments, rows_of, variants
from fdtensor.plans.cost import CostModel, overlapped, seconds
from fdtensor.plans.planner import plan
from fdtensor.programs.rounding import stages
from fdtensor.programs.solver import Node, Option, cheapest

__all__ = [
    "UNBOUND",
    "Body",
    "Bounds",
    "Choice",
    "Ends",
    "Prices",
    "chosen",
    "decomposed",
    "ends_of",
    "inside",
]

Free = Literal["free"]
"""An end whose placement may be any but a pending one; of an operand, one that nobody reads."""


@attrs.frozen(eq=False)
class Body:
    """A decomposition of a call, as a graph with the call's tensors as inputs and outputs."""

    graph: Graph
    depth: int
    """In how many decompositions its calls are, one inside the other."""


@attrs.frozen
class Ends:
    """What is known of a graph's inputs and outputs on one axis; "free" where nothing is."""

    ins: tuple[Placement | Free, ...]
    outs: tuple[Placement | Free, ...]


@attrs.frozen(eq=False)
class Prices:
    """What moves along one axis cost: of values, by number, of which other axes leave a part."""

    axis: str
    count: int
    cost: CostModel
    fulls: tuple[Full, ...]
    left: tuple[Full, ...]
    """What the other axes leave of each value."""
    fixed: frozenset[Var] = frozenset()
    """Values whose moves cost more than any other."""
    light: frozenset[Var] = frozenset()
    """Values whose moves cost nothing: a few numbers, which travel with other sums."""
    reduce_dtype: torch.dtype | None = None
    """In which dtype sums of half precision wait; None is their own."""

    def __call__(self, v: int, p: Any, q: Any) -> float:
        """The seconds that moving value `v` from one placement to another takes."""
        if q in ("free", p) or Var(v) in self.light:
            return 0.0
        kept = FIXED if Var(v) in self.fixed else 0.0
        full = self.moved(v, p, q)
        wide = None
        if self.reduce_dtype is not None and full.dtype in HALVES and is_sum(p):
            wide = wide_of(full.dtype, self.reduce_dtype)
        return kept + move_seconds(full, p, q, self.axis, self.count, self.cost, wide)

    def moved(self, v: int, p: Any, q: Any) -> Full:
        """What moves of value `v`: cuts that are of a whole dim move all of it."""
        exact = {x.dim for x in (p, q) if isinstance(x, (Ragged, StridedShard, Spans))}
        full, left = self.fulls[v], self.left[v]
        if not exact:
            return left
        sizes = enumerate(zip(full.shape, left.shape, strict=True))
        return Full(tuple([n if d in exact else m for d, (n, m) in sizes]), full.dtype)


@attrs.frozen(eq=False)
class Choice:
    """The options taken on one axis: for the inputs, the calls and the outputs of a graph."""

    ins: tuple[Placement, ...]
    calls: tuple[Option, ...]
    """`note` is a `Body` where the call runs as its decomposition."""
    outs: tuple[Placement, ...]
    seconds: float
    placements: Mapping[Var, Placement]
    """How each value is made."""
    nodes: tuple[Node, ...]
    """All options that there were: of inputs, constants, calls and outputs; none of a `Body`."""
    prices: Prices
    """What the moves between them cost."""


@attrs.frozen(eq=False)
class Bounds:
    """What the choice for a whole graph keeps to besides its ends."""

    fixed: frozenset[Var] = frozenset()
    """Values that do not move while there is another way."""
    uncut: Mapping[Var, frozenset[int]] = attrs.field(factory=dict)
    """Dims of values that nothing cuts."""
    like: Mapping[str, Choice] | None = None
    """The choice for a graph of the same calls on other sizes, which is made again."""
    cost: CostModel | None = None
    """Prices for the choice alone."""
    reduce_dtype: torch.dtype | None = torch.float32
    """In which dtype sums of half precision wait; None is their own."""


UNBOUND = Bounds()


def chosen(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    ends: Ends,
    before: Mapping[str, Choice],
    cost: CostModel,
    regather: bool = False,
    depth: int = 0,
    bounds: Bounds = UNBOUND,
) -> Choice:
    """The cheapest options of a graph on one axis, given those of the axes `before`."""
    made = Nodes(graph, mesh, axis, ends, before, cost, depth, bounds)
    nodes = made.nodes()
    again = views_of_inputs(graph) if regather else frozenset()
    picks = cheapest(nodes, made.prices, lambda v: Var(v) not in again, inner_values(graph))
    taken = [node.options[k] for node, k in zip(nodes, picks, strict=True)]
    ins, calls = len(graph.inputs), len(graph.calls)
    skipped = ins + len(graph.constants)
    placements: dict[Var, Any] = {}
    for node, option in zip(nodes, taken, strict=True):
        for v, p in zip(node.outs, option.outs, strict=True):
            if v is not None:
                placements[Var(v)] = p
    return Choice(
        tuple(o.outs[0] for o in taken[:ins]),  # type: ignore[misc]
        tuple(taken[skipped : skipped + calls]),
        tuple(o.ins[0] for o in taken[skipped + calls :]),  # type: ignore[misc]
        _total(nodes, taken, made.prices, again),
        placements,
        () if depth else tuple(nodes),  # decompositions are kept by the thousand
        made.prices,
    )


def _total(nodes: Sequence[Node], taken: Sequence[Option], prices: Prices, again: Any) -> float:
    held: dict[int, Any] = {}
    paid: dict[Any, float] = {}
    for i, (node, option) in enumerate(zip(nodes, taken, strict=True)):
        for j, (v, q) in enumerate(zip(node.ins, option.ins, strict=True)):
            key = (v, q, i, j) if Var(v) in again else (v, q)
            paid[key] = 0.0 if held[v] == q else prices(v, held[v], q)
        held.update((v, p) for v, p in zip(node.outs, option.outs, strict=True) if v is not None)
    return sum(paid.values()) + sum(o.seconds for o in taken)


class Nodes:
    """The nodes of a graph on one axis."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        axis: str,
        ends: Ends,
        before: Mapping[str, Choice],
        cost: CostModel,
        depth: int,
        bounds: Bounds = UNBOUND,
    ) -> None:
        self.graph, self.mesh, self.axis, self.ends = graph, mesh, axis, ends
        self.before, self.cost, self.depth = before, cost, depth
        self.bounds = bounds
        self.like = None if bounds.like is None else bounds.like[axis]
        self.count = mesh.axis_size(axis)
        self.domain: dict[Var, dict[Placement, None]] = {}
        self.left = tuple([self._left(Var(i), full) for i, full in enumerate(graph.types)])
        checked = frozenset(v for call in graph.calls if not call.outs for v in call.ins)
        self.prices = Prices(
            *(axis, self.count, cost, graph.types, self.left, bounds.fixed, checked),
            reduce_dtype=bounds.reduce_dtype,
        )

    def _left(self, v: Var, full: Full) -> Full:
        """What the axes before leave of a value."""
        shape = list(full.shape)
        for axis, choice in self.before.items():
            p = choice.placements.get(v)
            if isinstance(p, Cut):
                shape[p.dim] = -(-shape[p.dim] // self.mesh.axis_size(axis))
        return Full(tuple(shape), full.dtype)

    def nodes(self) -> list[Node]:
        graph, found = self.graph, []
        for v, end in zip(graph.inputs, self.ends.ins, strict=True):
            found.append(self._source(v, self._any(v) if end == "free" else [end]))
        for v, _ in graph.constants:
            found.append(self._source(v, [R]))
        for i, call in enumerate(graph.calls):
            options = self._options(i, call)
            for k, v in enumerate(call.outs):
                if v is not None:
                    self.domain[v] = {o.outs[k]: None for o in options}  # type: ignore[misc]
            outs = tuple(None if v is None else v.index for v in call.outs)
            found.append(Node(tuple(v.index for v in call.ins), outs, tuple(options)))
        for k, (v, end) in enumerate(zip(graph.outs, self.ends.outs, strict=True)):
            wanted = [end]
            if end == "free":
                ends = (choice.outs[k] for choice in self.before.values())
                ragged = [p.dim for p in ends if _ragged(p)]  # one axis may cut a dim so
                kept = (p for p in self.domain[v] if not (_ragged(p) and p.dim in ragged))
                wanted = [p for p in kept if not isinstance(p, Partial)]
                wanted = list(dict.fromkeys([*wanted, *self._any(v)]))
                if self.like is not None:
                    wanted = [self.like.outs[k]]
            found.append(Node((v.index,), (), tuple(Option((q,), (), 0.0) for q in wanted)))
        return found

    def _source(self, v: Var, placements: Sequence[Any]) -> Node:
        self.domain[v] = dict.fromkeys(placements)
        return Node((), (v.index,), tuple(Option((), (p,), 0.0) for p in placements))

    def _any(self, v: Var) -> list[Placement]:
        shape, uncut = self.graph.types[v.index].shape, self.bounds.uncut.get(v, ())
        return [R, *(Shard(d) for d, n in enumerate(shape) if n > 1 and d not in uncut)]

    def _options(self, i: int, call: Call) -> list[Option]:
        graph = self.graph
        pin = pinned(call)
        if pin is not None:
            return [Option((pin[self.axis],), (pin[self.axis],), 0.0)]
        kinds: dict[Placement, None] = {}
        for v in call.ins:
            kinds.update((p, None) for p in self.domain[v] if not isinstance(p, (Replicate, Shard)))
        types = [graph.types[v.index] for v in call.ins]
        read = [None if v is None else graph.types[v.index] for v in call.outs]
        rows = list(rows_of(call, graph.types, self.count))
        for row in list(rows):
            rows += variants(row, kinds, [*types, *read])
        options: dict[tuple[Any, Any], Option] = {}
        past = [(axis, choice.calls[i]) for axis, choice in self.before.items()]
        bodies = self._bodies(call, rows, past)
        for row in dict.fromkeys(rows):
            if self._agrees(call, past, row):
                seconds = self._seconds(call, row, past)
                options[row.ins, row.outs] = Option(row.ins, row.outs, seconds, row)
        for option in bodies:
            known = options.get((option.ins, option.outs))
            if known is None or known.seconds > option.seconds:
                options[option.ins, option.outs] = option
        return self._bounded(i, call, list(options.values()))

    def _bounded(self, i: int, call: Call, options: list[Option]) -> list[Option]:
        """The options that keep to the bounds."""
        if self.like is not None:
            past = self.like.calls[i]
            options = [o for o in options if (o.ins, o.outs) == (past.ins, past.outs)]
            if not options:
                raise TraceError(
                    f"{call.op} takes other rows for other sizes that are not known yet.",
                    call=call.mark,
                    hint="Export the program with these sizes fixed.",
                )
        uncut = self.bounds.uncut
        if uncut:
            sides = [uncut.get(v, ()) if v is not None else () for v in (*call.ins, *call.outs)]
            options = [
                o
                for o in options
                if not any(
                    _cut(p) and p.dim in dims
                    for p, dims in zip((*o.ins, *o.outs), sides, strict=True)
                )
            ]
        return options

    def _agrees(self, call: Call, past: Sequence[tuple[str, Option]], row: Row) -> bool:
        rows = {axis: option.note for axis, option in past if isinstance(option.note, Row)}
        return not rows or agreeable(call, self.mesh, rows, self.axis, row, self.graph.types)

    def _seconds(self, call: Call, row: Row, past: Sequence[tuple[str, Option]]) -> float:
        share = 1.0
        for axis, option in past:
            if any(map(_cut, (*option.ins, *option.outs))):
                share /= self.mesh.axis_size(axis)
        ins = [(self.left[v.index], p) for v, p in zip(call.ins, row.ins, strict=True)]
        outs = [
            (self.left[v.index], p)
            for v, p in zip(call.outs, row.outs, strict=True)
            if v is not None
        ]
        return work(call, self.graph.types, ins, outs, self.count, share, self.cost)

    def _bodies(
        self, call: Call, rows: Sequence[Row], past: Sequence[tuple[str, Option]]
    ) -> Sequence[Option]:
        """The decomposition of a call, for the cuts that none of its rows takes.

        Of an op without a rule also for pending operands.
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
        if self._met(call, missing):
            starts += [(i, Shard(d), self._blocks(call.ins[i], d)) for i, d in missing]
        if rule_of(call.op) is None:
            for i, v in enumerate(call.ins):
                pending = [p for p in self.domain[v] if isinstance(p, Partial)]
                starts += [(i, p, self.count) for p in pending]
        if not starts:
            return ()
        before = tuple((axis, ends_of(option, read)) for axis, option in past)
        return _bodies(
            *(Exact.of(call), fulls, read, tuple(starts), before),
            *(self.mesh, self.axis, self.cost, self.depth, self.bounds.reduce_dtype),
        )

    def _blocks(self, v: Var, dim: int) -> int:
        """Into how many blocks this axis cuts a dim, with those before it where they are even."""
        placed = ((axis, choice.placements.get(v)) for axis, choice in self.before.items())
        cutting = [axis for axis, p in placed if _cut(p) and p.dim == dim]
        total = self.count * prod(self.mesh.axis_size(axis) for axis in cutting)
        return self.count if self.graph.types[v.index].shape[dim] % total else total

    def _met(self, call: Call, missing: Sequence[tuple[int, int]]) -> bool:
        """Whether an operand may come with one of these cuts."""
        for i, d in missing:
            if any(_cut(p) and p.dim == d for p in self.domain[call.ins[i]]):
                return True
        return False


def ends_of(option: Option, read: Sequence[bool]) -> Ends:
    """Those of a decomposition where an axis takes this option of its call."""
    return Ends(option.ins, tuple(p for p, wanted in zip(option.outs, read, strict=True) if wanted))  # type: ignore[arg-type]


def _cut(p: Any) -> TypeGuard[Cut]:
    return isinstance(p, Cut)


def _ragged(p: Any) -> TypeGuard[Ragged]:
    return isinstance(p, Ragged)


@functools.lru_cache(maxsize=4096)
def _bodies(
    key: Exact,
    fulls: tuple[Full, ...],
    read: tuple[bool, ...],
    starts: tuple[tuple[int, Placement, int], ...],
    before: tuple[tuple[str, Ends], ...],
    mesh: Mesh,
    axis: str,
    cost: CostModel,
    depth: int,
    reduce_dtype: torch.dtype | None,
) -> tuple[Option, ...]:
    split = decomposition_of(key.op)
    depth += 1 + bool(split and split.blocked)  # its pieces may be the op itself, on less
    options = []
    for i, placement, blocks in starts:
        graph = decomposed(key, fulls, read, blocks if split and split.blocked else 0)
        if graph is None:
            continue
        ins: list[Any] = ["free"] * len(fulls)
        ins[i] = placement
        ends = (axis, Ends(tuple(ins), ("free",) * len(graph.outs)))
        body = Body(graph, depth)
        found = inside(body, mesh, (*before, ends), cost, reduce_dtype)[axis]
        used = {v for c in graph.calls for v in c.ins} | set(graph.outs)
        taken = tuple(
            p if v in used else "free" for v, p in zip(graph.inputs, found.ins, strict=True)
        )
        outs = iter(found.outs)
        full_outs = tuple(next(outs) if r else R for r in read)
        options.append(Option(taken, full_outs, found.seconds, body))
    return tuple(options)


def inside(
    body: Body,
    mesh: Mesh,
    ends: tuple[tuple[str, Ends], ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> dict[str, Choice]:
    """The choices for a decomposition, axis after axis, where its ends are these."""
    return dict(_inside(body.graph, body.depth, mesh, ends, cost, reduce_dtype))


@functools.lru_cache(maxsize=4096)
def _inside(
    graph: Graph,
    depth: int,
    mesh: Mesh,
    ends: tuple[tuple[str, Ends], ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> tuple[tuple[str, Choice], ...]:
    *others, (axis, last) = ends
    before = _inside(graph, depth, mesh, tuple(others), cost, reduce_dtype) if others else ()
    bounds = Bounds(reduce_dtype=reduce_dtype)
    made = chosen(graph, mesh, axis, last, dict(before), cost, depth=depth, bounds=bounds)
    return (*before, (axis, made))


@functools.lru_cache(maxsize=4096)
def decomposed(
    key: Exact, fulls: tuple[Full, ...], read: tuple[bool, ...], blocks: int
) -> Graph | None:
    """The graph of an op's decomposition, for outputs that are read; None where it has none.

    `blocks` is the number of ranks that cut a dim, for a blocked one, else 0.
    """
    split = decomposition_of(key.op)
    if split is None:
        return None
    f = functools.partial(split.f, blocks) if split.blocked else split.f
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)

    def body(tensors: list[Any]) -> list[Any]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        made = f(*[list(a) if isinstance(a, tuple) else a for a in args], **kwargs)
        if made is NotImplemented:  # torch's own may decline arguments
            raise NotImplementedError
        return [t for t, wanted in zip(tensors_of(made), read, strict=True) if wanted]

    try:
        graph = rewritten(record(body, fulls))
    except (FdtensorError, RuntimeError, NotImplementedError):
        return None
    return None if any(_same(c, graph, key, fulls) for c in graph.calls) else graph


def _same(call: Call, graph: Graph, key: Exact, fulls: tuple[Full, ...]) -> bool:
    """Whether a piece is what was to be taken apart; the op on less is not."""
    return Exact.of(call) == key and tuple(graph.types[v.index] for v in call.ins) == fulls


@functools.lru_cache(maxsize=65536)
def move_seconds(
    full: Full, p: Any, q: Any, axis: str, count: int, cost: CostModel, wide: torch.dtype | None
) -> float:
    """The seconds that moving a tensor along one axis takes, its terms being held in `wide`."""
    mesh, felt = Mesh(**{axis: count}), overlapped(cost)
    try:
        src, dst = (TensorType(full.shape, full.dtype, Layout(mesh, [x])) for x in (p, q))
        parts = (plan(src, dst, cost=cost),) if wide is None else stages(src, dst, wide, cost)
        return sum(seconds(step, felt) for part in parts for step in part.steps) + 1e-9
    except FdtensorError:
        return 1e6  # such a placement cannot be


FIXED = 1.0
"""The seconds that are added to a move of what is to stay: less than what cannot be costs."""


def views_of_inputs(graph: Graph) -> frozenset[Var]:
    """The inputs and what are views of them."""
    found = set(graph.inputs)
    for call in graph.calls:
        if is_view(call) and call.ins[0] in found:
            found.update(v for v in call.outs if v is not None)
    return frozenset(found)


def inner_values(graph: Graph) -> set[int]:
    """The values that views make, and elementwise calls of one operand of their size.

    To move such a value costs what moving that operand does; of two, a sum may be moved for half.
    """
    found = set()
    for call in graph.calls:
        if len(call.outs) == 1 and (torch.Tag.pointwise in call.op.tags or is_view(call)):
            (v,) = call.outs
            sizes = sorted(graph.types[u.index].nbytes for u in set(call.ins))
            alone = len(sizes) < 2 or 2 * sizes[-2] < sizes[-1]
            if v is not None and alone and graph.types[v.index].nbytes == max(sizes, default=0):
                found.add(v.index)
    return found


def has_rule(call: Call) -> bool:
    """Whether an op has rows of its own, or pieces with rows that an option was made of."""
    known = rule_of(call.op) is not None or call.op in DECOMPOSITIONS
    return known or pinned(call) is not None
