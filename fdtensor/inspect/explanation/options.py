"""`decisions`: what the options of each call of a traced function cost, on each axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.lift import layout_of
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import plan
from fdtensor.programs.assembly import Origin
from fdtensor.programs.choices import Choice
from fdtensor.programs.nodes import Node, Option, Place, Placements
from fdtensor.programs.prices import AxisPrices
from fdtensor.programs.problem import ProblemBuilder
from fdtensor.programs.program import Program
from fdtensor.programs.regather import views_of_inputs

__all__ = ["Decision", "Priced", "decisions"]

IMPOSSIBLE = 1e5
"""Seconds that only a move that cannot be is given."""


@attrs.frozen
class Priced:
    """An option of a call on one axis, and what it costs while everything else stays."""

    option: Option
    compute: float
    """Seconds of the op itself, or of its decomposition with the moves inside."""
    moves: float
    """Seconds of the moves that nobody else needs: of its operands, and of its results."""
    received_bytes: int
    """The bytes per rank of these moves."""
    tolls: int = 0
    """How much of what was given it undoes, where that is followed."""

    @property
    def seconds(self) -> float:
        """Compute and moves."""
        return self.compute + self.moves

    @property
    def rank(self) -> tuple[int, float]:
        """What options are compared by."""
        return self.tolls, self.seconds


@attrs.frozen
class Decision:
    """The option that call `call` of a graph took on `axis`, and its others, cheapest first."""

    call: int
    axis: str
    taken: Priced
    others: tuple[Priced, ...]


def decisions(program: Program) -> list[Decision]:
    """The decisions of a traced program, in the order of its calls, for axes of several ranks."""
    origin: Origin = program.origin
    rows: list[Decision] = []
    for axis, choice in origin.choices.items():
        if program.mesh.axis_size(axis) > 1:
            rows += _on(axis, choice, origin)
    return sorted(rows, key=lambda d: d.call)


def _on(axis: str, choice: Choice, origin: Origin) -> list[Decision]:
    problem = choice.problem
    assert problem is not None, "the choice for a whole graph keeps what it was taken from"
    uses = _Uses(choice, origin, problem)
    rows = []
    for i, (node, taken) in enumerate(_calls(choice, origin, problem)):
        priced = [_priced(o, i, node, uses, problem.prices) for o in node.options]
        (of,) = [p for p in priced if _same(p.option, taken)]
        others = [p for p in priced if p is not of and p.moves < IMPOSSIBLE]
        rows.append(Decision(i, axis, of, tuple(sorted(others, key=lambda p: p.rank))))
    return rows


def _same(a: Option, b: Option) -> bool:
    return (a.ins, a.outs) == (b.ins, b.outs)


def _calls(
    choice: Choice, origin: Origin, problem: ProblemBuilder
) -> Iterator[tuple[Node, Option]]:
    """The options that there were for each call, and the one taken."""
    start = len(origin.graph.inputs) + len(origin.graph.constants)
    nodes = problem.nodes[start : start + len(choice.calls)]
    return zip(nodes, choice.calls, strict=True)


class _Uses:
    """In which placement each value is made, and in which each call and output takes it."""

    def __init__(self, choice: Choice, origin: Origin, problem: ProblemBuilder) -> None:
        graph = origin.graph
        again = views_of_inputs(graph) if origin.regather else ()
        self.again = {v.index for v in again}
        """The values that are moved anew for each use."""
        self.made = {v.index: p for v, p in choice.placements.items()}
        self.takers: dict[int, list[tuple[int, Place, Any]]] = {}
        calls = [(i, *pair) for i, pair in enumerate(_calls(choice, origin, problem))]
        ends = problem.nodes[len(problem.nodes) - len(graph.outs) :]
        outs = [
            (-1, n, Option((q,) * len(n.ins), (), 0.0))
            for n, q in zip(ends, choice.outs, strict=True)
        ]
        for i, node, option in (*calls, *outs):
            for j, (v, wanted) in enumerate(zip(node.ins, option.ins, strict=True)):
                self.takers.setdefault(v, []).append((i, wanted, node.use(j)))

    def moves(self, call: int, node: Node, option: Option) -> list[Move]:
        """The moves that only this call needs if it takes this option."""
        needed: list[Move] = []
        for j, (v, q) in enumerate(zip(node.ins, option.ins, strict=True)):
            use = node.use(j)
            others = [(q, use) for i, q, use in self.takers[v] if i != call]
            if v in self.again or (q, use) not in others:
                needed.append((v, self.made[v], q, use))
        for v, p in zip(node.outs, option.outs, strict=True):
            for _, q, use in self.takers.get(-1 if v is None else v, ()):
                needed.append((v, p, q, use))  # type: ignore[arg-type]
        once = list(dict.fromkeys(move for move in needed if move[0] not in self.again))
        return once + [move for move in needed if move[0] in self.again]


Move = tuple[int, Placement, Place, Any]
"""A value, its placements before and after, and the use that prices it."""


def _priced(option: Option, call: int, node: Node, uses: _Uses, prices: AxisPrices) -> Priced:
    moves = uses.moves(call, node, option)
    whole = prices.prices
    spent = sum(prices(*move) for move in moves)
    ends = [(whole.fulls[v], *prices.ends(v, p, q, use)) for v, p, q, use in moves]
    received = sum(_bytes(full, whole.mesh, src, dst, whole.cost) for full, src, dst in ends)
    if whole.tolls is None:
        return Priced(option, option.seconds, spent, received)
    (inside, compute), (outside, spent) = map(whole.tolls.apart, (option.seconds, spent))
    return Priced(option, compute, spent, received, inside + outside)


@remembered(65536)
def _bytes(
    full: Full, mesh: Mesh, src: Placements, wanted: tuple[Place, ...], cost: CostModel
) -> int:
    """The bytes that a rank receives when a tensor moves; 0 where it cannot."""
    dst = tuple([p if q == "free" else q for p, q in zip(src, wanted, strict=True)])
    try:
        before = TensorType(full.shape, full.dtype, layout_of(mesh, src))
        return plan(before, layout_of(mesh, dst), cost=cost).received_bytes
    except FdtensorError:
        return 0
