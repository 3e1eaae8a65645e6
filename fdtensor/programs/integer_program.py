# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`IntegerProgram`: variables, some of them whole, that cost the least.

HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual revised simplex method, arXiv
1503.01889).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.branches import branches
from fdtensor.programs.sparse_rows import SparseRows

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


@attrs.frozen(eq=False)
class Solution:
    """The variables of a solution, and whether those that are to be whole are."""

    x: NDArray[np.float64]
    whole: bool


class IntegerProgram:
    """An integer program: its variables are columns of a matrix, its constraints are rows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[int] = []
        self.rows = SparseRows()

    def variable(self, cost: float, whole: bool = False) -> int:
        """The column of a new variable of at least 0, which is 0 or 1 if `whole`."""
        self.costs.append(cost)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def constraint(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """Adds a row: `low <= sum(value * x[column]) <= high`."""
        self.rows.add(terms, low, high)

    def solve(self, whole: bool = True) -> Solution:
        """The variables of the least cost; of a large program, of a cost near it.

        The relaxation is mostly whole as it is; where it is not, branches of it are solved. In a
        large program groups of alternatives are rounded step by step instead, and the result is
        searched for better ones window by window, as a search of all may take minutes. Without
        `whole` the solution is that of the relaxation.
        """
        solver = self._solver()
        relaxed = solver.least()
        apart = solver.apart(relaxed.x)
        if not apart or not whole:
            return Solution(relaxed.x, not apart)
        if len(self.whole) >= LARGE:
            rounded = solver.rounded(relaxed)
            best = None if rounded is None else solver.searched(rounded, apart)
        else:
            best = solver.branched(relaxed)
        return Solution((best or solver.least(whole=True)).x, True)

    def _solver(self) -> _Solver:
        from scipy.optimize import LinearConstraint

        rows, groups = self.rows, dict[int, list[int]]()
        limits: Any = LinearConstraint(rows.matrix(len(self.costs)), rows.low, rows.high)  # type: ignore[arg-type]
        for row, column in zip(rows.rows, rows.columns, strict=True):
            if rows.low[row] == 1:
                groups.setdefault(row, []).append(column)
        costs, whole = np.array(self.costs) * 1e6, np.array(self.whole)
        return _Solver(costs, whole, limits, [np.array(group) for group in groups.values()])


class _Bounds:
    """What each variable is at least and at most; rows keep all below 1, and bounds take time."""

    def __init__(self, count: int) -> None:
        self.low, self.high = np.zeros(count), np.full(count, np.inf)

    def fix(self, group: Group, values: NDArray[Any]) -> None:
        self.low[group] = self.high[group] = values

    def free(self, group: Group) -> None:
        self.low[group], self.high[group] = 0, np.inf


@attrs.frozen(eq=False)
class _Solver:
    """An integer program as arrays."""

    costs: NDArray[np.float64]
    whole: NDArray[np.int64]
    rows: Any
    groups: Sequence[Group]
    """The whole variables of each constraint that takes one of them."""

    def branched(self, relaxed: Any) -> Any:
        """The whole solution of the least cost; None where it takes many branches.

        HiGHS itself takes long before it branches, which small programs hardly do.
        """

        def solve(without: frozenset[int]) -> Any:
            bounds = _Bounds(len(self.costs))
            bounds.high[list(without)] = 0
            return self._solved(bounds)

        most = min(BRANCHES, VARIABLES // len(self.costs))
        for _, result in itertools.islice(branches(solve, relaxed, self.groups), most):
            if not self.apart(result.x):
                return result
        return None

    def rounded(self, relaxed: Any) -> Any:
        """A whole solution: the most decided of the undecided groups are rounded, and so on.

        None where a group cannot be rounded. After each step the rest is relaxed again.
        """
        result, fixed = relaxed, dict[int, NDArray[Any]]()
        while apart := self.apart(result.x):
            undecided = {group[0] for group in apart}
            for group in self.groups:
                if group[0] not in undecided:
                    fixed[group[0]] = np.round(result.x[group])
            apart.sort(key=lambda group: (-result.x[group].max(), group[0]))
            result = self._step(result, apart, fixed)
            if result is None:
                return None
        return result

    def _step(self, result: Any, apart: Sequence[Group], fixed: dict[int, NDArray[Any]]) -> Any:
        """The relaxation with the first of the groups `apart` rounded and `fixed`; None for none.

        They are fewer where many cost too much.
        """
        count = max(1, int(len(apart) * ROUNDED))
        while count:
            rounded = {g[0]: np.arange(len(g)) == np.argmax(result.x[g]) for g in apart[:count]}
            bounds = self._bounds({**fixed, **rounded})
            step = self._solved(bounds)
            if step.x is not None and (count == 1 or step.fun <= result.fun * WORSE):
                fixed.update(rounded)
                return step
            count = max(1, count // 4) if count > 1 else 0
        return None

    def searched(self, best: Any, apart: Sequence[Group]) -> Any:
        """A solution at least as good as `best`, each window of the groups `apart` searched."""
        for i in range(0, len(apart), WINDOW // 2):
            bounds = self._bounds({group[0]: np.round(best.x[group]) for group in self.groups})
            for group in apart[i : i + WINDOW]:
                bounds.free(group)
            best = min(best, self.least(bounds, whole=True), key=lambda result: result.fun)
        return best

    def apart(self, x: NDArray[np.float64]) -> list[Group]:
        """The groups of which no variable is taken whole."""
        return [g for g in self.groups if np.any(np.abs(x[g] - np.round(x[g])) > 1e-6)]

    def least(self, bounds: _Bounds | None = None, whole: bool = False) -> Any:
        """The solution of the least cost within bounds; with `whole`, of integers."""
        result = self._solved(bounds, whole)
        assert result.x is not None, result.message
        return result

    def _bounds(self, fixed: Mapping[int, NDArray[Any]]) -> _Bounds:
        """Bounds that fix groups at values, which are by the first variable of a group."""
        bounds = _Bounds(len(self.costs))
        for group in self.groups:
            if group[0] in fixed:
                bounds.fix(group, fixed[group[0]])
        return bounds

    def _solved(self, bounds: _Bounds | None = None, whole: bool = False) -> Any:
        from scipy.optimize import Bounds, milp

        within = bounds or _Bounds(len(self.costs))
        return milp(
            self.costs,
            integrality=self.whole if whole else None,
            bounds=Bounds(within.low, within.high),  # type: ignore[arg-type]
            constraints=self.rows,
        )
