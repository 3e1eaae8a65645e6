"""`IntegerProgram`: variables, some of them whole, that cost the least."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.branches import branches
from fdtensor.programs.linear_program import LinearProgram, Solved, Solver

__all__ = ["IntegerProgram", "Solution"]

LARGE = 8000
"""The number of variables from which on a solution near the best will do."""

ROUNDED = 0.25
"""The part of the undecided groups that a step rounds."""

WORSE = 1.05
"""How many times the cost of the step before a step may have; above, it rounds fewer groups."""

BRANCHES = 100
"""How many branches are solved before a search is left to HiGHS."""

VARIABLES = 100_000
"""How many variables these branches have together at most."""

WINDOW = 128
"""The number of groups that are searched together, all others staying as they are."""

Group = NDArray[np.int64]
"""The variables of alternatives, one of which is taken."""

_Fixed = dict[int, NDArray[np.float64]]
"""The values of groups, by their first variable."""


@attrs.frozen(eq=False)
class Solution:
    """The variables of a solution, and whether those that are to be whole are."""

    x: NDArray[np.float64]
    whole: bool


class IntegerProgram(LinearProgram):
    """A linear program of which some variables are 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[bool] = []
        self.solver: Solver | None = None

    def variable(self, cost: float, whole: bool = False) -> int:
        """The column of a new variable of at least 0, which is 0 or 1 if `whole`."""
        self.whole.append(whole)
        return super().variable(cost)

    def variables(self, count: int) -> int:
        """The first column of new variables of at least 0, which cost nothing yet."""
        self.whole += [False] * count
        self.costs += [0.0] * count
        return len(self.costs) - count

    def solve(self, whole: bool = True, before: IntegerProgram | None = None) -> Solution:
        """The variables of the least cost; of a large program, of a cost near it.

        The relaxation is mostly whole as it is; where it is not, branches of it are solved. In a
        large program groups of alternatives are rounded step by step instead, and the result is
        searched for better ones window by window, as a search of all may take minutes. Without
        `whole` the solution is that of the relaxation. Of one with the same constraints that was
        solved `before` the solver goes on where it was.
        """
        if before is not None and before.solver is not None and self.like(before):
            self.solver = before.solver
            self.solver.reprice(self.costs)
        else:
            self.solver = Solver(self, presolved=False)
        search = self._search(self.solver)
        relaxed = search.least()
        apart = search.apart(relaxed.x)
        if not apart or not whole:
            return Solution(relaxed.x, not apart)
        if len(self.whole) >= LARGE:
            rounded = search.rounded(relaxed)
            best = None if rounded is None else search.searched(rounded, apart)
        else:
            best = search.branched(relaxed)
        return Solution((best or search.least(whole=True)).x, True)

    def _search(self, solver: Solver) -> _Search:
        ends = [*self.starts[1:], len(self.columns)]
        groups = [
            np.array(self.columns[start:end])
            for start, end, low in zip(self.starts, ends, self.low, strict=True)
            if low == 1
        ]
        return _Search(solver, np.array(self.whole), groups)


class _Bounds:
    """What each variable is at least and at most; rows keep all below 1, and bounds take time."""

    def __init__(self, count: int) -> None:
        self.low, self.high = np.zeros(count), np.full(count, np.inf)

    def fix(self, group: Group, values: NDArray[np.float64]) -> None:
        self.low[group] = self.high[group] = values

    def free(self, group: Group) -> None:
        self.low[group], self.high[group] = 0, np.inf


@attrs.frozen(eq=False)
class _Search:
    """An integer program, under search."""

    solver: Solver
    whole: NDArray[np.bool_]
    groups: Sequence[Group]
    """The whole variables of each constraint that takes one of them."""

    def branched(self, relaxed: Solved) -> Solved | None:
        """The whole solution of the least cost; None where it takes many branches.

        HiGHS itself takes long before it branches, which small programs hardly do.
        """

        def solve(without: frozenset[int]) -> Solved | None:
            bounds = _Bounds(self.solver.count)
            bounds.high[list(without)] = 0
            return self._solved(bounds)

        most = min(BRANCHES, VARIABLES // self.solver.count)
        for _, result in itertools.islice(branches(solve, relaxed, self.groups), most):
            if not self.apart(result.x):
                return result
        return None

    def rounded(self, relaxed: Solved) -> Solved | None:
        """A whole solution: the most decided of the undecided groups are rounded, and so on.

        None where a group cannot be rounded. After each step the rest is relaxed again.
        """
        result: Solved | None = relaxed
        fixed = _Fixed()
        while result is not None and (apart := self.apart(result.x)):
            x, undecided = result.x, {group[0] for group in apart}
            for group in self.groups:
                if group[0] not in undecided:
                    fixed[group[0]] = np.round(x[group])
            apart.sort(key=lambda group: (-x[group].max(), group[0]))
            result = self._step(result, apart, fixed)
        return result

    def _step(self, result: Solved, apart: Sequence[Group], fixed: _Fixed) -> Solved | None:
        """The relaxation with the first of the groups `apart` rounded and `fixed`; None for none.

        They are fewer where many cost too much.
        """
        count = max(1, int(len(apart) * ROUNDED))
        while count:
            rounded = {g[0]: np.arange(len(g)) == np.argmax(result.x[g]) for g in apart[:count]}
            bounds = self._bounds({**fixed, **rounded})
            step = self._solved(bounds)
            if step is not None and (count == 1 or step.cost <= result.cost * WORSE):
                fixed.update(rounded)
                return step
            count = max(1, count // 4) if count > 1 else 0
        return None

    def searched(self, best: Solved, apart: Sequence[Group]) -> Solved:
        """A solution at least as good as `best`, each window of the groups `apart` searched."""
        for i in range(0, len(apart), WINDOW // 2):
            bounds = self._bounds({group[0]: np.round(best.x[group]) for group in self.groups})
            for group in apart[i : i + WINDOW]:
                bounds.free(group)
            best = min(best, self.least(bounds, whole=True), key=lambda result: result.cost)
        return best

    def apart(self, x: NDArray[np.float64]) -> list[Group]:
        """The groups of which no variable is taken whole."""
        return [g for g in self.groups if np.any(np.abs(x[g] - np.round(x[g])) > 1e-6)]

    def least(self, bounds: _Bounds | None = None, whole: bool = False) -> Solved:
        """The solution of the least cost within bounds; with `whole`, of integers."""
        if whole:
            self.solver.whole(self.whole)
        result = self._solved(bounds)
        if whole:
            self.solver.whole(np.zeros_like(self.whole))
        assert result is not None
        return result

    def _bounds(self, fixed: _Fixed) -> _Bounds:
        """Bounds that fix groups at values, which are by the first variable of a group."""
        bounds = _Bounds(self.solver.count)
        for group in self.groups:
            if group[0] in fixed:
                bounds.fix(group, fixed[group[0]])
        return bounds

    def _solved(self, bounds: _Bounds | None = None) -> Solved | None:
        within = bounds or _Bounds(self.solver.count)
        self.solver.bound(within.low, within.high)
        return self.solver.solve()
