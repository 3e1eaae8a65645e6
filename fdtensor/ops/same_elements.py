"""`same_elements`: whether the blocks of a tensor are those of its reshape.

Even cuts are digits of an element's place in row-major order: the index along an axis is
`place // stride % radix`, or several such digits in a row. Two layouts hold the same elements where
each axis has the same digits. Blocks of other cuts are compared element by element, as ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import attrs

from fdtensor.layouts.blocks import whole
from fdtensor.layouts.placement import Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.notation.reshape import groups

__all__ = ["same_elements"]

MOST_RUNS = 1 << 20
"""How many ranges of elements of a rank are compared at most."""

Digits = list[tuple[int, int]]
"""Digits of a place, most significant first: the stride and the radix of each."""


@remembered(16384)
def same_elements(src: TensorType, dst: TensorType) -> bool:
    """Whether every rank holds the same elements, in the same order, before and after a reshape.

    False also where more than `MOST_RUNS` ranges would have to be compared, and where blocks that
    are empty differ in a dim.
    """
    for before, after in groups(src.shape, dst.shape):
        cut = any(src.layout.cuts(d) for d in before) or any(dst.layout.cuts(d) for d in after)
        if cut and not _same_group(src, before, dst, after):
            return False
    return True


def _same_group(
    src: TensorType, before: Sequence[int], dst: TensorType, after: Sequence[int]
) -> bool:
    """The same of dims that become others."""
    if _alike(src, before, dst, after):
        return True
    first, second = _digits(src, before), _digits(dst, after)
    if first is not None and second is not None:
        return first == second
    axes = {a for d in before for a in src.layout.cuts(d)}
    axes |= {a for d in after for a in dst.layout.cuts(d)}
    mesh = src.mesh
    coords = mesh.coset([a for a in mesh.axes if a in axes], (0,) * mesh.ndim)
    return all(_equal(_places(src, before, rank), _places(dst, after, rank)) for rank in coords)


def _alike(src: TensorType, before: Sequence[int], dst: TensorType, after: Sequence[int]) -> bool:
    """Whether one dim stays one, cut as it was."""
    if len(before) != 1 or len(after) != 1:
        return False
    (d,), (e,) = before, after
    axes = src.layout.cuts(d)
    if axes != dst.layout.cuts(e) or src.shape[d] != dst.shape[e]:
        return False
    return all(attrs.evolve(src.layout[axis], dim=e) == dst.layout[axis] for axis in axes)


def _digits(type: TensorType, dims: Sequence[int]) -> dict[str, Digits] | None:
    """The digits that each axis takes of an element's place in these dims; None if cuts are uneven.

    Digits that follow each other are one.
    """
    if not all(type.shape[d] for d in dims):
        return None
    taken: dict[str, Digits] = {}
    stride = 1
    for d in reversed(dims):
        left = [(stride, type.shape[d])]
        stride *= type.shape[d]
        for axis in type.layout.cuts(d):
            count, placement = type.mesh.axis_size(axis), type.layout[axis]
            if count == 1:
                continue
            if not isinstance(placement, (Shard, StridedShard)):
                return None
            parts = placement.split_factor if isinstance(placement, StridedShard) else 1
            apart = _split(left, parts)
            mine = None if apart is None else _split(apart[1], count)
            if apart is None or mine is None:
                return None
            left = [*apart[0], *mine[1]]
            taken[axis] = _joined_digits(mine[0])
    return taken


def _split(digits: Digits, count: int) -> tuple[Digits, Digits] | None:
    """The most significant digits that count to `count`, and the rest; None where none do."""
    first: Digits = []
    rest = list(digits)
    while count > 1:
        if not rest:
            return None
        stride, radix = rest.pop(0)
        if count % radix == 0:
            first.append((stride, radix))
            count //= radix
        elif radix % count == 0:
            first.append((stride * (radix // count), count))
            rest.insert(0, (stride, radix // count))
            count = 1
        else:
            return None
    return first, rest


def _joined_digits(digits: Digits) -> Digits:
    """The digits, with those that follow each other as one."""
    joined: Digits = []
    for stride, radix in digits:
        if radix == 1:
            continue
        if joined and joined[-1][0] == stride * radix:
            joined[-1] = stride, joined[-1][1] * radix
        else:
            joined.append((stride, radix))
    return joined


def _equal(first: Iterator[tuple[int, int]], second: Iterator[tuple[int, int]]) -> bool:
    pairs = itertools.islice(itertools.zip_longest(first, second), MOST_RUNS)
    return all(a == b for a, b in pairs) and next(first, None) is None


def _places(type: TensorType, dims: Sequence[int], rank: int) -> Iterator[tuple[int, int]]:
    """The places of a rank's elements in these dims, counted in row-major order, as ranges."""
    coord = type.mesh.coord(rank)
    assert coord is not None
    box = type.box(coord)
    shape, parts = [type.shape[d] for d in dims], [box[d] for d in dims]
    last = max((i for i, part in enumerate(parts) if part != whole(shape[i])), default=0)

    def walk(i: int, start: int) -> Iterator[tuple[int, int]]:
        step = prod(shape[i + 1 :])
        for a, b in parts[i]:
            if i == last:  # the dims inside of it are whole
                yield start + a * step, start + b * step
            else:
                for j in range(a, b):
                    yield from walk(i + 1, start + j * step)

    return _joined(walk(0, 0)) if all(parts) and parts else iter(())


def _joined(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges, with those that touch as one."""
    last = next(runs, None)
    for run in runs:
        assert last is not None
        if run[0] == last[1]:
            last = last[0], run[1]
        else:
            yield last
            last = run
    if last is not None:
        yield last
