# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`IntegerProgram`: variables, some of them whole, that cost the least.

HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual revised simplex method, arXiv
1503.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntegerProgram"]


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
        """The variables of the least cost; those of the relaxation where they are integers."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self.low), len(self.costs))
        indices = np.array([self.rows, self.columns], np.int32)  # scipy 1.11 takes no others
        matrix = csr_array((self.values, tuple(indices)), shape=shape)
        costs, whole = np.array(self.costs) * 1e6, np.array(self.whole)
        rows = LinearConstraint(matrix, self.low, self.high)  # type: ignore[arg-type]
        at_least = Bounds(0, np.inf)  # rows keep all below 1, and bounds take time
        result = milp(costs, bounds=at_least, constraints=rows)  # mostly whole as it is
        if result.x is None or np.any(np.abs(result.x - np.round(result.x))[whole > 0] > 1e-6):
            options = {"mip_rel_gap": 1e-4, "time_limit": 120.0}
            result = milp(
                costs, integrality=whole, bounds=at_least, constraints=rows, options=options
            )
        assert result.x is not None, result.message
        return result.x
