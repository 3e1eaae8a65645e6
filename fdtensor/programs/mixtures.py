"""`nodes_of`: the nodes of a graph whose options are what several solutions take, on all axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fdtensor.layouts.placement import Cut
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.programs.boundary import Boundary, boundary_of
from fdtensor.programs.choice import inside, prices_of, total_seconds
from fdtensor.programs.choices import Body, Choice, Constraints
from fdtensor.programs.ends import open_input, output_node
from fdtensor.programs.nodes import Node, Option, Place
from fdtensor.programs.prices import Prices

__all__ = ["combined", "nodes_of"]

Choices = Mapping[str, Choice]
"""The choice on each axis."""


def nodes_of(
    graph: Graph, pool: Sequence[Choices], prices: Prices, constraints: Constraints
) -> list[Node]:
    """The nodes of a graph whose options are those taken in several solutions, on all axes."""
    axes = prices.mesh.axes
    nodes: list[Node] = []
    for k in range(len(graph.inputs)):
        given = dict.fromkeys(tuple([c[a].ins[k] for a in axes]) for c in pool)
        nodes.append(open_input(graph, k, given, prices.mesh, constraints))
    for v, _ in graph.constants:
        (placed,) = dict.fromkeys(tuple([c[a].placements[v] for a in axes]) for c in pool)
        nodes.append(Node((), (v.index,), (Option((), (placed,), 0.0),)))
    for i, call in enumerate(graph.calls):
        known: dict[object, Option] = {}
        for choices in pool:
            along = {a: choices[a].calls[i] for a in axes}
            key = tuple([(o.ins, o.outs, isinstance(o.note, Body)) for o in along.values()])
            if key not in known:
                known[key] = combined(call, graph, along, prices, constraints)
        outs = tuple(None if v is None else v.index for v in call.outs)
        nodes.append(Node(tuple(v.index for v in call.ins), outs, tuple(known.values())))
    for k in range(len(graph.outs)):
        each = dict.fromkeys(tuple([c[a].outs[k] for a in axes]) for c in pool)
        wanted = sorted(each, key=_cuts_again)  # of equal ones the first is taken
        nodes.append(output_node(graph, k, wanted, constraints, prices))
    return nodes


def _cuts_again(placements: Sequence[Place]) -> int:
    """How many axes cut a dim that another one cuts too."""
    dims = [p.dim for p in placements if isinstance(p, Cut)]
    return len(dims) - len(set(dims))


def combined(
    call: Call, graph: Graph, along: Mapping[str, Option], prices: Prices, constraints: Constraints
) -> Option:
    """The option of a call that takes these on each axis."""
    options = along.values()
    ins = tuple(zip(*(o.ins for o in options), strict=True))
    outs = tuple(zip(*(o.outs for o in options), strict=True))
    body = next((o.note for o in options if isinstance(o.note, Body)), None)
    if body is None:
        work = Work(call, graph.types, prices.mesh.sizes, prices.cost_of(call))
        sides = zip((*call.ins, *call.outs), (*ins, *outs), strict=True)
        seconds = work.seconds(work.part(None if v is None else v.index, p) for v, p in sides)
    else:
        read = [v is not None for v in call.outs]
        boundaries = tuple((a, boundary_of(o, read)) for a, o in along.items())
        seconds = _inside_seconds(body, boundaries, prices, constraints)
    return Option(ins, outs, seconds, dict(along))


def _inside_seconds(
    body: Body,
    boundaries: tuple[tuple[str, Boundary], ...],
    prices: Prices,
    constraints: Constraints,
) -> float:
    """The seconds of a decomposition on all axes."""
    graph, mesh, cost = body.graph, prices.mesh, prices.cost
    choices = inside(body, mesh, boundaries, cost, constraints.inside)
    within = constraints.inside.constraints
    known = prices_of(graph, mesh, cost, within)
    nodes = nodes_of(graph, [choices], known, within)
    return total_seconds(nodes, [node.options[0] for node in nodes], known, frozenset())
