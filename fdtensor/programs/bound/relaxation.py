"""`Relaxation`: the choice among some combinations of each node as a linear program.

A combination costs its seconds, and what flows from those that make a value to those that take it
costs those of the move. The multipliers of its solution say what each site of a value is worth.
Nodes of one class share their variables, and so do values between the same classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.bound.space import Space
from fdtensor.programs.bound.wires import Known, Moves
from fdtensor.programs.branches import branches
from fdtensor.programs.flows import Values
from fdtensor.programs.linear_program import LinearProgram, Solved, Solver

__all__ = ["Relaxation"]


_Taker = tuple[int, tuple[int, int]]
"""Values, and the class of nodes that take one of them, with the number of the operand."""


class Relaxation:
    """The relaxation with the `active` combinations of each class.

    `counts` has the number of nodes of each class; `moves` and `shared`, whether a move is paid
    once for all takers, are those of each of `values`.
    """

    def __init__(
        self,
        spaces: Mapping[int, Space],
        counts: Mapping[int, int],
        values: Sequence[Values],
        moves: Sequence[Moves],
        shared: Sequence[bool],
        active: Mapping[int, Sequence[int]],
    ) -> None:
        self.spaces, self.active, self.values = spaces, active, values
        self.moves, self.shared = moves, shared
        self.moving: dict[int, tuple[Moves, tuple[int, int], int]] = {}
        """The move of each variable that is one, and how often it is paid."""
        self.x: NDArray[np.float64] | None = None
        """The variables of the solution."""
        self.program = LinearProgram()
        self.picks = {
            c: [self.program.variable(float(spaces[c].seconds[k]) * counts[c]) for k in numbers]
            for c, numbers in active.items()
        }
        for xs in self.picks.values():
            self.program.constraint(xs, [], 1.0, 1.0)
        self.gives: dict[_Taker, dict[int, int]] = {}
        """The row of each site at which a value is made."""
        self.flows: dict[_Taker, dict[tuple[int, int], int]] = {}
        """The variable of each move."""
        self.bears: dict[_Taker, dict[tuple[int, int], int]] = {}
        """The row that has each move paid, where several takers pay it once."""
        for g in range(len(values)):
            self._add(g)

    def _move(self, moves: Moves, move: tuple[int, int], times: int) -> int:
        """The variable of a move that is paid so often."""
        x = self.program.variable(float(moves.seconds[move]) * times)
        self.moving[x] = moves, move, times
        return x

    def _add(self, g: int) -> None:
        """Adds the moves of values: a flow to each taker, paid by it or once for all."""
        values, moves, shared = self.values[g], self.moves[g], self.shared[g]
        c, k = values.maker
        makers = self._at(c, self.spaces[c].out_site(k))
        together = shared and len(values.takers) > 1
        paid: dict[tuple[int, int], int] = {}
        for (n, i), uses in values.takers.items():
            within = self.spaces[n].ins[i].numbers_in(moves.taken)
            takers = {int(within[s]): x for s, x in self._at(n, self.spaces[n].in_site(i)).items()}
            times = values.count * (1 if shared else uses)
            flow: dict[tuple[int, int], int] = {}
            for pq in [(p, q) for p in makers for q in takers]:
                flow[pq] = self.program.variable(0.0) if together else self._move(moves, pq, times)
                if together and pq not in paid:
                    paid[pq] = self._move(moves, pq, times)
            at = g, (n, i)
            self.flows[at] = flow
            self.gives[at] = {
                p: self.program.constraint([flow[p, q] for q in takers], xs, 0.0, 0.0)
                for p, xs in makers.items()
            }
            for q, xs in takers.items():
                self.program.constraint([flow[p, q] for p in makers], xs, 0.0, 0.0)
            if together:
                self.bears[at] = {
                    pq: self.program.constraint([x], [paid[pq]], -np.inf, 0.0)
                    for pq, x in flow.items()
                }

    def _at(self, c: int, sites: NDArray[np.int64]) -> dict[int, list[int]]:
        """The variables of a class by the site that their combinations have."""
        groups: dict[int, list[int]] = defaultdict(list)
        for number, x in zip(self.active[c], self.picks[c], strict=True):
            groups[int(sites[number])].append(x)
        return groups

    def solve(self) -> bool:
        """Whether it has a solution: then `x`, and what rows are worth, are of that."""
        result = Solver(self.program).solve()
        if result is None:
            self.x = None
            return False
        self.x, self.worth = result.x, result.worth
        return True

    def branches(self) -> Iterator[float]:
        """What no choice among the active combinations takes less than, more with every branch.

        The branches of a search are solved best first, and `x` is the solution of each. Where moves
        of it turn out to take more, it is solved again. The last one is a choice.
        """
        solver = Solver(self.program)
        groups = [np.array(xs) for xs in self.picks.values()]

        def solve(without: frozenset[int]) -> Solved | None:
            most = np.full(solver.count, np.inf)
            most[list(without)] = 0.0
            solver.bound(np.zeros(solver.count), most)
            solver.reprice(self.program.costs)
            return solver.solve()

        for least, result in branches(solve, solve(frozenset()), groups, self._cost_of):
            self.x = result.x
            yield least

    def _cost_of(self, x: NDArray[np.float64]) -> float:
        """What a solution costs, with all moves priced as they are known by now."""
        costs = self.program.costs
        for k, (moves, move, times) in self.moving.items():
            costs[k] = float(moves.seconds[move]) * times
        return float(np.dot(costs, x))

    def picked(self) -> dict[int, int]:
        """The combination of each class of which the solution takes the most."""
        assert self.x is not None
        most = {c: int(np.argmax(self.x[picks])) for c, picks in self.picks.items()}
        return {c: self.active[c][k] for c, k in most.items()}

    def used(self) -> list[tuple[int, int, int]]:
        """The moves that the solution uses: the number of values, and two sites."""
        x = self.x
        assert x is not None
        each = ((g, pq, y) for (g, _), flow in self.flows.items() for pq, y in flow.items())
        return [(g, *pq) for g, pq, y in each if x[y] > 1e-9]

    def near(self) -> list[tuple[int, int, int]]:
        """The moves that may replace one of those used: they begin or end there and take no longer.

        Solutions that take as long differ in one place alone: asked for one by one they are many.
        """
        begin: dict[tuple[int, int], float] = {}
        end: dict[tuple[int, int], float] = {}
        for g, p, q in self.used():
            seconds = float(self.moves[g].seconds[p, q])
            begin[g, p] = max(seconds, begin.get((g, p), 0.0))
            end[g, q] = max(seconds, end.get((g, q), 0.0))
        near: list[tuple[int, int, int]] = []
        for (g, _), flow in self.flows.items():
            for p, q in flow:
                most = max(begin.get((g, p), -1.0), end.get((g, q), -1.0))
                if self.moves[g].seconds[p, q] <= most:
                    near.append((g, p, q))
        return near

    def known(self, g: int, taker: tuple[int, int]) -> Known:
        """What the solution knows of one of these values, for one of the nodes that take it."""
        every = self.values[g].count * self.values[g].takers[taker]
        rows, bears = self.gives[g, taker], self.bears.get((g, taker), {})
        made = self.worth[list(rows.values())] / every
        borne = {pq: -float(self.worth[row]) / every for pq, row in bears.items()}
        return Known(np.array(list(rows)), made, borne)
