"""`LinearProgram`: variables of at least 0 that cost the least under constraints.

HiGHS solves it (Huangfu and Hall, 2018, Parallelizing the dual revised simplex method, arXiv
1503.01889), and again from where it was when costs or bounds have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["LinearProgram", "Solved", "Solver"]

SCALE = 1e6
"""The solver gets microseconds for seconds: its tolerances are absolute."""


@attrs.frozen(eq=False)
class Solved:
    """The variables of a solution, its cost in seconds, and what each row is worth."""

    x: NDArray[np.float64]
    cost: float
    worth: NDArray[np.float64]
    """By how much more the cost is for each that the bound of a row is more."""


class LinearProgram:
    """A linear program: its variables are columns of a matrix, its constraints are rows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        """What each variable costs, in seconds."""
        self.starts: list[int] = []
        """Where each row begins in `columns` and `values`."""
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float) -> int:
        """The column of a new variable of at least 0."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def like(self, other: LinearProgram) -> bool:
        """Whether it has the same constraints on as many variables as another one."""
        sides = ((x.starts, x.columns, x.values, x.low, x.high) for x in (self, other))
        return len(self.costs) == len(other.costs) and next(sides) == next(sides)

    def constraint(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> int:
        """The number of a new row: `low <= sum(x[plus]) - sum(x[minus]) <= high`."""
        self.starts.append(len(self.columns))
        self.columns += plus
        self.columns += minus
        self.values += [1.0] * len(plus)
        self.values += [-1.0] * len(minus)
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1


class Solver:
    """A linear program in HiGHS, which begins where its last solution was.

    `presolved`, HiGHS makes the program smaller and its costs unequal first; without, the
    relaxations of choices take half the time or a third, and another of equal solutions.
    """

    def __init__(self, program: LinearProgram, presolved: bool = True) -> None:
        from highspy import HighsLp, HighsModelStatus, MatrixFormat

        self._presolved = presolved
        self.count = len(program.costs)
        self._every = np.arange(self.count, dtype=np.int32)
        self._optimal, self._none = HighsModelStatus.kOptimal, HighsModelStatus.kInfeasible
        lp: Any = HighsLp()
        lp.num_col_, lp.num_row_ = self.count, len(program.low)
        lp.col_cost_ = np.array(program.costs) * SCALE
        lp.col_lower_, lp.col_upper_ = np.zeros(self.count), np.full(self.count, np.inf)
        lp.row_lower_, lp.row_upper_ = np.array(program.low, float), np.array(program.high, float)
        lp.a_matrix_.format_ = MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array([*program.starts, len(program.columns)], np.int32)
        lp.a_matrix_.index_ = np.array(program.columns, np.int32)
        lp.a_matrix_.value_ = np.array(program.values, float)
        self._highs = _quiet()
        self._highs.passModel(lp)
        self._presolve(presolved)

    def reprice(self, costs: Sequence[float]) -> None:
        """Has each variable cost so many seconds from now on."""
        self._highs.changeColsCost(self.count, self._every, np.array(costs) * SCALE)

    def bound(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
        """Has each variable be at least and at most so much from now on."""
        self._highs.changeColsBounds(self.count, self._every, low, high)

    def whole(self, whole: NDArray[np.bool_]) -> None:
        """Has some variables be whole numbers from now on."""
        self._highs.changeColsIntegrality(self.count, self._every, whole.astype(np.uint8))
        self._presolve(self._presolved or bool(whole.any()))

    def _presolve(self, on: bool) -> None:
        self._highs.setOptionValue("presolve", "choose" if on else "off")
        self._highs.setOptionValue("dual_simplex_cost_perturbation_multiplier", float(on))

    def solve(self) -> Solved | None:
        """The solution of the least cost; None where there is none."""
        self._highs.run()
        if self._highs.getModelStatus() not in (self._optimal, self._none):
            self._presolve(True)
            self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            return None
        solution = self._highs.getSolution()
        cost = self._highs.getInfo().objective_function_value / SCALE
        return Solved(np.array(solution.col_value), cost, np.array(solution.row_dual) / SCALE)


def _quiet() -> Any:
    """HiGHS, which prints nothing and, on any number of cores, solves alike."""
    from highspy import Highs

    class Quiet(Highs):
        def __init__(self) -> None:
            super(Highs, self).__init__()  # that of Highs itself prints its version

    highs: Any = Quiet()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    return highs
