"""`chosen`: a row for every call of a graph on one axis, so that the whole takes the least time.

The other axes have their choices, and leave blocks of the values. Every call has options: the rows
of its rule, and decompositions whose pieces have rows. The moves between them are priced by the
planner, and `solver.cheapest` takes the best together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Placement
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.decompositions import decomposition_of, own_decomposition
from fdtensor.ops.graph import Call, Full, Graph, Var, is_view
from fdtensor.ops.loop_ops import LOOP_IN
from fdtensor.ops.notation.core import R, rule_of
from fdtensor.ops.pins import pinned
from fdtensor.ops.rows import CallKey
from fdtensor.plans.cost import CostModel, linked
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.choices import UNCONSTRAINED, Body, Choice, Constraints, Inside
from fdtensor.programs.decomposed import decomposed
from fdtensor.programs.ends import tie
from fdtensor.programs.loops import made_in_steps
from fdtensor.programs.nodes import Node, Option, Place, Price
from fdtensor.programs.prices import STEPS, Prices, moves_of
from fdtensor.programs.problem import ProblemBuilder
from fdtensor.programs.regather import views_of_inputs
from fdtensor.programs.solver import cheapest

__all__ = [
    "choice_of",
    "chosen",
    "has_rule",
    "inner_values",
    "inside",
    "prices_of",
    "problem_of",
    "regathered",
    "total_seconds",
]


def chosen(
    graph: Graph,
    axis: str,
    boundary: Boundary,
    before: Mapping[str, Choice],
    prices: Prices,
    constraints: Constraints = UNCONSTRAINED,
    regather: bool = False,
    depth: int = 0,
) -> Choice:
    """The cheapest options of a graph on one axis, given those of the axes `before`.

    Of one op of many most moves are priced by the bytes they need at least, which takes no plans.
    """
    alike = _alike(axis, prices.mesh, prices.cost, depth, constraints.inside) if depth else None
    problem = problem_of(graph, axis, boundary, before, prices, constraints, depth, options=alike)
    again = regathered(graph) if regather else frozenset[int]()
    inner, nodes = inner_values(graph), problem.nodes
    least = problem.prices.least
    known = least is None  # until then the relaxation tells which moves to price
    while True:
        picked = cheapest(nodes, problem.prices, lambda v: v not in again, inner, known)
        taken = [node.options[k] for node, k in zip(nodes, picked.options, strict=True)]
        moves: Any = moves_of(nodes, taken)  # along this axis
        ends = ((v, *problem.prices.ends(v, p, q)) for v, p, q in moves)
        known = least is None or least.knew(ends)
        if known and picked.whole:
            break
    seconds = total_seconds(nodes, taken, problem.prices, again)
    choice = choice_of(graph, nodes, taken, seconds)
    return choice if depth else attrs.evolve(choice, problem=problem)


def problem_of(
    graph: Graph,
    axis: str,
    boundary: Boundary,
    before: Mapping[str, Choice],
    prices: Prices,
    constraints: Constraints,
    depth: int = 0,
    at_uses: bool = False,
    taken: Sequence[Option] = (),
    options: dict[Hashable, tuple[Option, ...]] | None = None,
) -> ProblemBuilder:
    """What there is to choose from on one axis."""
    known = graph, axis, boundary, before, prices, constraints, _body_options
    return ProblemBuilder(*known, depth, at_uses, taken, options)


@remembered(64)
def _alike(
    axis: str, mesh: Mesh, cost: CostModel, depth: int, within: Inside
) -> dict[Hashable, tuple[Option, ...]]:
    """The options of calls by what they depend on, which problems of decompositions add to.

    A decomposition is chosen for many placements of its operands, and few of its calls feel that.
    """
    del axis, mesh, cost, depth, within
    return {}


def choice_of(
    graph: Graph, nodes: Sequence[Node], taken: Sequence[Option], seconds: float
) -> Choice:
    """The choice of these options of the nodes of a graph, on one axis."""
    ins, calls = len(graph.inputs), len(graph.calls)
    skipped = ins + len(graph.constants)
    placements: dict[Var, Placement] = {}
    for node, option in zip(nodes, taken, strict=True):
        for v, p in zip(node.outs, option.outs, strict=True):
            if v is not None:
                placements[Var(v)] = p
    return Choice(
        tuple(o.outs[0] for o in taken[:ins]),
        tuple(taken[skipped : skipped + calls]),
        tuple(o.ins[0] for o in taken[skipped + calls :]),
        seconds,
        placements,
    )


def prices_of(graph: Graph, mesh: Mesh, cost: CostModel, constraints: Constraints) -> Prices:
    """The prices of the moves of a graph's values."""
    checked = frozenset(v.index for call in graph.calls if not call.outs for v in call.ins)
    fixed = frozenset(v.index for v in constraints.fixed)
    cost = linked(cost, mesh)
    fulls, tied = graph.types, frozenset[int]()
    if constraints.ties:
        fulls = (*fulls, *(graph.types[v.index] for v in graph.inputs))
        tied = frozenset(tie(graph, k) for k in constraints.ties.values())
    in_loops = [call.outs[1] for call in graph.calls if call.op is LOOP_IN]
    tied |= {v.index for v in in_loops if v is not None}
    return Prices(
        mesh,
        cost,
        fulls,
        fixed,
        checked,
        constraints.reduce_dtype,
        tied,
        constraints.tolls,
        made_in_steps(graph, STEPS),
    )


def regathered(graph: Graph) -> frozenset[int]:
    """The numbers of the inputs of a graph and of all views of them."""
    return frozenset(v.index for v in views_of_inputs(graph))


def total_seconds(
    nodes: Sequence[Node], taken: Sequence[Option], price: Price, again: frozenset[int]
) -> float:
    """The seconds of all calls and moves; a move is paid once unless the value is moved `again`."""
    placed: dict[int, Any] = {}
    paid: dict[tuple[object, ...], float] = {}
    for i, (node, option) in enumerate(zip(nodes, taken, strict=True)):
        for j, (v, q) in enumerate(zip(node.ins, option.ins, strict=True)):
            use = node.use(j)
            key = (v, q, i, j) if v in again else (v, q, use)
            paid[key] = price(v, placed[v], q, use)
        placed.update((v, p) for v, p in zip(node.outs, option.outs, strict=True) if v is not None)
    return sum(paid.values()) + sum(o.seconds for o in taken)


@remembered(4096)
def _body_options(
    key: CallKey,
    fulls: tuple[Full, ...],
    read: tuple[bool, ...],
    starts: tuple[tuple[int, Placement, int], ...],
    before: tuple[tuple[str, Boundary], ...],
    mesh: Mesh,
    axis: str,
    cost: CostModel,
    depth: int,
    within: Inside,
) -> tuple[Option, ...]:
    """The cheapest option of a call's decomposition for each start that it has one for.

    Where results that are small beside the operand come cut, also the one that gives them whole.
    """
    split = decomposition_of(key.op)
    depth += 1 + bool(split and split.blocked)  # its pieces may be the op itself, on less
    options: list[Option] = []
    for i, placement, blocks in starts:
        blocks = blocks if split and split.blocked else 0
        graph = decomposed(key, fulls, read, blocks)
        if graph is None:
            continue
        ins: list[Place] = ["free"] * len(fulls)
        ins[i] = placement
        body = Body(graph, depth, blocks)
        outs: tuple[Place, ...] = ("free",) * len(graph.outs)
        ends = (axis, Boundary(tuple(ins), outs))
        choice = inside(body, mesh, (*before, ends), cost, within)[axis]
        options.append(_option(body, read, choice))
        least = fulls[i].nbytes // mesh.axis_size(axis)
        sizes = [graph.types[v.index].nbytes for v in graph.outs]
        pairs = zip(choice.outs, sizes, strict=True)
        whole: tuple[Place, ...] = tuple(
            [R if isinstance(p, Cut) and n <= least else "free" for p, n in pairs]
        )
        if whole != outs:
            ends = (axis, Boundary(tuple(ins), whole))
            choice = inside(body, mesh, (*before, ends), cost, within)[axis]
            options.append(_option(body, read, choice))
    return tuple(options)


def _option(body: Body, read: Sequence[bool], choice: Choice) -> Option:
    """The option of a call that a choice for its decomposition is."""
    graph = body.graph
    used = {v for c in graph.calls for v in c.ins} | set(graph.outs)
    taken: tuple[Place, ...] = tuple(
        p if v in used else "free" for v, p in zip(graph.inputs, choice.ins, strict=True)
    )
    outs = iter(choice.outs)
    full_outs = tuple(next(outs) if r else R for r in read)
    return Option(taken, full_outs, choice.seconds, body)


def inside(
    body: Body,
    mesh: Mesh,
    boundaries: tuple[tuple[str, Boundary], ...],
    cost: CostModel,
    within: Inside,
) -> dict[str, Choice]:
    """The choices for a decomposition by axis, one after the other, within these boundaries."""
    return dict(_inside(body.graph, body.depth, mesh, boundaries, cost, within))


@remembered(4096)
def _inside(
    graph: Graph,
    depth: int,
    mesh: Mesh,
    boundaries: tuple[tuple[str, Boundary], ...],
    cost: CostModel,
    within: Inside,
) -> tuple[tuple[str, Choice], ...]:
    *others, (axis, last) = boundaries
    before = _inside(graph, depth, mesh, tuple(others), cost, within) if others else ()
    constraints = within.constraints
    prices = prices_of(graph, mesh, cost, constraints)
    choice = chosen(graph, axis, last, dict(before), prices, constraints, depth=depth)
    return (*before, (axis, choice))


def inner_values(graph: Graph) -> set[int]:
    """The results of views, and of elementwise calls of one operand of their size.

    To move such a value costs as much as to move that operand; of two, a sum may be moved for half.
    """
    inner: set[int] = set()
    for call in graph.calls:
        if len(call.outs) == 1 and (torch.Tag.pointwise in call.op.tags or is_view(call)):
            (v,) = call.outs
            sizes = sorted(graph.types[u.index].nbytes for u in set(call.ins))
            alone = len(sizes) < 2 or 2 * sizes[-2] < sizes[-1]
            if v is not None and alone and graph.types[v.index].nbytes == max(sizes, default=0):
                inner.add(v.index)
    return inner


def has_rule(call: Call) -> bool:
    """Whether an op has rows of its own, or a decomposition of ours, or is pinned."""
    known = rule_of(call.op) is not None or own_decomposition(call.op) is not None
    return known or pinned(call) is not None
