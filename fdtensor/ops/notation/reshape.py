"""Reshapes: the cuts of dims before that are cuts of dims after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm, prod

from fdtensor.ops.notation.core import S, Units

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

    Each factor that a dim before and one after have in common may be cut.
    """
    if prod(shape) == 0:
        return
    for before, after in groups(shape, size):
        if len(before) == len(after) == 1:
            yield (S(before[0]),), S(after[0])
            continue
        for i, low, high in _spans(before, shape):
            for j, first, last in _spans(after, size):
                unit, block = lcm(low, first), gcd(high, last)
                if unit < block and block % unit == 0:
                    yield (
                        (Units(i, unit // low, high // block),),
                        Units(j, unit // first, last // block),
                    )


def _spans(dims: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Dims, each with the numbers of elements of one of its indices and of all of them."""
    high = prod(shape[d] for d in dims)
    for d in dims:
        yield d, high // shape[d], high
        high //= shape[d]
