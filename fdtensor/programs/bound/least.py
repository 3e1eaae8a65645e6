"""`bound_of`: how far the choice of layouts of a graph is at most from the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from fdtensor.ops.graph import Graph
from fdtensor.programs.bound.search import Best, Search
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.choice import problem_of, regathered
from fdtensor.programs.choices import Choice, Choices, Constraints
from fdtensor.programs.mixtures import nodes_of
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.prices import Prices

__all__ = ["bound_of", "search_from"]


def bound_of(choices: Choices, regather: bool = False) -> Best:
    """A choice on each axis, and what the best one takes at least, by the prices of the choice.

    The best is that of all combinations of the options of each call on each axis.
    """
    first = next(iter(choices.values())).problem
    assert first is not None
    graph, prices = first.graph, attrs.evolve(first.prices.prices, nested=True)
    constraints = attrs.evolve(first.constraints, holding=0.0)
    boundaries = {a: c.problem.boundary for a, c in choices.items() if c.problem is not None}
    nodes = nodes_of(graph, [choices], prices, constraints)
    return search_from(graph, boundaries, nodes, choices, prices, constraints, regather).best()


def search_from(
    graph: Graph,
    boundaries: Mapping[str, Boundary],
    nodes: Sequence[Node],
    choices: Mapping[str, Choice],
    prices: Prices,
    constraints: Constraints,
    regather: bool,
) -> Search:
    """The search that begins at a choice on each axis; `nodes` have its options on all axes."""
    along: list[list[list[Option]]] = [[] for _ in nodes]
    for axis, choice in choices.items():
        alone = problem_of(graph, axis, boundaries[axis], {}, prices, constraints).nodes
        many = prices.mesh.axis_size(axis) > 1  # along one rank all options are the same
        for column, node, own in zip(along, alone, _taken(choice, alone), strict=True):
            others = [o for o in node.options if o.key != own.key] if many else []
            column.append([own, *others])
    again = regathered(graph) if regather else frozenset[int]()
    return Search(graph, nodes, along, prices, constraints, again)


def _taken(choice: Choice, alone: Sequence[Node]) -> list[Option]:
    """The option of each node on one axis."""
    first, last = alone[: len(choice.ins)], alone[len(alone) - len(choice.outs) :]
    ins = [Option((), (p,) * len(n.outs), 0.0) for p, n in zip(choice.ins, first, strict=True)]
    outs = [Option((q,) * len(n.ins), (), 0.0) for q, n in zip(choice.outs, last, strict=True)]
    constants = [node.options[0] for node in alone[len(ins) : len(alone) - len(outs)]]
    return [*ins, *constants[: len(constants) - len(choice.calls)], *choice.calls, *outs]
