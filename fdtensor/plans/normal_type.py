"""`NormalType`: a type as the planner sees it, and which of its blocks meet a part of a dim."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod

import attrs

from fdtensor.layouts.blocks import Box, Intervals, cut, intersect, length, locate, whole
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.placement import Cut, Partial, Ragged, Replicate, Shard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["Cuts", "NormalType", "Overlap", "dim_to_cut", "normalized", "overlaps"]

Cuts = tuple[tuple[int, int, Cut], ...]
"""The cuts of a dim, outermost first: axis, size of the axis, placement."""


@attrs.frozen(eq=False)
class NormalType:
    """A type with its axes by index, none of size 1, and a 0-d tensor as one element."""

    type: TensorType
    shape: tuple[int, ...]
    cuts: tuple[Cuts, ...]
    """Those of each dim."""
    cut_axes: frozenset[int]
    partial: tuple[int, ...]
    free: tuple[int, ...]
    """The axes that hold replicas."""
    memo: dict[tuple[int, Coord], Intervals] = attrs.field(
        factory=lambda: dict[tuple[int, Coord], Intervals](), repr=False
    )

    @property
    def mesh(self) -> Mesh:
        return self.type.mesh

    def indices(self, dim: int, coord: Coord) -> Intervals:
        """The indices of `dim` that the rank at `coord` holds."""
        cuts = self.cuts[dim]
        key = (dim, tuple([coord[axis] for axis, _, _ in cuts]))
        intervals = self.memo.get(key)
        if intervals is None:
            intervals = whole(self.shape[dim])
            for axis, count, placement in cuts:
                intervals = cut(intervals, placement, count, coord[axis])
            if len(self.memo) < 65536:
                self.memo[key] = intervals
        return intervals

    def box(self, coord: Coord) -> Box:
        """The indices that the rank at `coord` holds."""
        return tuple([self.indices(d, coord) for d in range(len(self.shape))])


@remembered(4096)
def normalized(type: TensorType) -> NormalType:
    """The normal type of a type."""
    layout, mesh = type.layout, type.mesh
    index = {axis: i for i, axis in enumerate(mesh.axes)}
    cuts: list[Cuts] = []
    for d in range(max(1, len(type.shape))):
        axes = [index[axis] for axis in layout.cuts(d)]
        placed = [(i, mesh.sizes[i], layout.placements[i]) for i in axes if mesh.sizes[i] > 1]
        cuts.append(tuple([(i, n, p) for i, n, p in placed if isinstance(p, Cut)]))
    large = [i for i, size in enumerate(mesh.sizes) if size > 1]
    return NormalType(
        type,
        type.shape or (1,),
        tuple(cuts),
        frozenset(axis for dim in cuts for axis, _, _ in dim),
        tuple(i for i in large if isinstance(layout.placements[i], Partial)),
        tuple(i for i in large if isinstance(layout.placements[i], Replicate)),
    )


def dim_to_cut(
    type: TensorType,
    axis: int,
    wanted: int | None = None,
    beside: TensorType | None = None,
    near: bool = True,
) -> int:
    """The dim that `axis` had best cut further: `wanted` if given, else the first that it divides.

    Before come dims where each block then lies in one of `beside`, and where it is to be `near`
    those where it meets fewer of these. Of dims that it does not divide the one with most room is
    taken.
    """
    if wanted is not None:
        return wanted
    normal, count = normalized(type), type.mesh.sizes[axis]
    outer = None if beside is None else normalized(beside).cuts

    def room(d: int) -> tuple[float, bool, bool, int]:
        cuts = normal.cuts[d]
        ways = prod(n for _, n, _ in cuts)
        size = -(-normal.shape[d] // ways)
        even = _plain(cuts) and normal.shape[d] % (ways * count) == 0
        fewer, within = 1.0, False
        if outer is not None and size >= count:
            within = cuts[: len(outer[d])] == outer[d]
            if near and even and _plain(outer[d]):
                blocks = prod(n for _, n, _ in outer[d])
                fewer = _met(blocks, ways) / _met(blocks, ways * count)
        return fewer, within, even, 0 if even else size

    return max(range(len(normal.shape)), key=lambda d: (*room(d), -d))


def _plain(cuts: Sequence[tuple[int, int, Cut]]) -> bool:
    return all(isinstance(placement, Shard) for _, _, placement in cuts)


def _met(blocks: int, ways: int) -> int:
    """How many of the blocks of a dim one of `ways` equal parts of it meets at most."""
    even = blocks % ways == 0 or ways % blocks == 0
    return max(1, blocks // ways) if even else blocks // ways + 2


Overlap = tuple[Coord, Intervals]
"""Indices along axes, and the indices of a dim that a block has there."""


def overlaps(
    cuts: Cuts, block: Intervals, target: Intervals, fixed: Mapping[int, int]
) -> list[Overlap]:
    """The blocks that `cuts` leave of `block` and that meet `target`: coordinates, common indices.

    Axes in `fixed` have that coordinate only. Descends only into what meets the target.
    """
    if not target:
        return []
    if not cuts:
        return [((), target)]
    axis, count, placement = cuts[0]
    blocks: list[Overlap] = []
    for i in (fixed[axis],) if axis in fixed else _meeting(block, placement, count, target):
        child = cut(block, placement, count, i)
        common = intersect(child, target)
        if common:
            rests = overlaps(cuts[1:], child, common, fixed)
            blocks += [((i, *rest), part) for rest, part in rests]
    return blocks


def _meeting(block: Intervals, placement: Cut, count: int, target: Intervals) -> Iterable[int]:
    """The indices along an axis whose blocks may meet the target."""
    common = intersect(block, target)
    if not common:
        return ()
    positions = locate(block, common)
    low, high = positions[0][0], positions[-1][1]
    match placement:
        case Shard():
            step = -(-length(block) // count)
            return range(low // step, (high - 1) // step + 1)
        case Ragged(_, sizes):
            stops = _stops(sizes)
            return range(bisect_right(stops, low), min(count, bisect_left(stops, high) + 1))
        case _:
            return range(count)


@remembered(256)
def _stops(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes))
