"""`chosen_together`: the options of a graph on all axes of a mesh at once.

A solution is made axis by axis. In small graphs the best of all combinations is searched from there
(`bound`), and taken where it is proved to be. Else there is a second solution, in the other order
of the axes. What a call does in one of them, on all axes, is an option of it; an integer program
over these options, with the prices of whole moves, takes the best together. Then calls get more
options, near those taken (`wider`), and it is solved again, while that saves time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import thread_time

import attrs

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.progress import now
from fdtensor.ops.graph import Graph
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.choice_cache import agree, choosing, keep, key_of, may_end, recalled
from fdtensor.programs.choices import Body, Choice, Choices, Constraints, Nesting
from fdtensor.programs.joint import Joint
from fdtensor.programs.mixtures import nodes_of
from fdtensor.programs.nested import Nested
from fdtensor.programs.nestings import in_orders, reordering
from fdtensor.programs.nodes import Node, Option, Place
from fdtensor.programs.prices import Prices
from fdtensor.programs.small_graphs import Searched, searched
from fdtensor.programs.wider import wider, with_options

__all__ = ["chosen_together"]

ROUNDS = 3
"""How often calls get more options, near those taken, while that saves time."""

LONG = 0.1
"""How many seconds of this thread a choice took that is kept on disk."""

ENOUGH = 1e-4
"""The part of the seconds that a round must save for another one."""


def chosen_together(
    graph: Graph,
    boundaries: Mapping[str, Boundary],
    prices: Prices,
    constraints: Constraints,
    regather: bool = False,
) -> Choices:
    """The choice on each axis of the mesh: together they take the least time that is known of.

    One that took long is kept on disk, and taken from there the next time.
    """
    joint = Joint(graph, boundaries, prices, constraints, regather)
    mesh = prices.mesh
    now(f"choosing layouts for {len(graph.calls)} calls on {mesh!r}")
    # in an order that does not depend on how the mesh is written
    axes = sorted(mesh.axes, key=lambda axis: (-mesh.axis_size(axis), axis))
    if constraints.like is not None:
        return _once(joint, axes)
    key = None if constraints.pending else key_of(joint)
    if key is None:
        return _chosen(joint, axes)
    known = _recalled(key, joint, axes)
    if known is not None:
        return known
    with choosing(key):
        known = _recalled(key, joint, axes)
        if known is not None:
            return known
        began = thread_time()
        choices = _chosen(joint, axes)
        if thread_time() - began > LONG:
            keep(key, choices)
    return choices


def _recalled(key: str, joint: Joint, axes: Sequence[str]) -> Choices | None:
    """The choice that was kept; None where there is none, or the graph has it no more."""
    proposed = recalled(key, joint)
    if proposed is None or not may_end(joint, proposed):
        return None
    boundaries = {
        axis: attrs.evolve(boundary, ins=_where_free(boundary.ins, proposed[axis].ins))
        for axis, boundary in joint.boundaries.items()
    }
    constraints = attrs.evolve(joint.constraints, like=proposed)
    try:
        choices = _once(attrs.evolve(joint, boundaries=boundaries, constraints=constraints), axes)
    except FdtensorError:
        return None
    if not agree(joint, choices, proposed):
        return None
    order = axes if len(joint.many) < 2 else joint.prices.mesh.axes  # as they are listed
    return joint.told(Choices({axis: choices[axis] for axis in order}, choices.nested))


def _where_free(given: Sequence[Place], places: Sequence[Place]) -> tuple[Place, ...]:
    return tuple([p if end == "free" else end for end, p in zip(given, places, strict=True)])


def _chosen(joint: Joint, axes: Sequence[str]) -> Choices:
    graph, constraints = joint.graph, joint.constraints
    if len(joint.many) < 2:
        return _in_turn(joint, axes)
    first = _once(joint, axes)
    if constraints.pending and all(_moves_nothing(graph, choice) for choice in first.values()):
        return first  # of one op of many: nothing else follows the operands
    best = searched(joint, first)
    if best is not None and best.proven:
        return joint.told(best.choices)
    return _best_of(joint, [first, _once(joint, axes[::-1])], best)


def _moves_nothing(graph: Graph, choice: Choice) -> bool:
    """Whether every call takes its operands as they are, along the axis of a choice."""
    uses = [
        *zip(graph.outs, choice.outs, strict=True),
        *(
            pair
            for call, option in zip(graph.calls, choice.calls, strict=True)
            for pair in zip(call.ins, option.ins, strict=True)
        ),
    ]
    whole = not any(isinstance(option.note, Body) for option in choice.calls)
    return whole and all(place in ("free", choice.placements[v]) for v, place in uses)


def _once(joint: Joint, order: Sequence[str]) -> Choices:
    """The choice on each axis, one after the other."""
    choices: dict[str, Choice] = {}
    for axis in order:
        choices[axis] = joint.along(axis, choices)
    like = joint.constraints.like
    nested = None if like is None else like.nested
    return Choices(choices, nested and _at_these_sizes(nested, joint.prices.mesh, choices))


def _at_these_sizes(nested: Nesting, mesh: Mesh, choices: Mapping[str, Choice]) -> Nesting:
    """The orders of axes with the placements of outputs that were chosen with them."""
    outs = zip(*(choices[axis].outs for axis in mesh.axes), strict=True)
    pairs = zip(nested.outs, outs, strict=True)
    ends = [Nested(p, old.order) if isinstance(old, Nested) else p for old, p in pairs]
    return attrs.evolve(nested, outs=tuple(ends))


def _in_turn(joint: Joint, order: Sequence[str]) -> Choices:
    """The choice on each axis, one after the other, and all but the last once more."""
    choices = dict(_once(joint, order))
    for axis in order[:-1]:  # again, now that the others are known
        choices[axis] = joint.along(axis, choices)
    return Choices(choices)


def _best_of(joint: Joint, pool: Sequence[Choices], known: Searched | None) -> Choices:
    """The best mixture of several solutions, call by call, and of options near it.

    What a search `known` before is taken where that is not better, else there is one more.
    """
    graph, prices = joint.graph, joint.prices
    nodes = nodes_of(graph, pool, prices, joint.constraints)
    taken, seconds = joint.solved(nodes, prices)
    more = nodes
    for _ in range(ROUNDS):
        more = with_options(nodes, taken)
        more = wider(graph, more, taken, joint.rows, joint.open_outs, prices, joint.constraints)
        after, less = joint.solved(more, prices, near=taken)
        better = less < seconds * (1 - ENOUGH)
        if less < seconds:
            taken, seconds = after, less
        if not better:
            break
    taken, seconds = _in_orders(joint, more, taken, seconds)
    choices = joint.choices(nodes, taken, seconds)
    if known is not None and seconds < known.seconds * (1 - ENOUGH):
        known = searched(joint, choices)
    return joint.told(choices if known is None else known.choices)


def _in_orders(
    joint: Joint, nodes: Sequence[Node], taken: Sequence[Option], seconds: float
) -> tuple[Sequence[Option], float]:
    """A solution with the order of the axes that cut one dim; another one where that costs."""
    known = joint.nested, joint.constraints
    own = [attrs.evolve(n, options=(o,)) for n, o in zip(nodes, taken, strict=True)]
    ordered = in_orders(joint.graph, own, taken, (), *known)
    best, total = joint.solved(ordered, joint.nested)
    for _ in range(ROUNDS if total > seconds * (1 + ENOUGH) else 0):
        near = reordering(ordered, best, joint.nested)
        more = in_orders(joint.graph, nodes, best, near, *known)
        after, less = joint.solved(more, joint.nested, near=best)
        if less >= total * (1 - ENOUGH):
            break
        best, total = after, less
    return best, total
