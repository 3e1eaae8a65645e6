# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`IntegerProgram`: variables, some of them whole, that cost the least.

HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual revised simplex method, arXiv
1503.01889).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntegerProgram"]

NEAR = 1e-2
"""The part of the cost that a solution may be above the relaxation before all is searched."""

LARGE = 8000
"""The number of variables from which on a solution near the best will do."""

NODES = 100
"""The branches after which the search of a large program ends: not seconds, as ranks differ in
them and must choose alike.
"""


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

        The relaxation is mostly whole as it is. Where that of a large program is not, what is whole
        in it stays, and the rest is searched; where that costs `NEAR` more, all is searched.
        """
        least = self._solved()
        whole = np.array(self.whole) > 0
        apart = np.abs(least.x - np.round(least.x)) > 1e-6
        if not np.any(apart[whole]):
            return least.x
        if len(whole) < LARGE:
            return self._solved(whole=whole).x
        low, high = np.zeros(len(whole)), np.full(len(whole), np.inf)
        for group in self._alternatives():
            if not np.any(apart[group]):
                low[group] = high[group] = np.round(least.x[group])
        best = self._solved(low, high, whole)
        if best.fun > least.fun * (1 + NEAR):
            best = min(best, self._solved(whole=whole), key=lambda result: result.fun)
        return best.x

    def _alternatives(self) -> list[NDArray[np.int64]]:
        """The whole variables of each constraint that takes one of them."""
        rows: dict[int, list[int]] = {}
        for row, column in zip(self.rows, self.columns, strict=True):
            if self.low[row] == 1:
                rows.setdefault(row, []).append(column)
        return [np.array(columns) for columns in rows.values()]

    def _solved(
        self,
        low: NDArray[np.float64] | float = 0.0,
        high: NDArray[np.float64] | float = np.inf,  # rows keep all below 1, and bounds take time
        whole: NDArray[np.bool_] | None = None,
    ) -> Any:
        """A solution within bounds; where `whole` is given, those are integers."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self.low), len(self.costs))
        indices = np.array([self.rows, self.columns], np.int32)  # scipy 1.11 takes no others
        matrix = csr_array((self.values, tuple(indices)), shape=shape)
        rows = LinearConstraint(matrix, self.low, self.high)  # type: ignore[arg-type]
        costs, bounds = np.array(self.costs) * 1e6, Bounds(low, high)  # type: ignore[arg-type]
        integers = None if whole is None else whole.astype(int)

        def searched(options: Mapping[str, float] | None) -> Any:
            return milp(
                costs, integrality=integers, bounds=bounds, constraints=rows, options=options
            )

        large = whole is not None and len(costs) >= LARGE
        result = searched({"mip_rel_gap": 1e-3, "node_limit": NODES} if large else None)
        if result.x is None:  # none was met so far
            result = searched(None)
        assert result.x is not None, result.message
        return result
