"""`chosen`: a row for every call of a graph, so that the whole takes the least time.

Axes are chosen one after the other, each priced on the blocks that the axes before it leave. On an
axis every call has options: the rows of its rule, and decompositions whose pieces have rows. The
moves between them are priced by the planner, and `solver.cheapest` takes the best together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.kinds import is_tuple
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement
from fdtensor.ops.decompositions import DECOMPOSITIONS, decomposition_of
from fdtensor.ops.graph import Call, Full, Graph, Var, is_view, tensors_of
from fdtensor.ops.notation.core import R, rule_of
from fdtensor.ops.pins import pinned
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.ops.rows import CallKey, arguments
from fdtensor.plans.cost import CostModel
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.prices import Prices
from fdtensor.programs.problem import (
    UNCONSTRAINED,
    Body,
    Choice,
    Constraints,
    ProblemBuilder,
)
from fdtensor.programs.regather import views_of_inputs
from fdtensor.programs.solver import Node, Option, Place, cheapest

__all__ = ["chosen", "has_rule", "inside"]


def chosen(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    boundary: Boundary,
    before: Mapping[str, Choice],
    cost: CostModel,
    regather: bool = False,
    depth: int = 0,
    constraints: Constraints = UNCONSTRAINED,
) -> Choice:
    """The cheapest options of a graph on one axis, given those of the axes `before`."""
    problem = ProblemBuilder(
        graph, mesh, axis, boundary, before, cost, depth, constraints, _body_options
    )
    nodes = problem.nodes()
    regathered = views_of_inputs(graph) if regather else frozenset[Var]()
    picks = cheapest(nodes, problem.prices, lambda v: Var(v) not in regathered, inner_values(graph))
    taken = [node.options[k] for node, k in zip(nodes, picks, strict=True)]
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
        tuple(o.ins[0] for o in taken[skipped + calls :]),  # type: ignore[misc]
        _total(nodes, taken, problem.prices, regathered),
        placements,
        () if depth else tuple(nodes),  # decompositions are kept by the thousand
        problem.prices,
    )


def _total(
    nodes: Sequence[Node], taken: Sequence[Option], prices: Prices, regathered: frozenset[Var]
) -> float:
    """The seconds of all calls and moves; a move is paid once unless the value is regathered."""
    placed: dict[int, Placement] = {}
    paid: dict[tuple[object, ...], float] = {}
    for i, (node, option) in enumerate(zip(nodes, taken, strict=True)):
        for j, (v, q) in enumerate(zip(node.ins, option.ins, strict=True)):
            key = (v, q, i, j) if Var(v) in regathered else (v, q)
            paid[key] = 0.0 if placed[v] == q else prices(v, placed[v], q)
        placed.update((v, p) for v, p in zip(node.outs, option.outs, strict=True) if v is not None)
    return sum(paid.values()) + sum(o.seconds for o in taken)


@functools.lru_cache(maxsize=4096)
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
    reduce_dtype: torch.dtype | None,
) -> tuple[Option, ...]:
    """The cheapest option of a call's decomposition for each start that it has one for."""
    split = decomposition_of(key.op)
    depth += 1 + bool(split and split.blocked)  # its pieces may be the op itself, on less
    options: list[Option] = []
    for i, placement, blocks in starts:
        graph = decomposed(key, fulls, read, blocks if split and split.blocked else 0)
        if graph is None:
            continue
        ins: list[Place] = ["free"] * len(fulls)
        ins[i] = placement
        boundary = (axis, Boundary(tuple(ins), ("free",) * len(graph.outs)))
        body = Body(graph, depth)
        choice = inside(body, mesh, (*before, boundary), cost, reduce_dtype)[axis]
        used = {v for c in graph.calls for v in c.ins} | set(graph.outs)
        taken: tuple[Place, ...] = tuple(
            p if v in used else "free" for v, p in zip(graph.inputs, choice.ins, strict=True)
        )
        outs = iter(choice.outs)
        full_outs = tuple(next(outs) if r else R for r in read)
        options.append(Option(taken, full_outs, choice.seconds, body))
    return tuple(options)


def inside(
    body: Body,
    mesh: Mesh,
    boundaries: tuple[tuple[str, Boundary], ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> dict[str, Choice]:
    """The choices for a decomposition by axis, one after the other, within these boundaries."""
    return dict(_inside(body.graph, body.depth, mesh, boundaries, cost, reduce_dtype))


@functools.lru_cache(maxsize=4096)
def _inside(
    graph: Graph,
    depth: int,
    mesh: Mesh,
    boundaries: tuple[tuple[str, Boundary], ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> tuple[tuple[str, Choice], ...]:
    *others, (axis, last) = boundaries
    before = _inside(graph, depth, mesh, tuple(others), cost, reduce_dtype) if others else ()
    constraints = Constraints(reduce_dtype=reduce_dtype)
    choice = chosen(
        graph, mesh, axis, last, dict(before), cost, depth=depth, constraints=constraints
    )
    return (*before, (axis, choice))


@functools.lru_cache(maxsize=4096)
def decomposed(
    key: CallKey, fulls: tuple[Full, ...], read: tuple[bool, ...], blocks: int
) -> Graph | None:
    """The graph of an op's decomposition, for outputs that are read; None where it has none.

    `blocks` is the number of ranks that cut a dim, for a blocked one, else 0.
    """
    split = decomposition_of(key.op)
    if split is None:
        return None
    f = functools.partial(split.f, blocks) if split.blocked else split.f
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        result = f(*[list(a) if is_tuple(a) else a for a in args], **kwargs)
        if result is NotImplemented:  # torch's own may decline arguments
            raise NotImplementedError
        results = tensors_of(result)
        if len(results) < len(read):
            raise NotImplementedError
        return [t for t, is_read in zip(results, read, strict=False) if is_read]

    try:
        graph = rewritten(record(body, fulls))
    except (FdtensorError, RuntimeError, NotImplementedError):
        return None
    return None if any(_same(c, graph, key, fulls) for c in graph.calls) else graph


def _same(call: Call, graph: Graph, key: CallKey, fulls: tuple[Full, ...]) -> bool:
    """Whether a piece is the very call that is decomposed; the op on smaller operands is not."""
    return CallKey.of(call) == key and tuple(graph.types[v.index] for v in call.ins) == fulls


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
    known = rule_of(call.op) is not None or call.op in DECOMPOSITIONS
    return known or pinned(call) is not None
