"""Blocks: which indices of a dim a cut leaves to each rank.

In each dim a rank's block is an ascending tuple of intervals `(start, stop)`: one for shards,
several for strided ones, none for an empty block. Every cut takes some of the positions of what
the cuts before it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fdtensor.layouts.placement import Cut, Ragged, Shard, Spans, StridedShard

__all__ = [
    "Box",
    "Intervals",
    "chunk",
    "cut",
    "intersect",
    "length",
    "locate",
    "longest_dim",
    "merged",
    "select",
    "share",
    "whole",
    "united",
]

Intervals = tuple[tuple[int, int], ...]
"""Ascending, disjoint, non-empty ranges `(start, stop)`."""

Box = tuple[Intervals, ...]
"""The indices of a block: intervals for each dim."""


def length(intervals: Intervals) -> int:
    """How many indices the intervals hold."""
    return sum(stop - start for start, stop in intervals)


def select(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The indices at positions `start` to `stop` of the intervals."""
    if len(intervals) == 1:
        first = intervals[0][0]
        return ((first + start, first + stop),) if start < stop else ()
    return _select_all(intervals, [(start, stop)])


def longest_dim(box: Box) -> int:
    """The first dim of which a box has the most indices."""
    return max(range(len(box)), key=lambda d: length(box[d]))


def share(box: Box, index: int, count: int) -> Box:
    """Part `index`, of `count`, of a box: a share of its longest dim, perhaps empty."""
    d = longest_dim(box)
    size = length(box[d])
    part = select(box[d], size * index // count, size * (index + 1) // count)
    return (*box[:d], part, *box[d + 1 :])


def _select_all(intervals: Intervals, ranges: Sequence[tuple[int, int]]) -> Intervals:
    """The indices at ascending ranges of positions of the intervals."""
    taken: list[tuple[int, int]] = []
    i = passed = 0
    for start, stop in ranges:
        while start < stop:
            low, high = intervals[i]
            if start >= passed + high - low:
                passed += high - low
                i += 1
                continue
            end = min(stop, passed + high - low)
            taken.append((low + start - passed, low + end - passed))
            start = end
    return tuple(taken)


def merged(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """The ascending intervals with those that touch joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def united(ranges: Iterable[tuple[int, int]], size: int) -> Intervals:
    """The ranges, cut off at the ends of a dim of `size`, joined where they touch or overlap."""
    joined: list[tuple[int, int]] = []
    for a, b in sorted((max(0, a), min(size, b)) for a, b in ranges):
        if joined and a <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(b, joined[-1][1])
        elif a < b:
            joined.append((a, b))
    return tuple(joined)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The indices in both."""
    if len(a) == 1 and len(b) == 1:
        start, stop = max(a[0][0], b[0][0]), min(a[0][1], b[0][1])
        return ((start, stop),) if start < stop else ()
    both: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            both.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def locate(intervals: Intervals, part: Intervals) -> Intervals:
    """The positions at which `intervals` hold the indices of `part`, all of which they have.

    One interval of positions for each of `part`, each of which must lie within one of `intervals`.
    """
    if len(intervals) == 1:
        first = intervals[0][0]
        return tuple((start - first, stop - first) for start, stop in part)
    positions: list[tuple[int, int]] = []
    passed = i = 0
    for start, stop in part:
        while intervals[i][1] <= start:
            passed += intervals[i][1] - intervals[i][0]
            i += 1
        position = passed + start - intervals[i][0]
        positions.append((position, position + stop - start))
    return tuple(positions)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """The range of block `index`, of `count`, in `size` positions: `ceil(size / count)` each."""
    step = -(-size // count)
    return min(size, step * index), min(size, step * (index + 1))


def cut(intervals: Intervals, placement: Cut, count: int, index: int) -> Intervals:
    """The intervals that index `index`, of `count`, keeps."""
    size = length(intervals)
    match placement:
        case Shard():
            return select(intervals, *chunk(size, count, index))
        case Ragged(_, sizes):
            start = sum(sizes[:index])
            return select(intervals, start, start + sizes[index])
        case StridedShard(_, factor):
            kept: list[tuple[int, int]] = []
            step = -(-size // factor) if size else 1
            for start in range(0, size, step):
                low, high = chunk(min(step, size - start), count, index)
                kept.append((start + low, start + high))
            return merged(_select_all(intervals, kept))
        case Spans(_, spans):
            return spans[index]  # it is the first cut of its dim


def whole(size: int) -> Intervals:
    """All indices of a dim."""
    return ((0, size),) if size else ()
