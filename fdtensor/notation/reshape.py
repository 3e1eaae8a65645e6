"""Reshapes: which cuts of dims before are which cuts of dims after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod

from fdtensor.notation.core import S, U
from fdtensor.placement import StridedShard

__all__ = ["groups", "reshaped"]


def groups(shape: Sequence[int], size: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims of both shapes that hold the same number of elements.

    Dims of size 1 are in none.
    """
    before = [i for i, n in enumerate(shape) if n != 1]
    after = [j for j, n in enumerate(size) if n != 1]
    while before:
        left, right = [before.pop(0)], [after.pop(0)]
        m, n = shape[left[0]], size[right[0]]
        while m != n:
            if m < n:
                left.append(before.pop(0))
                m *= shape[left[-1]]
            else:
                right.append(after.pop(0))
                n *= size[right[-1]]
        yield left, right


def reshaped(shape: Sequence[int], size: Sequence[int]):
    """The rows of a reshape from `shape` to `size`, which have the same number of elements.

    Of each group the leading dims may be cut, in units that neither splits an element of the
    other; and the last dims, where one of them holds whole runs of the other.
    """
    if prod(shape) == 0:
        return
    for before, after in groups(shape, size):
        if len(before) == len(after) == 1:
            yield (S(before[0]),), S(after[0])
            continue
        i, j, total = before[0], after[0], prod(shape[k] for k in before)
        unit = lcm(total // shape[i], total // size[j])
        if unit < total:
            yield (U(i, unit * shape[i] // total),), U(j, unit * size[j] // total)
        i, j = before[-1], after[-1]
        if size[j] % shape[i] == 0:
            yield (S(i),), StridedShard(j, size[j] // shape[i])
        elif shape[i] % size[j] == 0:
            yield (StridedShard(i, shape[i] // size[j]),), S(j)
