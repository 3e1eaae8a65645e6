"""`Search`: the best of all combinations of the options of each call, and a bound on it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from fdtensor.ops.graph import Call, Graph
from fdtensor.ops.lift import lifted
from fdtensor.programs.bound.effort import PROOF, Effort
from fdtensor.programs.bound.least_moves import least_seconds
from fdtensor.programs.bound.relaxation import Relaxation
from fdtensor.programs.bound.space import Floats, Space, joined, space_of_call, space_of_end
from fdtensor.programs.bound.valuation import Valuation
from fdtensor.programs.bound.wires import Moves
from fdtensor.programs.choice import total_seconds
from fdtensor.programs.choices import Body, Constraints
from fdtensor.programs.flows import Values, values_of
from fdtensor.programs.mixtures import combined
from fdtensor.programs.nodes import Node, OnAxes, Option
from fdtensor.programs.prices import FIXED, Prices
from fdtensor.programs.repeats import classes
from fdtensor.programs.solver import MANY

__all__ = ["Best", "Search"]

BROKEN = 0.05
"""What a move of a tie is first taken to cost, in parts of the choice: less than is true, so that
what calls are worth by it stays near what they cost."""

ADDED = 4
"""How many combinations of a node are added to the relaxation in a round at most."""

SETTLED = 200
"""How many combinations of a node are asked at once whether they hold together."""

ENOUGH = 1e-4
"""The part of the seconds that a bound may lack."""

SLOW = 0.1
"""The part of what a bound lacks that a round is to gain."""

VALUED = 4000
"""How many nodes are valued in all rounds: of large graphs there are fewer."""


@attrs.frozen(eq=False)
class Best:
    """The seconds of a choice, what every choice takes at least, and the best known one."""

    chosen: float
    least: float
    seconds: float
    """What the best known one takes."""
    taken: Sequence[Option]
    """Its option of each node, on all axes."""

    @property
    def gap(self) -> float:
        """The part of the least seconds that the choice takes more, at most."""
        if self.chosen <= self.least:
            return 0.0
        return (self.chosen - self.least) / self.least if self.least else float("inf")


class Search:
    """The nodes of a graph, each with the one option that a solution takes, and all others.

    `along` has, for each node and axis, all options, the taken one first. Values in `again` are
    moved for each use.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        along: Sequence[Sequence[Sequence[Option]]],
        prices: Prices,
        constraints: Constraints,
        again: frozenset[int],
    ) -> None:
        self.graph, self.nodes, self.prices = graph, nodes, prices
        self.constraints, self.again = constraints, again
        self.taken = [node.options[0] for node in nodes]
        self.chosen = total_seconds(nodes, self.taken, prices, again)
        inner = len(graph.inputs) + len(graph.constants)
        calls = [None] * inner + [*graph.calls] + [None] * len(graph.outs)
        self.class_of = self._classes(along)
        self.counts = Counter(self.class_of)
        self.calls: dict[int, Call | None] = {c: calls[c] for c in self.counts}
        self.spaces = {c: self._space(c, along[c], calls[c]) for c in self.counts}
        self.active: dict[int, list[int]] = {c: [] for c in self.counts}
        for n, c in enumerate(self.class_of):
            number = self.spaces[c].number([one[0] for one in along[n]], self.taken[n])
            self._settle(c, number)
            if number not in self.active[c]:
                self.active[c].append(number)
        self.values = list(values_of(nodes, self.class_of))
        known: dict[Any, Moves] = {}
        self.moves = [self._moves(values, known) for values in self.values]
        self.shared = [values.v not in again for values in self.values]

    def _classes(self, along: Sequence[Sequence[Sequence[Option]]]) -> list[int]:
        """The class of each node: of large graphs those that look alike share one."""
        if len(self.nodes) < MANY:
            return list(range(len(self.nodes)))
        every = [
            attrs.evolve(node, options=tuple(o for one in alone for o in one))
            for node, alone in zip(self.nodes, along, strict=True)
        ]
        return classes(every, lambda v: (self.prices.kind(v), v in self.again))

    def _space(self, c: int, alone: Sequence[Sequence[Option]], call: Call | None) -> Space:
        if call is not None:
            return space_of_call(self.nodes[c], alone, call, self.graph.types, self.prices)
        first, inputs = len(self.nodes) - len(self.graph.outs), len(self.graph.inputs)
        given = self.constraints.given
        layout = given("outs", c - first) if c >= first else given("ins", c) if c < inputs else None
        return space_of_end(self.nodes[c], alone, self.prices.mesh, layout)

    def _moves(self, values: Values, known: dict[Any, Moves]) -> Moves:
        """The moves of values, the same for all that are priced alike."""
        (c, k), v, prices = values.maker, values.v, self.prices
        made = self.spaces[c].outs[k]
        taken = joined(self.spaces[n].ins[i] for n, i in values.takers)
        key = prices.kind(v), made, taken
        if key not in known:
            seconds = np.zeros((made.size, taken.size))
            if v in prices.tied:
                seconds = BROKEN * self.chosen * made.differ(taken)
            elif v not in prices.light:
                where = prices.fulls[v], prices.mesh.sizes, made, taken
                seconds = least_seconds(*where, prices.cost, prices.reduce_dtype)
                seconds = seconds * prices.times(v)
            if v in prices.fixed:
                seconds = np.where(seconds > 0, seconds + FIXED, seconds)
            known[key] = Moves(v, made, taken, seconds)
        return known[key]

    @property
    def size(self) -> int:
        """How many combinations there are of all nodes."""
        return sum(space.seconds.size for space in self.spaces.values())

    def best(self, effort: Effort = PROOF) -> Best:
        """The best choice that is known after a search, and what no choice takes less than."""
        worth = Valuation(
            self.nodes, self.class_of, self.spaces, self.values, self.moves, self.shared
        )
        least, near, slow = 0.0, None, 0
        for _ in range(max(1, min(effort.rounds, VALUED // len(self.nodes)))):
            program = self._relaxed(effort.solved)
            if program is not None:  # without, what sites are worth stays
                worth.learn(program)
            self._value(worth, effort)
            each = [worth.seconds(n) for n in range(len(self.nodes))]
            total = sum(float(seconds.min()) for seconds in each)
            slow = 0 if total - least > SLOW * (self.chosen - total) else slow + 1
            if near is None or total > least:
                least, near = total, [seconds - seconds.min() for seconds in each]
            if self._enough(least) or slow == effort.patience or not self._added(each):
                break
        known = Best(self.chosen, min(least, self.chosen), self.chosen, self.taken)
        if near is None or self._enough(least) or len(self.counts) < len(self.nodes):
            return known
        return self._searched(near, known, effort)

    def _enough(self, least: float) -> bool:
        return self.chosen - least <= ENOUGH * self.chosen

    def _relaxed(self, most: int) -> Relaxation | None:
        """A solution of the relaxation, whose moves have their prices; None without one."""
        for last in range(most + 1):
            program = self._program(self.active)
            if not program.solve():
                return None
            if last == most or not self._ask_all(program):
                return program
        return None

    def _ask_all(self, program: Relaxation, near: bool = False) -> bool:
        """Whether a move of a solution takes more than was known; those `near` it are asked too."""
        asked = [self._ask(self.moves[g], p, q) for g, p, q in program.used()]
        for g, p, q in program.near() if near else ():
            self._ask(self.moves[g], p, q)
        return any(asked)

    def _program(self, active: Mapping[int, Sequence[int]]) -> Relaxation:
        known = self.values, self.moves, self.shared
        return Relaxation(self.spaces, self.counts, *known, active)

    def _value(self, worth: Valuation, effort: Effort) -> None:
        """Values sites, and asks what the best combinations and moves take, in turn."""
        for _ in range(effort.asked):
            for _ in range(effort.sweeps):
                worth.sweep()
            asked = [self._asked(worth, n) for n in range(len(self.nodes))]
            if not any(asked):
                break
        worth.take()

    def _asked(self, worth: Valuation, n: int) -> bool:
        """Whether the best combination of a node, or a move for it, takes more than was known."""
        space, seconds = worth.spaces[n], worth.seconds(n)
        number, changed = int(seconds.argmin()), False
        for _ in range(SETTLED):
            if space.settled[number]:
                break
            more = self._settle(self.class_of[n], number)
            changed |= more > 0
            seconds[number] += more
            number = int(seconds.argmin())
        for i, edge in worth.gets[n].items():
            q = int(space.in_site(i)[number])
            p = int((edge.borne[:, q] - edge.made).argmin())
            changed |= self._ask(edge.wire.moves, p, int(edge.within[q]))
        return changed

    def _ask(self, moves: Moves, p: int, q: int) -> bool:
        return moves.ask(self.prices, p, q, 2 * self.chosen)

    def _added(self, each: Sequence[Floats]) -> int:
        """Adds the combinations of each node that cost least, and says how many."""
        added = 0
        for seconds, c in zip(each, self.class_of, strict=True):
            active = self.active[c]
            for number in np.argsort(seconds, kind="stable")[:ADDED].tolist():
                if number not in active and self.spaces[c].seconds[number] < self.chosen:
                    active.append(number)
                    added += 1
        return added

    def _searched(self, near: Sequence[Floats], known: Best, effort: Effort) -> Best:
        """The best of all combinations that may be part of a better choice than the known one.

        One that costs its node as much beyond the least as the bound lacks cannot. Where they are
        too many, what is known stays.
        """
        beyond = self.chosen - known.least
        active = {n: np.flatnonzero(costs <= beyond).tolist() for n, costs in enumerate(near)}
        if sum(map(len, active.values())) > effort.searched:
            return known
        for n, numbers in active.items():
            for number in numbers:
                self._settle(n, number)
        program = self._program(active)
        for least in itertools.islice(program.branches(), effort.branches):
            known = attrs.evolve(known, least=max(known.least, min(self.chosen, least)))
            self._ask_all(program, near=True)
            known = self._better(known, program.picked())
            if known.least >= known.seconds * (1 - ENOUGH):
                break
        return known

    def _better(self, known: Best, picked: Mapping[int, int]) -> Best:
        """What is known, with the combinations picked where they take less."""
        taken = [self._option(n, number) for n, number in picked.items()]
        seconds = total_seconds(self.nodes, taken, self.prices, self.again)
        if seconds >= known.seconds * (1 - ENOUGH):
            return known
        return Best(self.chosen, min(known.least, seconds), seconds, taken)

    def _option(self, n: int, number: int) -> Option:
        """A combination of a node as an option on all axes."""
        space = self.spaces[n]
        along = dict(zip(self.prices.mesh.axes, space.along(number), strict=True))
        way = space.ways[number]
        return Option(way.ins, way.outs, float(space.seconds[number]), OnAxes(along, way.order))

    def _settle(self, c: int, number: int) -> float:
        """Asks what a combination takes, and returns how much more that is than was known."""
        space, call = self.spaces[c], self.calls[c]
        if space.settled[number]:
            return 0.0
        space.settled[number] = True
        assert call is not None
        along = dict(zip(self.prices.mesh.axes, space.along(number), strict=True))
        before = float(space.seconds[number])
        if any(isinstance(option.note, Body) for option in along.values()):
            after = combined(call, self.graph, along, self.prices, self.constraints)[0].seconds
        else:
            rows = {axis: option.note for axis, option in along.items()}
            order = space.ways[number].order
            holds = lifted(call, self.prices.mesh, rows, self.graph.types, order) is not None
            after = before if holds else before + 2 * self.chosen
        space.seconds[number] = after
        return after - before
