"""`in_orders`: the nodes of a graph with the orders of the axes that cut one dim.

Without them every move is priced as if the order suited it. Most graphs have a solution that no
order makes dearer; elsewhere the nodes at the ends of moves that are dearer get all orders.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import attrs

from fdtensor.ops.graph import Call, Graph
from fdtensor.programs.choices import Constraints
from fdtensor.programs.nested import place_of, ways_of, ways_of_end
from fdtensor.programs.nodes import Node, OnAxes, Option
from fdtensor.programs.prices import Prices

__all__ = ["in_orders", "reordering"]

NOTHING = 2e-9
"""The seconds that two moves may differ by and count as the same."""

Side = Literal["ins", "outs"]


def in_orders(
    graph: Graph,
    nodes: Sequence[Node],
    taken: Sequence[Option],
    every: Collection[int],
    prices: Prices,
    constraints: Constraints,
) -> list[Node]:
    """The nodes with the taken option of each in all orders; those of `every` with all options so.

    The other options are in the order of the mesh.
    """
    first, last = len(graph.inputs), len(nodes) - len(graph.outs)
    inner: list[Call | None] = [*[None] * len(graph.constants), *graph.calls]
    ordered: list[Node] = []
    for n, (node, own) in enumerate(zip(nodes, taken, strict=True)):
        options: dict[object, Option] = {}
        for option in (own, *node.options):
            if n < first:
                ways = _ways_of_end(option, prices, constraints, "ins", n)
            elif n >= last:
                ways = _ways_of_end(option, prices, constraints, "outs", n - last)
            else:
                ways = _ways(option, inner[n - first], graph, prices)
            for way in ways if option is own or n in every else ways[:1]:
                options.setdefault(way.key, way)
        ordered.append(attrs.evolve(node, options=tuple(options.values())))
    return ordered


def _ways(option: Option, call: Call | None, graph: Graph, prices: Prices) -> list[Option]:
    if call is None:
        return [option]
    along = option.note.along
    return [
        Option(way.ins, way.outs, option.seconds, OnAxes(along, way.order))
        for way in ways_of(call, graph.types, prices.mesh, along, nested=True)
    ]


def _ways_of_end(
    option: Option, prices: Prices, constraints: Constraints, side: Side, k: int
) -> list[Option]:
    """An option of an input or an output, in all orders where it has no layout."""
    given = constraints.given(side, k)
    (places,) = {*option.ins, *option.outs}
    each = ways_of_end(prices.mesh, tuple(places)) if given is None else [place_of(given)]
    ins, outs = len(option.ins), len(option.outs)
    return [Option((p,) * ins, (p,) * outs, option.seconds, option.note) for p in each]


def reordering(nodes: Sequence[Node], taken: Sequence[Option], prices: Prices) -> set[int]:
    """The numbers of the nodes at the ends of moves that an order makes dearer."""
    free = attrs.evolve(prices, nested=False)
    maker: dict[int, tuple[int, Any]] = {}
    ends: set[int] = set()
    for n, (node, option) in enumerate(zip(nodes, taken, strict=True)):
        for v, q in zip(node.ins, option.ins, strict=True):
            m, p = maker[v]
            if prices(v, p, q) > free(v, tuple(p), tuple(q)) + NOTHING:
                ends |= {m, n}
        for v, p in zip(node.outs, option.outs, strict=True):
            if v is not None:
                maker[v] = n, p
    return ends
