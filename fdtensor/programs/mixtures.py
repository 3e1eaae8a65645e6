"""`nodes_of`: the nodes of a graph whose options are what several solutions take, on all axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fdtensor.layouts.placement import Cut, Ragged
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.programs.boundary import Boundary, boundary_of
from fdtensor.programs.choice import inside, prices_of, total_seconds
from fdtensor.programs.choices import Body, Choices, Constraints
from fdtensor.programs.ends import open_input, output_node
from fdtensor.programs.moves import IMPOSSIBLE
from fdtensor.programs.nested import place_of, shares_dim, ways_of, ways_of_end
from fdtensor.programs.nodes import Node, OnAxes, Option, Place
from fdtensor.programs.prices import Prices

__all__ = ["combined", "cuts_again", "nodes_of"]


def nodes_of(
    graph: Graph, pool: Sequence[Choices], prices: Prices, constraints: Constraints
) -> list[Node]:
    """The nodes of a graph whose options are those taken in several solutions, on all axes.

    Each is there in all orders of the axes that cut one dim, where these are priced and not known.
    """
    axes, mesh = prices.mesh.axes, prices.mesh
    nodes: list[Node] = []
    for k in range(len(graph.inputs)):
        given = dict.fromkeys(p for c in pool for p in _ends(c, "ins", k, prices, constraints))
        nodes.append(open_input(graph, k, given, mesh, constraints))
    for v, _ in graph.constants:
        (placed,) = dict.fromkeys(tuple([c[a].placements[v] for a in axes]) for c in pool)
        nodes.append(Node((), (v.index,), (Option((), (placed,), 0.0),)))
    for i, call in enumerate(graph.calls):
        options = _options(i, call, graph, pool, prices, constraints)
        outs = tuple(None if v is None else v.index for v in call.outs)
        nodes.append(Node(tuple(v.index for v in call.ins), outs, options))
    for k in range(len(graph.outs)):
        each = dict.fromkeys(p for c in pool for p in _ends(c, "outs", k, prices, constraints))
        wanted = sorted(each, key=cuts_again)  # of equal ones the first is taken
        nodes.append(output_node(graph, k, wanted, constraints, prices))
    return nodes


def _options(
    i: int,
    call: Call,
    graph: Graph,
    pool: Sequence[Choices],
    prices: Prices,
    constraints: Constraints,
) -> tuple[Option, ...]:
    """The options of call `i` that solutions take."""
    known: dict[object, list[Option]] = {}
    options: dict[object, Option] = {}
    for choices in pool:
        along = {a: choices[a].calls[i] for a in prices.mesh.axes}
        key = tuple([(o.key, isinstance(o.note, Body)) for o in along.values()])
        if key not in known:
            known[key] = combined(call, graph, along, prices, constraints)
        each = known[key]
        if choices.nested is not None:
            order = choices.nested.calls[i]
            each = [o for o in each if o.note.order == order] or each[:1]
        options |= {(key, o.note.order): o for o in each if (key, o.note.order) not in options}
    return tuple(options.values())


def _ends(
    choices: Choices,
    side: Literal["ins", "outs"],
    k: int,
    prices: Prices,
    constraints: Constraints,
) -> Sequence[tuple[Any, ...]]:
    """The places that an input or an output has in a solution, in all orders that are open."""
    if choices.nested is not None:
        return [getattr(choices.nested, side)[k]]
    places = tuple([getattr(choices[a], side)[k] for a in prices.mesh.axes])
    if not prices.nested:
        return [places]
    given = constraints.given(side, k)
    return ways_of_end(prices.mesh, places) if given is None else [place_of(given)]


def cuts_again(placements: Sequence[Place]) -> int:
    """How many axes cut a dim that another one cuts too."""
    dims = [p.dim for p in placements if isinstance(p, Cut)]
    return len(dims) - len(set(dims))


def combined(
    call: Call, graph: Graph, along: Mapping[str, Option], prices: Prices, constraints: Constraints
) -> list[Option]:
    """The options of a call that takes these on each axis, one for each order of the axes."""
    mesh, options = prices.mesh, along.values()
    ways = ways_of(call, graph.types, mesh, along, prices.nested)
    ins, outs = ways[0].ins, ways[0].outs
    body = next((o.note for o in options if isinstance(o.note, Body)), None)
    if body is None:
        work = Work(call, graph.types, prices.mesh.sizes, prices.cost_of(call))
        sides = zip((*call.ins, *call.outs), (*ins, *outs), strict=True)
        parts = (work.part(None if v is None else v.index, p) for v, p in sides)
        seconds = float(work.seconds(parts))
    elif any(map(_ragged_twice, (*ins, *outs))):
        seconds = IMPOSSIBLE
    else:
        read = [v is not None for v in call.outs]
        boundaries = tuple((a, boundary_of(o, read)) for a, o in along.items())
        seconds = _inside_seconds(body, boundaries, prices, constraints)
    return [Option(w.ins, w.outs, seconds, OnAxes(along, w.order)) for w in ways]


def _ragged_twice(placements: Sequence[Place]) -> bool:
    """Whether two axes cut one dim by sizes of their own, which no layout has."""
    return shares_dim([p for p in placements if isinstance(p, Ragged)])


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
    nodes = nodes_of(graph, [Choices(choices)], known, within)
    return total_seconds(nodes, [node.options[0] for node in nodes], known, frozenset())
