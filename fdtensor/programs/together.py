"""`chosen_together`: the options of a graph on all axes of a mesh at once.

Two solutions are made axis by axis, in two orders of the axes. What a call does in one of them, on
all axes, is an option of it; an integer program over these options, with the prices of whole moves,
takes the best together. Then calls get more options, near those taken (`wider`), and it is solved
again, while that saves time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from fdtensor.layouts.placement import Cut
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.programs.boundary import Boundary, boundary_of
from fdtensor.programs.choice import (
    choice_of,
    chosen,
    inner_values,
    inside,
    prices_of,
    problem_of,
    regathered,
    total_seconds,
)
from fdtensor.programs.choices import Body, Choice, Constraints
from fdtensor.programs.nodes import Node, Option, Place
from fdtensor.programs.prices import LeastPrices, Prices, moves_near, moves_of
from fdtensor.programs.solver import cheapest
from fdtensor.programs.wider import wider, with_options

__all__ = ["chosen_together"]

ROUNDS = 3
"""How often calls get more options, near those taken, while that saves time."""

ENOUGH = 1e-4
"""The part of the seconds that a round must save for another one."""

INNERMOST = 2
"""The depth at which no call is decomposed."""

Choices = Mapping[str, Choice]
"""The choice on each axis."""


@attrs.frozen(eq=False)
class _Problem:
    """A graph, and what is known of it on each axis."""

    graph: Graph
    boundaries: Mapping[str, Boundary]
    prices: Prices
    constraints: Constraints
    regather: bool

    def rows(self, axis: str) -> Sequence[Node]:
        """The nodes of one axis as if it were alone, without decompositions."""
        boundary, known = self.boundaries[axis], (self.prices, self.constraints)
        return problem_of(self.graph, axis, boundary, {}, *known, depth=INNERMOST).nodes

    def solved(
        self, nodes: Sequence[Node], near: Sequence[Option] | None = None
    ) -> tuple[list[Option], float]:
        """The options that take the least time together, and their seconds.

        Where `near` is given, most moves are first priced by the bytes they need at least; those
        that a solution uses, or that begin or end where `near` does, are priced as they are.
        """
        graph, prices = self.graph, self.prices
        again = regathered(graph) if self.regather else frozenset[int]()
        price = prices if near is None else LeastPrices(prices, moves_near(nodes, near))
        while True:
            picks = cheapest(nodes, price, lambda v: v not in again, inner_values(graph))
            taken = [node.options[k] for node, k in zip(nodes, picks, strict=True)]
            if not isinstance(price, LeastPrices) or price.knew(moves_of(nodes, taken)):
                return taken, total_seconds(nodes, taken, prices, again)
            price.knew(moves_near(nodes, taken))

    def along(self, axis: str, others: Choices) -> Choice:
        """The choice on one axis, given those on the others."""
        before = {a: others[a] for a in self.prices.mesh.axes if a in others and a != axis}
        return chosen(
            *(self.graph, axis, self.boundaries[axis], before, self.prices, self.constraints),
            regather=self.regather,
        )


def chosen_together(
    graph: Graph,
    boundaries: Mapping[str, Boundary],
    prices: Prices,
    constraints: Constraints,
    regather: bool = False,
) -> dict[str, Choice]:
    """The choice on each axis of the mesh: together they take the least time that is known of."""
    problem = _Problem(graph, boundaries, prices, constraints, regather)
    mesh = prices.mesh
    # in an order that does not depend on how the mesh is written
    axes = sorted(mesh.axes, key=lambda axis: (-mesh.axis_size(axis), axis))
    several = sum(size > 1 for size in mesh.sizes) > 1
    if not several or constraints.like is not None:
        return _in_turn(problem, axes)
    return _best_of(problem, [_once(problem, order) for order in (axes, axes[::-1])])


def _once(problem: _Problem, order: Sequence[str]) -> dict[str, Choice]:
    """The choice on each axis, one after the other."""
    choices: dict[str, Choice] = {}
    for axis in order:
        choices[axis] = problem.along(axis, choices)
    return choices


def _in_turn(problem: _Problem, order: Sequence[str]) -> dict[str, Choice]:
    """The choice on each axis, one after the other, and all but the last once more."""
    choices = _once(problem, order)
    for axis in order[:-1]:  # again, now that the others are known
        choices[axis] = problem.along(axis, choices)
    return choices


def _best_of(problem: _Problem, pool: Sequence[Choices]) -> dict[str, Choice]:
    """The best mixture of several solutions, call by call, and of options near it."""
    graph, prices, axes = problem.graph, problem.prices, problem.prices.mesh.axes
    nodes = _nodes(graph, pool, prices, problem.constraints)
    taken, seconds = problem.solved(nodes)
    rows = {axis: problem.rows(axis) for axis in axes}
    ends = zip(*(problem.boundaries[axis].outs for axis in axes), strict=True)
    free = [all(end == "free" for end in along) for along in ends]
    for _ in range(ROUNDS):
        more = wider(graph, with_options(nodes, taken), taken, rows, free, prices)
        after, less = problem.solved(more, near=taken)
        better = less < seconds * (1 - ENOUGH)
        if less < seconds:
            taken, seconds = after, less
        if not better:
            break
    choices = {
        axis: choice_of(graph, nodes, [_on(axis, i, o) for o in taken], seconds)
        for i, axis in enumerate(axes)
    }
    return {
        axis: attrs.evolve(choice, problem=_problem(problem, axis, choices))
        for axis, choice in choices.items()
    }


def _problem(problem: _Problem, axis: str, choices: Choices) -> object:
    """What the choice on an axis is one of, while the others stay."""
    others = {a: choice for a, choice in choices.items() if a != axis}
    return problem_of(
        *(problem.graph, axis, problem.boundaries[axis], others, problem.prices),
        *(problem.constraints, 0, True, choices[axis].calls),
    )


def _on(axis: str, i: int, option: Option) -> Option:
    """The part of an option of all axes that is that of one, the `i`-th."""
    if option.note is not None:
        return option.note[axis]
    ins, outs = (tuple([entry[i] for entry in side]) for side in (option.ins, option.outs))
    return Option(ins, outs, option.seconds)


def _nodes(
    graph: Graph, pool: Sequence[Choices], prices: Prices, constraints: Constraints
) -> list[Node]:
    """The nodes of a graph whose options are those taken in several solutions, on all axes."""
    axes = prices.mesh.axes
    nodes: list[Node] = []
    for k, v in enumerate(graph.inputs):
        given = dict.fromkeys(tuple([c[a].ins[k] for a in axes]) for c in pool)
        nodes.append(Node((), (v.index,), tuple(Option((), (p,), 0.0) for p in given)))
    for v, _ in graph.constants:
        (placed,) = dict.fromkeys(tuple([c[a].placements[v] for a in axes]) for c in pool)
        nodes.append(Node((), (v.index,), (Option((), (placed,), 0.0),)))
    for i, call in enumerate(graph.calls):
        known: dict[object, Option] = {}
        for choices in pool:
            along = {a: choices[a].calls[i] for a in axes}
            key = tuple([(o.ins, o.outs, isinstance(o.note, Body)) for o in along.values()])
            if key not in known:
                known[key] = _together(call, graph, along, prices, constraints)
        outs = tuple(None if v is None else v.index for v in call.outs)
        nodes.append(Node(tuple(v.index for v in call.ins), outs, tuple(known.values())))
    for k, v in enumerate(graph.outs):
        each = dict.fromkeys(tuple([c[a].outs[k] for a in axes]) for c in pool)
        wanted = sorted(each, key=_cuts_again)  # of equal ones the first is taken
        nodes.append(Node((v.index,), (), tuple(Option((q,), (), 0.0) for q in wanted)))
    return nodes


def _cuts_again(placements: Sequence[Place]) -> int:
    """How many axes cut a dim that another one cuts too."""
    dims = [p.dim for p in placements if isinstance(p, Cut)]
    return len(dims) - len(set(dims))


def _together(
    call: Call, graph: Graph, along: Mapping[str, Option], prices: Prices, constraints: Constraints
) -> Option:
    """The option of a call that takes these on each axis."""
    options = along.values()
    ins = tuple(zip(*(o.ins for o in options), strict=True))
    outs = tuple(zip(*(o.outs for o in options), strict=True))
    body = next((o.note for o in options if isinstance(o.note, Body)), None)
    if body is None:
        work = Work(call, graph.types, prices.mesh.sizes, prices.cost)
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
    choices = inside(body, mesh, boundaries, cost, constraints.reduce_dtype)
    known = prices_of(graph, mesh, cost, Constraints(reduce_dtype=constraints.reduce_dtype))
    nodes = _nodes(graph, [choices], known, constraints)
    return total_seconds(nodes, [node.options[0] for node in nodes], known, frozenset())
