# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`IntegerProgram`: variables, some of them whole, that cost the least.

HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual revised simplex method, arXiv
1503.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntegerProgram"]

LARGE = 8000
"""The number of variables from which on a solution near the best will do."""

ROUNDED = 0.25
"""The part of the undecided groups that a step rounds."""

WORSE = 1.05
"""How many times the cost of the step before a step may have; above, it rounds fewer groups."""

WINDOW = 128
"""The number of groups that are searched together, all others staying as they are."""


class IntegerProgram:
    """An integer program: its variables are columns of a matrix, its constraints are rows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, whole: bool = False) -> int:
        """The column of a new variable of at least 0, which is 0 or 1 if `whole`."""
        self.costs.append(cost)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def constraint(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """Adds a row: `low <= sum(value * x[column]) <= high`."""
        row = len(self.low)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> NDArray[np.float64]:
        """The variables of the least cost; of a large program, of a cost near it.

        The relaxation is mostly whole as it is. Where that of a large program is not, groups of
        alternatives are rounded step by step, and the result is searched for better ones window by
        window: a search of all takes minutes, of which mostly nothing comes.
        """
        relaxed = self._least()
        if not np.any(_is_apart(relaxed.x)[np.array(self.whole) > 0]):
            return relaxed.x
        if len(self.whole) >= LARGE:
            rounded = self._rounded(relaxed)
            if rounded is not None:
                return self._searched(rounded, self._apart(relaxed.x)).x
        return self._least(whole=True).x

    def _rounded(self, relaxed: Any) -> Any:
        """A whole solution: the most decided of the undecided groups are rounded, and so on.

        None where a group cannot be rounded. After each step the rest is relaxed again.
        """
        result, bounds = relaxed, _Bounds(len(self.whole))
        while apart := self._apart(result.x):
            for group in self._alternatives():
                if not np.any(_is_apart(result.x[group])):
                    bounds.fix(group, np.round(result.x[group]))
            apart.sort(key=lambda group: (-result.x[group].max(), group[0]))
            count = max(1, int(len(apart) * ROUNDED))
            while True:
                tried = bounds.copy()
                for group in apart[:count]:
                    tried.fix(group, np.arange(len(group)) == np.argmax(result.x[group]))
                step = self._solved(tried)
                if step.x is not None and (count == 1 or step.fun <= result.fun * WORSE):
                    break
                if count == 1:
                    return None
                count = max(1, count // 4)
            result, bounds = step, tried
        return result

    def _searched(self, best: Any, apart: Sequence[NDArray[np.int64]]) -> Any:
        """A solution at least as good as `best`, each window of the groups `apart` searched."""
        for i in range(0, len(apart), WINDOW // 2):
            bounds = _Bounds(len(self.whole))
            for group in self._alternatives():
                bounds.fix(group, np.round(best.x[group]))
            for group in apart[i : i + WINDOW]:
                bounds.free(group)
            best = min(best, self._least(bounds, whole=True), key=lambda result: result.fun)
        return best

    def _apart(self, x: NDArray[np.float64]) -> list[NDArray[np.int64]]:
        """The groups of alternatives of which none is taken whole."""
        return [group for group in self._alternatives() if np.any(_is_apart(x[group]))]

    def _alternatives(self) -> list[NDArray[np.int64]]:
        """The whole variables of each constraint that takes one of them."""
        rows: dict[int, list[int]] = {}
        for row, column in zip(self.rows, self.columns, strict=True):
            if self.low[row] == 1:
                rows.setdefault(row, []).append(column)
        return [np.array(columns) for columns in rows.values()]

    def _least(self, bounds: _Bounds | None = None, whole: bool = False) -> Any:
        result = self._solved(bounds, whole)
        assert result.x is not None, result.message
        return result

    def _solved(self, bounds: _Bounds | None = None, whole: bool = False) -> Any:
        """What HiGHS says of the program within bounds; with `whole`, of integers."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self.low), len(self.costs))
        indices = np.array([self.rows, self.columns], np.int32)  # scipy 1.11 takes no others
        matrix = csr_array((self.values, tuple(indices)), shape=shape)
        rows = LinearConstraint(matrix, self.low, self.high)  # type: ignore[arg-type]
        within = bounds or _Bounds(len(self.costs))
        return milp(
            np.array(self.costs) * 1e6,
            integrality=np.array(self.whole) if whole else None,
            bounds=Bounds(within.low, within.high),  # type: ignore[arg-type]
            constraints=rows,
        )


class _Bounds:
    """What each variable is at least and at most; rows keep all below 1, and bounds take time."""

    def __init__(self, count: int) -> None:
        self.low, self.high = np.zeros(count), np.full(count, np.inf)

    def fix(self, group: NDArray[np.int64], values: NDArray[Any]) -> None:
        self.low[group] = self.high[group] = values

    def free(self, group: NDArray[np.int64]) -> None:
        self.low[group], self.high[group] = 0, np.inf

    def copy(self) -> _Bounds:
        other = _Bounds(0)
        other.low, other.high = self.low.copy(), self.high.copy()
        return other


def _is_apart(x: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where a variable is not a whole number."""
    return np.abs(x - np.round(x)) > 1e-6
