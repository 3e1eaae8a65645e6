"""`cheapest`: one option for each node of a graph, so that all of it costs the least.

An option has the placements in which a node takes its operands and gives its results. A value that
is given in one placement and taken in another must be moved; a move that several nodes need is paid
once. Few combinations are searched, more of them are an integer program (`flows`). In large graphs
nodes that stand in the same place of repeated layers choose alike (`repeats`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

from fdtensor.layouts.kinds import is_tuple
from fdtensor.layouts.placement import StridedShard
from fdtensor.programs.flows import Picked, solved_by_flows
from fdtensor.programs.integer_program import IntegerProgram
from fdtensor.programs.nodes import Node, Option, Price
from fdtensor.programs.repeats import classes

__all__ = ["cheapest"]

MANY = 200
"""The number of nodes from which on those that look alike choose alike."""


def cheapest(
    nodes: Sequence[Node],
    price: Price,
    share: Callable[[int], bool],
    inner: Collection[int] = (),
    whole: bool = True,
    before: IntegerProgram | None = None,
) -> Picked:
    """The number of an option for each node: together they take the least time.

    A move is paid once for all nodes that need it where `share(v)`, else by each of them.
    Nodes come in the order of the data. Values in `inner` may as well move before the node that
    makes them: where one node alone reads such a value, both become one. Not `whole` they may be
    what the relaxation of an integer program takes most of each node. The `program` of what was
    picked `before`, by other prices, is gone on from.
    """
    merged = contracted(nodes, inner)
    picked = _solved([node for node, _ in merged], price, share, whole, before)
    options = [0] * len(nodes)
    for (_, members), pick in zip(merged, picked.options, strict=True):
        for n, option in members[pick]:
            options[n] = option
    return Picked(options, picked.whole, picked.program)


Members = list[tuple[tuple[int, int], ...]]
"""For each option of a merged node, the options that it stands for, each with its node."""

MOST_OPTIONS = 24
"""The most options of a merged node."""

MANY_RUNS = 1024
"""From how many runs of a block on a value does not move before it is viewed otherwise."""


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
                if _in_runs(x.ins) and not _in_runs(x.outs):
                    return None  # it had better move after `a` than before
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


def _in_runs(placements: Iterable[Any]) -> bool:
    """Whether one of them cuts a dim into very many runs; a placement may be one for each axis."""
    flat: list[Any] = [q for p in placements for q in (p if is_tuple(p) else (p,))]
    return any(isinstance(q, StridedShard) and q.split_factor >= MANY_RUNS for q in flat)


def _solved(
    nodes: Sequence[Node],
    price: Price,
    share: Callable[[int], bool],
    whole: bool,
    before: IntegerProgram | None,
) -> Picked:
    if all(len(node.options) == 1 for node in nodes):
        return Picked([0] * len(nodes), True)
    if len(nodes) <= 64 and prod(len(node.options) for node in nodes) <= 64:
        return Picked(_best_of_all(nodes, price, share), True)
    first: Sequence[int] = range(len(nodes))
    if len(nodes) >= MANY:
        first = classes(nodes, lambda v: (price.kind(v), share(v)))
    return solved_by_flows(nodes, first, price, share, whole, before)


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
