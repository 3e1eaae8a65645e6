"""`Joint`: a graph, and the choice of its layouts on all axes of a mesh together."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import attrs

from fdtensor.ops.graph import Graph
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
from fdtensor.programs.choices import Choice, Choices, Constraints, Nesting
from fdtensor.programs.flows import Picked
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.prices import LeastPrices, Prices, moves_near, moves_of
from fdtensor.programs.solver import cheapest

__all__ = ["INNERMOST", "Joint"]

INNERMOST = 2
"""The depth at which no call is decomposed."""


@attrs.frozen(eq=False)
class Joint:
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

    @property
    def many(self) -> Sequence[str]:
        """The axes of more than one rank."""
        mesh = self.prices.mesh
        return [axis for axis in mesh.axes if mesh.axis_size(axis) > 1]

    @functools.cached_property
    def rows(self) -> Mapping[str, Sequence[Node]]:
        """The nodes of each axis as if it were alone, without decompositions."""
        graph, known = self.graph, (self.prices, self.constraints)
        return {
            axis: problem_of(graph, axis, boundary, {}, *known, depth=INNERMOST).nodes
            for axis, boundary in self.boundaries.items()
        }

    @functools.cached_property
    def again(self) -> frozenset[int]:
        """The values that are moved anew for each use."""
        return regathered(self.graph) if self.regather else frozenset[int]()

    @functools.cached_property
    def open_outs(self) -> Sequence[bool]:
        """Of each output, whether its layout is free on all axes."""
        ends = zip(*(boundary.outs for boundary in self.boundaries.values()), strict=True)
        return [all(end == "free" for end in along) for along in ends]

    def solved(
        self, nodes: Sequence[Node], prices: Prices, near: Sequence[Option] | None = None
    ) -> tuple[list[Option], float]:
        """The options that take the least time together, and their seconds.

        Where `near` is given, most moves are first priced by the bytes they need at least; those
        that a solution uses, or that begin or end where `near` does, are priced as they are.
        """
        again, inner = self.again, inner_values(self.graph)
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

    def seconds(self, nodes: Sequence[Node], taken: Sequence[Option]) -> float:
        """What options take by the prices of whole moves."""
        return total_seconds(nodes, taken, self.nested, self.again)

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

    def choices(self, nodes: Sequence[Node], taken: Sequence[Option], seconds: float) -> Choices:
        """The choice on each axis, from the options of nodes on all axes."""
        graph = self.graph
        along = {
            axis: choice_of(graph, nodes, [_on(axis, i, o) for o in taken], seconds)
            for i, axis in enumerate(self.prices.mesh.axes)
        }
        first, last = len(graph.inputs), len(taken) - len(graph.outs)
        ins = tuple([option.outs[0] for option in taken[:first]])
        calls = tuple([o.note.order for o in taken[first + len(graph.constants) : last]])
        outs = tuple([option.ins[0] for option in taken[last:]])
        return Choices(along, Nesting(ins, calls, outs))

    def told(self, choices: Choices) -> Choices:
        """The choices, each with what it is one of while the others stay."""
        told: dict[str, Choice] = {}
        for axis, choice in choices.items():
            others = {a: choices[a] for a in self.prices.mesh.axes if a != axis}
            together = len(self.many) > 1
            problem = problem_of(
                *(self.graph, axis, self.boundaries[axis], others, self.prices, self.constraints),
                at_uses=together,
                taken=choice.calls if together else (),
            )
            told[axis] = attrs.evolve(choice, problem=problem)
        return attrs.evolve(choices, along=told)


def _on(axis: str, i: int, option: Option) -> Option:
    """The part of an option of all axes that is that of one, the `i`-th."""
    if option.note is not None:
        return option.note.along[axis]
    ins, outs = (tuple([entry[i] for entry in side]) for side in (option.ins, option.outs))
    return Option(ins, outs, option.seconds)
