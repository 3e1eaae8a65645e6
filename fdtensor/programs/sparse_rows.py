# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`SparseRows`: the constraints of a linear program, under construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["SparseRows"]


class SparseRows:
    """The rows of a sparse matrix, each with the least and the most that it may come to."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> int:
        """The number of a new row: `low <= sum(value * x[column]) <= high`."""
        row = len(self.low)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)
        return row

    def matrix(self, width: int) -> Any:
        """The matrix, of so many columns."""
        from scipy.sparse import csr_array

        indices = np.array([self.rows, self.columns], np.int32)  # scipy 1.11 takes no others
        return csr_array((self.values, tuple(indices)), shape=(len(self.low), width))
