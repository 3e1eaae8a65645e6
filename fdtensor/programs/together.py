"""`chosen_together`: the options of a graph on all axes of a mesh at once.

Two solutions are made axis by axis, in two orders of the axes. What a call does in one of them, on
all axes, is an option of it; an integer program over these options, with the prices of whole moves,
takes the best together. Then calls get more options, near those taken (`wider`), and it is solved
again, while that saves time. In small graphs the best of all combinations is searched from there
(`bound`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod

import attrs

from fdtensor.layouts.progress import now
from fdtensor.ops.graph import Graph
from fdtensor.programs.bound.effort import CHOICE
from fdtensor.programs.bound.least import search_from
from fdtensor.programs.bound.search import Search
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.choice import (
    choice_of,
    chosen,
    inner_values,
    problem_of,
    regathered,
    total_seconds,
)
from fdtensor.programs.choices import Body, Choice, Choices, Constraints, Nesting
from fdtensor.programs.flows import Picked
from fdtensor.programs.mixtures import nodes_of
from fdtensor.programs.nestings import in_orders, reordering
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.prices import LeastPrices, Prices, moves_near, moves_of
from fdtensor.programs.solver import cheapest
from fdtensor.programs.wider import wider, with_options

__all__ = ["chosen_together"]

ROUNDS = 3
"""How often calls get more options, near those taken, while that saves time."""

ENOUGH = 1e-4
"""The part of the seconds that a round must save for another one."""

MOST_COMBINED = 1500
"""The most combinations of options, of all calls, among which the best is searched."""

INNERMOST = 2
"""The depth at which no call is decomposed."""


@attrs.frozen(eq=False)
class _Problem:
    """A graph, and what is known of it on each axis."""

    graph: Graph
    boundaries: Mapping[str, Boundary]
    prices: Prices
    """Those of moves along an axis; of whole moves they are `nested`."""
    constraints: Constraints
    regather: bool

    @functools.cached_property
    def nested(self) -> Prices:
        """The prices of whole moves, between places that have an order of axes."""
        return attrs.evolve(self.prices, nested=True)

    def rows(self, axis: str) -> Sequence[Node]:
        """The nodes of one axis as if it were alone, without decompositions."""
        boundary, known = self.boundaries[axis], (self.prices, self.constraints)
        return problem_of(self.graph, axis, boundary, {}, *known, depth=INNERMOST).nodes

    def solved(
        self, nodes: Sequence[Node], prices: Prices, near: Sequence[Option] | None = None
    ) -> tuple[list[Option], float]:
        """The options that take the least time together, and their seconds.

        Where `near` is given, most moves are first priced by the bytes they need at least; those
        that a solution uses, or that begin or end where `near` does, are priced as they are.
        """
        graph = self.graph
        again = regathered(graph) if self.regather else frozenset[int]()
        inner = inner_values(graph)
        least = None if near is None else LeastPrices(prices, moves_near(nodes, near))
        known = least is None  # until then the relaxation tells which moves to price
        picked: Picked | None = None

        def shared(v: int) -> bool:
            return v not in again

        while True:
            before = picked and picked.program
            picked = cheapest(nodes, least or prices, shared, inner, known, before)
            taken = [node.options[k] for node, k in zip(nodes, picked.options, strict=True)]
            known = least is None or least.knew(moves_of(nodes, taken))
            if known and picked.whole:
                return taken, total_seconds(nodes, taken, prices, again)
            if least is not None:
                least.knew(moves_near(nodes, taken))

    def search(self, nodes: Sequence[Node], taken: Sequence[Option], choices: Choices) -> Search:
        """The search among all combinations, from what is taken."""
        own = [attrs.evolve(n, options=(o,)) for n, o in zip(nodes, taken, strict=True)]
        known = self.nested, self.constraints, self.regather
        return search_from(self.graph, self.boundaries, own, choices, *known)

    def along(self, axis: str, others: Mapping[str, Choice]) -> Choice:
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
) -> Choices:
    """The choice on each axis of the mesh: together they take the least time that is known of."""
    problem = _Problem(graph, boundaries, prices, constraints, regather)
    mesh = prices.mesh
    now(f"choosing layouts for {len(graph.calls)} calls on {mesh!r}")
    # in an order that does not depend on how the mesh is written
    axes = sorted(mesh.axes, key=lambda axis: (-mesh.axis_size(axis), axis))
    if constraints.like is not None:
        return _once(problem, axes)
    if sum(size > 1 for size in mesh.sizes) < 2:
        return _in_turn(problem, axes)
    first = _once(problem, axes)
    if constraints.pending and all(_moves_nothing(graph, choice) for choice in first.values()):
        return first  # of one op of many: nothing else follows the operands
    return _best_of(problem, [first, _once(problem, axes[::-1])])


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


def _once(problem: _Problem, order: Sequence[str]) -> Choices:
    """The choice on each axis, one after the other."""
    choices: dict[str, Choice] = {}
    for axis in order:
        choices[axis] = problem.along(axis, choices)
    like = problem.constraints.like
    return Choices(choices, None if like is None else like.nested)


def _in_turn(problem: _Problem, order: Sequence[str]) -> Choices:
    """The choice on each axis, one after the other, and all but the last once more."""
    choices = dict(_once(problem, order))
    for axis in order[:-1]:  # again, now that the others are known
        choices[axis] = problem.along(axis, choices)
    return Choices(choices)


def _best_of(problem: _Problem, pool: Sequence[Choices]) -> Choices:
    """The best mixture of several solutions, call by call, and of options near it."""
    graph, prices, axes = problem.graph, problem.prices, problem.prices.mesh.axes
    nodes = nodes_of(graph, pool, prices, problem.constraints)
    taken, seconds = problem.solved(nodes, prices)
    more = nodes
    rows = {axis: problem.rows(axis) for axis in axes}
    ends = zip(*(problem.boundaries[axis].outs for axis in axes), strict=True)
    free = [all(end == "free" for end in along) for along in ends]
    for _ in range(ROUNDS):
        more = with_options(nodes, taken)
        more = wider(graph, more, taken, rows, free, prices, problem.constraints)
        after, less = problem.solved(more, prices, near=taken)
        better = less < seconds * (1 - ENOUGH)
        if less < seconds:
            taken, seconds = after, less
        if not better:
            break
    taken, seconds = _in_orders(problem, more, taken, seconds)
    choices = _choices(problem, nodes, taken, seconds)
    held = problem.constraints.holding > 0  # the search knows of seconds alone
    along = [rows[axis] for axis in axes if prices.mesh.axis_size(axis) > 1]
    if not held and _combinations(along) <= MOST_COMBINED:
        search = problem.search(nodes, taken, choices)
        if search.size <= MOST_COMBINED:  # decompositions add to the rows
            best = search.best(CHOICE)
            if best.seconds < seconds:
                choices = _choices(problem, nodes, best.taken, best.seconds)
    told = {
        axis: attrs.evolve(choice, problem=_problem(problem, axis, choices))
        for axis, choice in choices.items()
    }
    return attrs.evolve(choices, along=told)


def _in_orders(
    problem: _Problem, nodes: Sequence[Node], taken: Sequence[Option], seconds: float
) -> tuple[Sequence[Option], float]:
    """A solution with the order of the axes that cut one dim; another one where that costs."""
    known = problem.nested, problem.constraints
    own = [attrs.evolve(n, options=(o,)) for n, o in zip(nodes, taken, strict=True)]
    ordered = in_orders(problem.graph, own, taken, (), *known)
    best, total = problem.solved(ordered, problem.nested)
    for _ in range(ROUNDS if total > seconds * (1 + ENOUGH) else 0):
        near = reordering(ordered, best, problem.nested)
        more = in_orders(problem.graph, nodes, best, near, *known)
        after, less = problem.solved(more, problem.nested, near=best)
        if less >= total * (1 - ENOUGH):
            break
        best, total = after, less
    return best, total


def _combinations(along: Sequence[Sequence[Node]]) -> int:
    """How many combinations of options all nodes have, from the nodes of each axis."""
    return sum(prod(len(node.options) for node in alone) for alone in zip(*along, strict=True))


def _choices(
    problem: _Problem, nodes: Sequence[Node], taken: Sequence[Option], seconds: float
) -> Choices:
    """The choice on each axis, from the options of nodes on all axes."""
    graph = problem.graph
    along = {
        axis: choice_of(graph, nodes, [_on(axis, i, o) for o in taken], seconds)
        for i, axis in enumerate(problem.prices.mesh.axes)
    }
    first, last = len(graph.inputs), len(taken) - len(graph.outs)
    ins = tuple([option.outs[0] for option in taken[:first]])
    calls = tuple([o.note.order for o in taken[first + len(graph.constants) : last]])
    outs = tuple([option.ins[0] for option in taken[last:]])
    return Choices(along, Nesting(ins, calls, outs))


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
        return option.note.along[axis]
    ins, outs = (tuple([entry[i] for entry in side]) for side in (option.ins, option.outs))
    return Option(ins, outs, option.seconds)
