"""Reshapes: the cuts of dims before that are cuts of dims after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm, prod

import torch

from fdtensor.ops.notation.core import S, Units

__all__ = ["RESHAPES", "UNSAFE", "groups", "recut", "reshaped"]

aten = torch.ops.aten

UNSAFE = aten._unsafe_view.default
"""The view that torch writes where it knows of no other view of the tensor."""

RESHAPES = {aten.view.default, UNSAFE, aten.reshape.default}


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
        for i, low, high, j, first, last in _shared(before, after, shape, size):
            unit, block = lcm(low, first), gcd(high, last)
            yield (
                (Units(i, unit // low, high // block),),
                Units(j, unit // first, last // block),
            )


def recut(shape: Sequence[int], size: Sequence[int], dim: int, blocks: int):
    """Those in which each of `blocks` blocks of dim `dim` is cut, more of them than of the factor.

    A dim that several axes cut has such cuts where it is made of dims that each of them cuts.
    """
    if prod(shape) == 0:
        return
    for before, after in groups(shape, size):
        if len(before) == len(after) == 1:
            continue
        for i, low, high, j, first, last in _shared(before, after, shape, size):
            unit, block = lcm(low, first), high // blocks
            is_finer = i == dim and high % blocks == 0 and gcd(high, last) % block == 0
            if is_finer and unit < block < gcd(high, last) and block % unit == 0:
                yield (Units(i, unit // low, blocks),), Units(j, unit // first, last // block)


def _shared(
    before: Sequence[int], after: Sequence[int], shape: Sequence[int], size: Sequence[int]
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Dims before and after that share a factor, each with the elements of one index and of all."""
    for i, low, high in _spans(before, shape):
        for j, first, last in _spans(after, size):
            unit, block = lcm(low, first), gcd(high, last)
            if unit < block and block % unit == 0:
                yield i, low, high, j, first, last


def _spans(dims: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Dims, each with the numbers of elements of one of its indices and of all of them."""
    high = prod(shape[d] for d in dims)
    for d in dims:
        yield d, high // shape[d], high
        high //= shape[d]
