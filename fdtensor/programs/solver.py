"""`cheapest`: one option for each node of a graph, so that all of it costs the least.

An option says in which placement a node takes its values and gives its results. A value that is
given in one placement and taken in another must be moved; a move that several nodes need is paid
once. This is an integer program with one variable an option and one a move; the moves are flows,
which makes its relaxation tight. HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual
revised simplex method, arXiv 1503.01889).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from math import prod
from typing import Any

import attrs
import numpy as np

__all__ = ["Node", "Option", "cheapest"]


@attrs.frozen(eq=False)
class Option:
    """One way to run a node: placements of what it takes and gives, and its own seconds."""

    ins: tuple[Hashable, ...]
    outs: tuple[Hashable, ...]
    seconds: float
    note: Any = None


@attrs.frozen(eq=False)
class Node:
    """A node: the values that it takes and gives, by number, and its options."""

    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    options: tuple[Option, ...]


Price = Callable[[int, Any, Any], float]
"""The seconds that moving value `v` from one placement to another takes."""


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
    found = [0] * len(nodes)
    for (_, members), pick in zip(merged, picks, strict=True):
        for n, option in members[pick]:
            found[n] = option
    return found


Members = list[tuple[tuple[int, int], ...]]
"""For each option of a merged node, the options that it stands for, each with its node."""

MOST_OPTIONS = 24


def contracted(nodes: Sequence[Node], inner: Collection[int]) -> list[tuple[Node, Members]]:
    """The nodes, those merged that are joined by an inner value, with what each option means."""
    uses = Counter(v for node in nodes for v in node.ins)
    single = {v for v in inner if uses[v] == 1}
    kept: dict[int, tuple[Node, Members]] = {}
    maker: dict[int, int] = {}
    for n, node in enumerate(nodes):
        here: tuple[Node, Members] = node, [((n, k),) for k in range(len(node.options))]
        for v in node.ins:
            if v in single and v in maker:
                both = _joined(kept[maker[v]], here, v)
                if both is not None:
                    del kept[maker[v]]
                    here = both
        kept[n] = here
        maker.update((v, n) for v in here[0].outs if v is not None)
    return list(kept.values())


def _joined(
    first: tuple[Node, Members], then: tuple[Node, Members], v: int
) -> tuple[Node, Members] | None:
    """Two nodes as one, where `v` comes out as it goes in; None where that would lose a choice."""
    (a, a_means), (b, b_means) = first, then
    if len(a.outs) != 1:
        return None
    at = b.ins.index(v)
    made = {option.outs[0] for option in a.options}
    if not {option.ins[at] for option in b.options} <= made:
        return None
    best: dict[Any, tuple[float, Any]] = {}
    for i, x in enumerate(a.options):
        for j, y in enumerate(b.options):
            if x.outs[0] == y.ins[at]:
                ins = (*x.ins, *y.ins[:at], *y.ins[at + 1 :])
                total = x.seconds + y.seconds
                known = best.get((ins, y.outs))
                if known is None or known[0] > total:
                    best[ins, y.outs] = total, (*a_means[i], *b_means[j])
    if len(best) > MOST_OPTIONS:
        return None
    options = tuple(Option(ins, outs, total) for (ins, outs), (total, _) in best.items())
    node = Node((*a.ins, *b.ins[:at], *b.ins[at + 1 :]), b.outs, options)
    return node, [means for _, means in best.values()]


def _solved(nodes: Sequence[Node], price: Price, share: Callable[[int], bool]) -> list[int]:
    if all(len(node.options) == 1 for node in nodes):
        return [0] * len(nodes)
    if len(nodes) <= 64 and prod(len(node.options) for node in nodes) <= 64:
        return _tried(nodes, price, share)
    return _programmed(nodes, price, share)


def _tried(nodes: Sequence[Node], price: Price, share: Callable[[int], bool]) -> list[int]:
    """The best of all combinations."""
    best, least = [], float("inf")

    def go(i: int, picked: list[int], held: dict[int, Any], paid: dict[Any, float], total: float):
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
                key = (v, wanted) if share(v) else (v, wanted, i, j)
                if key not in moves:
                    moves[key] = price(v, held[v], wanted)
                    extra += moves[key]
            now = {
                **held,
                **{v: p for v, p in zip(node.outs, option.outs, strict=True) if v is not None},
            }
            go(i + 1, [*picked, k], now, moves, total + extra)

    go(0, [], {}, {}, 0.0)
    return best


class _Model:
    """The rows and columns of an integer program as they are found."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, whole: bool = False) -> int:
        self.costs.append(cost)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def constraint(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.low)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> np.ndarray:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self.low), len(self.costs))
        places = np.array([self.rows, self.columns], np.int32)  # scipy 1.11 takes no others
        matrix = csr_array((self.values, tuple(places)), shape=shape)
        costs, whole = np.array(self.costs) * 1e6, np.array(self.whole)
        rows = LinearConstraint(matrix, self.low, self.high)  # type: ignore[arg-type]
        found = milp(costs, bounds=Bounds(0, 1), constraints=rows)  # mostly whole as it is
        if found.x is None or np.any(np.abs(found.x - np.round(found.x))[whole > 0] > 1e-6):
            options = {"mip_rel_gap": 1e-4, "time_limit": 120.0}
            found = milp(
                costs, integrality=whole, bounds=Bounds(0, 1), constraints=rows, options=options
            )
        assert found.x is not None, found.message
        return found.x


def _programmed(nodes: Sequence[Node], price: Price, share: Callable[[int], bool]) -> list[int]:
    model = _Model()
    picks = [
        [model.variable(o.seconds, whole=len(node.options) > 1) for o in node.options]
        for node in nodes
    ]
    made: dict[int, dict[Any, list[int]]] = {}
    moves: dict[Any, int] = {}
    for n, (node, pick) in enumerate(zip(nodes, picks, strict=True)):
        model.constraint([(x, 1.0) for x in pick], 1, 1)
        for i, v in enumerate(node.ins):
            wanted = _grouped(pick, [o.ins[i] for o in node.options])
            _flow(model, made[v], wanted, v, price, moves, () if share(v) else (n, i))
        for i, v in enumerate(node.outs):
            if v is not None:
                made[v] = _grouped(pick, [o.outs[i] for o in node.options])
    x = model.solve()
    return [int(np.argmax([x[i] for i in pick])) for pick in picks]


def _grouped(pick: Sequence[int], placements: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for x, placement in zip(pick, placements, strict=True):
        groups.setdefault(placement, []).append(x)
    return groups


def _flow(
    model: _Model,
    made: dict[Any, list[int]],
    wanted: dict[Any, list[int]],
    v: int,
    price: Price,
    moves: dict[Any, int],
    who: tuple[int, ...],
) -> None:
    """What moving value `v` to one use costs: a flow from how it is made to how it is taken."""
    prices = {(p, q): 0.0 if p == q else price(v, p, q) for p in made for q in wanted}
    if not any(prices.values()):
        return

    def move(p: Any, q: Any) -> int:
        key = (v, p, q, *who)
        if key not in moves:
            moves[key] = model.variable(prices[p, q])
        return moves[key]

    if len(made) == 1:
        (p,) = made
        for q, takers in wanted.items():
            if prices[p, q]:
                model.constraint([(move(p, q), 1.0), *((x, -1.0) for x in takers)], 0, np.inf)
        return
    if len(wanted) == 1:
        (q,) = wanted
        for p, makers in made.items():
            if prices[p, q]:
                model.constraint([(move(p, q), 1.0), *((x, -1.0) for x in makers)], 0, np.inf)
        return
    flow = {pair: model.variable(0.0) for pair in prices}
    for p, makers in made.items():
        model.constraint([(flow[p, q], 1.0) for q in wanted] + [(x, -1.0) for x in makers], 0, 0)
    for q, takers in wanted.items():
        model.constraint([(flow[p, q], 1.0) for p in made] + [(x, -1.0) for x in takers], 0, 0)
    for (p, q), y in flow.items():
        if prices[p, q]:
            model.constraint([(move(p, q), 1.0), (y, -1.0)], 0, np.inf)
