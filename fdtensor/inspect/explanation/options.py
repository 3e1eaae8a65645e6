"""`decisions`: what the options of each call of a traced function cost, on each axis."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any

import attrs

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import plan
from fdtensor.programs.assembly import Origin
from fdtensor.programs.prices import Prices
from fdtensor.programs.problem import Choice
from fdtensor.programs.program import Program
from fdtensor.programs.regather import views_of_inputs
from fdtensor.programs.solver import Node, Option

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

    @property
    def seconds(self) -> float:
        """Compute and moves."""
        return self.compute + self.moves


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
    uses = _Uses(choice, origin)
    rows = []
    for i, (node, taken) in enumerate(_calls(choice, origin)):
        priced = [_priced(o, i, node, uses, choice.prices) for o in node.options]
        (of,) = [p for p in priced if p.option is taken]
        others = [p for p in priced if p is not of and p.moves < IMPOSSIBLE]
        rows.append(Decision(i, axis, of, tuple(sorted(others, key=lambda p: p.seconds))))
    return rows


def _calls(choice: Choice, origin: Origin) -> Iterator[tuple[Node, Option]]:
    """The options that there were for each call, and the one taken."""
    start = len(origin.graph.inputs) + len(origin.graph.constants)
    nodes = choice.nodes[start : start + len(choice.calls)]
    return zip(nodes, choice.calls, strict=True)


class _Uses:
    """In which placement each value is made, and in which each call and output takes it."""

    def __init__(self, choice: Choice, origin: Origin) -> None:
        graph = origin.graph
        again = views_of_inputs(graph) if origin.regather else ()
        self.again = {v.index for v in again}
        """The values that are moved anew for each use."""
        self.made = {v.index: p for v, p in choice.placements.items()}
        self.takers: dict[int, list[tuple[int, Hashable]]] = {}
        for i, (node, option) in enumerate(_calls(choice, origin)):
            for v, wanted in zip(node.ins, option.ins, strict=True):
                self.takers.setdefault(v, []).append((i, wanted))
        for v, wanted in zip(graph.outs, choice.outs, strict=True):
            self.takers.setdefault(v.index, []).append((-1, wanted))

    def moves(self, call: int, node: Node, option: Option) -> list[tuple[int, Any, Any]]:
        """The moves that only this call needs if it takes this option: value, from, to."""
        needed = []
        for v, wanted in zip(node.ins, option.ins, strict=True):
            if v in self.again or not any(i != call and p == wanted for i, p in self.takers[v]):
                needed.append((v, self.made[v], wanted))
        for v, placement in zip(node.outs, option.outs, strict=True):
            if v is not None:
                needed += [(v, placement, wanted) for _, wanted in self.takers.get(v, ())]
        needed = [(v, p, q) for v, p, q in needed if q not in (p, "free")]
        once = dict.fromkeys(move for move in needed if move[0] not in self.again)
        return [*once, *(move for move in needed if move[0] in self.again)]


def _priced(option: Option, call: int, node: Node, uses: _Uses, prices: Prices) -> Priced:
    moves = uses.moves(call, node, option)
    spent = sum(prices(v, p, q) for v, p, q in moves)
    received = sum(
        _bytes(prices.moved(v, p, q), p, q, prices.axis, prices.count, prices.cost)
        for v, p, q in moves
    )
    return Priced(option, option.seconds, spent, received)


@functools.lru_cache(maxsize=65536)
def _bytes(full: Full, p: Any, q: Any, axis: str, count: int, cost: CostModel) -> int:
    """The bytes that a rank receives when a tensor moves along one axis; 0 where it cannot."""
    mesh = Mesh(**{axis: count})
    try:
        src = TensorType(full.shape, full.dtype, Layout(mesh, [p]))
        return plan(src, Layout(mesh, [q]), cost=cost).received_bytes
    except FdtensorError:
        return 0
