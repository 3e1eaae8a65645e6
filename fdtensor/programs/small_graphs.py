"""`searched`: the best of all combinations of options, in a graph that has few of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf, prod

import attrs

from fdtensor.layouts.placement import Cut
from fdtensor.programs.bound.effort import CHOICE
from fdtensor.programs.choices import Choices
from fdtensor.programs.ends import output_node
from fdtensor.programs.joint import Joint
from fdtensor.programs.mixtures import cuts_again, nodes_of
from fdtensor.programs.nodes import Node, Option, Place

__all__ = ["Searched", "searched"]

MOST_COMBINED = 1500
"""The most combinations of options, of all calls, among which the best is searched."""

EXACT = 1e-4
"""The part of the seconds in which what is best may err."""


@attrs.frozen(eq=False)
class Searched:
    """The best of all combinations that a search knows of."""

    choices: Choices
    seconds: float
    proven: bool
    """Whether none takes less, up to `EXACT`."""


def searched(joint: Joint, start: Choices) -> Searched | None:
    """The search from a choice; None where combinations are many, or more than seconds counts."""
    along = [joint.rows[axis] for axis in joint.many]
    if joint.constraints.holding > 0 or _combinations(along) > MOST_COMBINED:
        return None
    nodes = nodes_of(joint.graph, [start], joint.nested, joint.constraints)
    taken, seconds = joint.solved(nodes, joint.nested)
    search = joint.search(nodes, taken, joint.choices(nodes, taken, seconds))
    if search.size > MOST_COMBINED:  # decompositions add to the rows
        return None
    best = search.best(CHOICE)
    if best.seconds < seconds:
        taken, seconds = best.taken, best.seconds
    taken = _cut_once(joint, nodes, taken, seconds)
    proven = best.least >= seconds * (1 - EXACT)
    return Searched(joint.choices(nodes, taken, seconds), seconds, proven)


def _combinations(along: Sequence[Sequence[Node]]) -> int:
    """How many combinations of options all nodes have, from the nodes of each axis."""
    return sum(prod(len(node.options) for node in alone) for alone in zip(*along, strict=True))


def _in_order(places: Sequence[Place]) -> tuple[float, ...]:
    """What sorts places: few cut a dim again, and the axes cut the dims in turn."""
    return cuts_again(places), *(p.dim if isinstance(p, Cut) else inf for p in places)


def _cut_once(
    joint: Joint, nodes: Sequence[Node], taken: Sequence[Option], seconds: float
) -> Sequence[Option]:
    """The solution, with no dim of an open output cut by two axes where that takes no longer."""
    first, axes = len(taken) - len(joint.graph.outs), joint.prices.mesh.axes
    for k, is_open in enumerate(joint.open_outs):
        many = cuts_again(taken[first + k].ins[0])
        if not is_open or not many:
            continue
        alone = [dict.fromkeys(o.ins[0] for o in joint.rows[a][first + k].options) for a in axes]
        places = sorted((p for p in product(*alone) if cuts_again(p) < many), key=_in_order)
        for option in output_node(joint.graph, k, places, joint.constraints, joint.nested).options:
            other = [*taken[: first + k], option, *taken[first + k + 1 :]]
            if joint.seconds(nodes, other) <= seconds * (1 + 1e-9):
                taken = other
                break
    return taken
