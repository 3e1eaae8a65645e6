"""`cheapest`: one option for each node of a graph, so that all of it costs the least.

An option has the placements in which a node takes its operands and gives its results. A value that
is given in one placement and taken in another must be moved; a move that several nodes need is paid
once. This is an integer program with one variable for each option and one for each move; the moves
are flows, which makes its relaxation tight. `IntegerProgram` solves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any, Literal, TypeVar

import attrs
import numpy as np

from fdtensor.layouts.placement import Placement
from fdtensor.programs.integer_program import IntegerProgram

__all__ = ["Node", "Option", "Place", "Price", "cheapest"]

P = TypeVar("P")

Place = Placement | Literal["free"]
"""A placement, or "free": an operand that no call reads, a result in any but a pending one."""


@attrs.frozen(eq=False)
class Option:
    """One way to run a node: the placements of its operands and results, and its own seconds."""

    ins: tuple[Any, ...]
    """A `Place` for each operand, or a tuple of them, one for each axis."""
    outs: tuple[Any, ...]
    seconds: float
    note: Any = None


@attrs.frozen(eq=False)
class Node:
    """A node: its operands and results, by the numbers of values, and its options."""

    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    options: tuple[Option, ...]
    uses: tuple[Any, ...] = ()
    """For each operand what prices its moves besides; none for nothing."""

    def use(self, i: int) -> Any:
        """What prices the moves of operand `i` besides the placements."""
        return self.uses[i] if self.uses else None


Price = Callable[[int, Any, Any, Any], float]
"""The seconds that moving value `v` from one placement to another takes, for a use."""


def cheapest(
    nodes: Sequence[Node],
    price: Price,
    share: Callable[[int], bool],
    inner: Collection[int] = (),
) -> list[int]:
    """The number of an option for each node: together they take the least time.

    A move is paid once for all nodes that need it where `share(v)`, else by each of them.
    Nodes come in the order of the data. Values in `inner` may as well move before the node that
    makes them: where one node alone reads such a value, both become one.
    """
    merged = contracted(nodes, inner)
    picks = _solved([node for node, _ in merged], price, share)
    options = [0] * len(nodes)
    for (_, members), pick in zip(merged, picks, strict=True):
        for n, option in members[pick]:
            options[n] = option
    return options


Members = list[tuple[tuple[int, int], ...]]
"""For each option of a merged node, the options that it stands for, each with its node."""

MOST_OPTIONS = 24
"""The most options of a merged node."""


def contracted(nodes: Sequence[Node], inner: Collection[int]) -> list[tuple[Node, Members]]:
    """The nodes, merged where an inner value joins them, with the members of each option."""
    uses = Counter(v for node in nodes for v in node.ins)
    single = {v for v in inner if uses[v] == 1}
    kept: dict[int, tuple[Node, Members]] = {}
    maker: dict[int, int] = {}
    for n, node in enumerate(nodes):
        merged: tuple[Node, Members] = node, [((n, k),) for k in range(len(node.options))]
        for v in node.ins:
            if v in single and v in maker:
                both = _joined(kept[maker[v]], merged, v)
                if both is not None:
                    del kept[maker[v]]
                    merged = both
        kept[n] = merged
        maker.update((v, n) for v in merged[0].outs if v is not None)
    return list(kept.values())


def _joined(
    first: tuple[Node, Members], then: tuple[Node, Members], v: int
) -> tuple[Node, Members] | None:
    """Two nodes as one, in which `v` does not move; None where that would lose a choice."""
    (a, a_members), (b, b_members) = first, then
    if len(a.outs) != 1:
        return None
    at = b.ins.index(v)
    placements = {option.outs[0] for option in a.options}
    if not {option.ins[at] for option in b.options} <= placements:
        return None
    best: dict[
        tuple[tuple[Any, ...], tuple[Any, ...]], tuple[float, tuple[tuple[int, int], ...]]
    ] = {}
    for i, x in enumerate(a.options):
        for j, y in enumerate(b.options):
            if x.outs[0] == y.ins[at]:
                ins = (*x.ins, *y.ins[:at], *y.ins[at + 1 :])
                total = x.seconds + y.seconds
                known = best.get((ins, y.outs))
                if known is None or known[0] > total:
                    best[ins, y.outs] = total, (*a_members[i], *b_members[j])
    if len(best) > MOST_OPTIONS:
        return None
    options = tuple(Option(ins, outs, total) for (ins, outs), (total, _) in best.items())
    uses = ()
    if a.uses or b.uses:
        of_a, of_b = ([n.use(i) for i in range(len(n.ins))] for n in (a, b))
        uses = (*of_a, *of_b[:at], *of_b[at + 1 :])
    node = Node((*a.ins, *b.ins[:at], *b.ins[at + 1 :]), b.outs, options, uses)
    return node, [members for _, members in best.values()]


def _solved(nodes: Sequence[Node], price: Price, share: Callable[[int], bool]) -> list[int]:
    if all(len(node.options) == 1 for node in nodes):
        return [0] * len(nodes)
    if len(nodes) <= 64 and prod(len(node.options) for node in nodes) <= 64:
        return _best_of_all(nodes, price, share)
    return _by_integer_program(nodes, price, share)


def _best_of_all(nodes: Sequence[Node], price: Price, share: Callable[[int], bool]) -> list[int]:
    """The best of all combinations, by a search in depth that is cut off above the best so far."""
    best: list[int] = []
    least = float("inf")

    def search(
        i: int,
        picked: list[int],
        placed: dict[int, Any],
        paid: dict[tuple[object, ...], float],
        total: float,
    ) -> None:
        nonlocal best, least
        if total >= least:
            return
        if i == len(nodes):
            best, least = list(picked), total
            return
        node = nodes[i]
        for k, option in enumerate(node.options):
            extra, moves = option.seconds, dict(paid)
            for j, (v, wanted) in enumerate(zip(node.ins, option.ins, strict=True)):
                use = node.use(j)
                key = (v, wanted, use) if share(v) else (v, wanted, i, j)
                if key not in moves:
                    moves[key] = price(v, placed[v], wanted, use)
                    extra += moves[key]
            results = zip(node.outs, option.outs, strict=True)
            after = {**placed, **{v: p for v, p in results if v is not None}}
            search(i + 1, [*picked, k], after, moves, total + extra)

    search(0, [], {}, {}, 0.0)
    return best


def _by_integer_program(
    nodes: Sequence[Node], price: Price, share: Callable[[int], bool]
) -> list[int]:
    model = IntegerProgram()
    picks = [
        [model.variable(o.seconds, whole=len(node.options) > 1) for o in node.options]
        for node in nodes
    ]
    makers: dict[int, dict[Any, list[int]]] = {}
    moves: dict[tuple[object, ...], int] = {}
    for n, (node, pick) in enumerate(zip(nodes, picks, strict=True)):
        model.constraint([(x, 1.0) for x in pick], 1, 1)
        for i, v in enumerate(node.ins):
            takers = _grouped(pick, [o.ins[i] for o in node.options])
            along = _Along(v, node.use(i), () if share(v) else (n, i))
            _flow(model, makers[v], takers, along, price, moves)
        for i, v in enumerate(node.outs):
            if v is not None:
                makers[v] = _grouped(pick, [o.outs[i] for o in node.options])
    x = model.solve()
    return [int(np.argmax([x[i] for i in pick])) for pick in picks]


def _grouped(pick: Sequence[int], placements: Sequence[P]) -> dict[P, list[int]]:
    groups: dict[P, list[int]] = {}
    for x, placement in zip(pick, placements, strict=True):
        groups.setdefault(placement, []).append(x)
    return groups


@attrs.frozen
class _Along:
    """A value on its way to a use."""

    v: int
    use: Any
    """What prices its moves besides."""
    alone: tuple[int, ...]
    """The use itself, where it shares no moves with others."""


def _flow(
    model: IntegerProgram,
    makers: dict[Any, list[int]],
    takers: dict[Any, list[int]],
    along: _Along,
    price: Price,
    moves: dict[tuple[object, ...], int],
) -> None:
    """Adds the moves of a value to one use: a flow from its makers' placements to its takers'.

    `makers` and `takers` are the variables of options by placement.
    """
    v, use = along.v, along.use
    prices = {(p, q): price(v, p, q, use) for p in makers for q in takers}
    if not any(prices.values()):
        return

    def move(p: Any, q: Any) -> int:
        key = (v, p, q, use, along.alone)
        if key not in moves:
            moves[key] = model.variable(prices[p, q])
        return moves[key]

    def at_least(x: int, options: Sequence[int]) -> None:
        model.constraint([(x, 1.0), *((y, -1.0) for y in options)], 0, np.inf)

    if len(makers) == 1 or len(takers) == 1:
        for (p, q), seconds in prices.items():
            if seconds:
                at_least(move(p, q), takers[q] if len(makers) == 1 else makers[p])
        return
    flow = {pair: model.variable(0.0) for pair in prices}
    for p, options in makers.items():
        model.constraint([(flow[p, q], 1.0) for q in takers] + [(x, -1.0) for x in options], 0, 0)
    for q, options in takers.items():
        model.constraint([(flow[p, q], 1.0) for p in makers] + [(x, -1.0) for x in options], 0, 0)
    for (p, q), y in flow.items():
        if prices[p, q]:
            at_least(move(p, q), [y])
