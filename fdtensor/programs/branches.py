"""`branches`: the branches of an integer program that takes one alternative of each group."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.linear_program import Solved

__all__ = ["WHOLE", "branches"]

WHOLE = 1e-6
"""How much of an alternative a whole solution may lack, and of a cost two that are the same."""

Solve = Callable[[frozenset[int]], Solved | None]
"""The solution of the relaxation without some variables; None for none."""


def branches(
    solve: Solve,
    first: Solved | None,
    groups: Sequence[NDArray[np.int64]],
    cost_of: Callable[[NDArray[np.float64]], float] | None = None,
) -> Iterator[tuple[float, Solved]]:
    """What no whole solution costs less than, more with every branch, and the branch's solution.

    `first` is the solution with all variables; a branch leaves out one of the alternatives of a
    group, or all others, and the one that costs least is next. The last solution is whole. Where
    costs grow meanwhile, `cost_of` has what a solution costs by then, and it is solved again.
    """
    number = itertools.count()
    left = [] if first is None else [(first.cost, next(number), frozenset[int](), first)]
    while left:
        least, _, without, solution = heapq.heappop(left)
        yield least, solution
        parts = _halves(solution.x, groups)
        if cost_of is not None and cost_of(solution.x) > least * (1 + WHOLE):
            parts = [frozenset[int]()]
        elif not parts:
            break
        for part in parts:
            after = solve(without | part)
            if after is not None:
                heapq.heappush(left, (max(least, after.cost), next(number), without | part, after))


def _halves(x: NDArray[np.float64], groups: Sequence[NDArray[np.int64]]) -> list[frozenset[int]]:
    """The alternative that the most undecided group takes the most of, and its others.

    None where all groups are decided.
    """
    group = min(groups, key=lambda group: x[group].max())
    k = int(np.argmax(x[group]))
    if x[group[k]] > 1 - WHOLE:
        return []
    return [frozenset([int(group[k])]), frozenset(np.delete(group, k).tolist())]
