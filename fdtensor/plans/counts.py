"""Counts of what each rank of a mesh holds, lacks and sends, in closed form from the layouts.

What a rank must get is its new block, a term for each pending reduction, without what it already
holds. A count is an array that broadcasts over its mesh, of Python ints: sums over terms and ranks
go beyond 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from fdtensor.layouts.blocks import intersect, length, whole
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.movement import Movement
from fdtensor.plans.normal_type import NormalType, overlaps

__all__ = [
    "Count",
    "axes_of",
    "constant",
    "numel",
    "most",
    "summed",
    "table",
    "to_receive",
    "to_send",
]


Count = NDArray[np.object_]
"""A number for each rank, as an array of ints of any size that broadcasts over the mesh."""


def most(count: Count) -> int:
    """The largest number of a count."""
    return int(np.max(count, initial=0))


def summed(sizes: Sequence[int], count: Count) -> int:
    """The sum of a count over ranks along axes of these sizes."""
    return int(np.sum(count)) * (prod(sizes) // np.size(count))


def constant(mesh: Mesh, value: int) -> Count:
    """The count that every rank has."""
    return np.full((1,) * mesh.ndim, value, np.object_)


def table(type: NormalType, axes: Iterable[int], value: Callable[[list[int]], int]) -> Count:
    """`value` of the coordinates along `axes`, as an array that broadcasts over the mesh."""
    axes = sorted(set(axes))
    sizes = type.mesh.sizes
    coord = [0] * len(sizes)
    values: list[int] = []
    for indices in product(*[range(sizes[a]) for a in axes]):
        for a, index in zip(axes, indices, strict=True):
            coord[a] = index
        values.append(value(coord))
    shape = [sizes[a] if a in axes else 1 for a in range(len(sizes))]
    return np.reshape(np.array(values, np.object_), shape)


def axes_of(*dims: tuple[NormalType, int]) -> list[int]:
    """The axes that cut these dims, each of a type."""
    return [axis for type, d in dims for axis, _, _ in type.cuts[d]]


def _lengths(type: NormalType, d: int) -> Count:
    """How many indices of dim `d` each rank holds."""
    if _plain(type, d):
        return _blocks(type, d)[1].astype(np.object_)
    if _unit(type, d):
        return constant(type.mesh, type.shape[d] // prod(count for _, count, _ in type.cuts[d]))
    return table(type, axes_of((type, d)), lambda c: length(type.indices(d, tuple(c))))


@remembered(4096)
def numel(type: NormalType) -> Count:
    """The elements that each rank holds."""
    total = constant(type.mesh, 1)
    for d in range(len(type.shape)):
        total = total * _lengths(type, d)
    return total


def _common_numel(a: NormalType, b: NormalType) -> Count:
    """The elements that each rank holds in both, on one mesh."""
    total = constant(a.mesh, 1)
    for d, (before, after) in enumerate(zip(a.cuts, b.cuts, strict=True)):
        if before == after[: len(before)]:
            total = total * _lengths(b, d)
        elif after == before[: len(after)]:
            total = total * _lengths(a, d)
        elif _plain(a, d) and _plain(b, d):
            (start, size), (other, its) = _blocks(a, d), _blocks(b, d)
            shared = np.minimum(start + size, other + its) - np.maximum(start, other)
            total = total * np.maximum(shared, 0).astype(np.object_)
        elif _units(a, b, d):
            total = total * _shared(a, b, d)
        else:

            def common(c: list[int], d: int = d) -> int:
                return length(intersect(a.indices(d, tuple(c)), b.indices(d, tuple(c))))

            total = total * table(a, axes_of((a, d), (b, d)), common)
    return total


def _plain(type: NormalType, d: int) -> bool:
    """Whether each rank holds one block of dim `d`, as `torch.chunk` cuts."""
    shards = all(isinstance(placement, Shard) for _, _, placement in type.cuts[d])
    return shards and type.shape[d] < 1 << 62


def _blocks(type: NormalType, d: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the block of each rank begins in a dim that is cut plainly, and how long it is."""
    start = np.zeros((1,) * type.mesh.ndim, np.int64)
    size, axes = np.full_like(start, type.shape[d]), range(type.mesh.ndim)
    for axis, count, _ in type.cuts[d]:
        index = np.reshape(np.arange(count), [count if a == axis else 1 for a in axes])
        most_held = -(-size // count)
        before = np.minimum(index * most_held, size)
        start, size = start + before, np.minimum(most_held, size - before)
    return start, size


MOST_UNITS = 1 << 20
"""The most parts of a dim that are told apart."""


def _unit(type: NormalType, d: int) -> int:
    """The length of the pieces that even cuts leave of dim `d`; 0 where one is not even."""
    size = unit = type.shape[d]
    for _, count, placement in type.cuts[d]:
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        if not isinstance(placement, (Shard, StridedShard)) or size % (parts * count):
            return 0
        size //= count
        unit = gcd(unit, size // parts)
    return unit


def _units(a: NormalType, b: NormalType, d: int) -> int:
    """How many parts of dim `d` are whole to all ranks of both; 0 where cuts are not even."""
    unit = gcd(_unit(a, d), _unit(b, d)) if _unit(a, d) and _unit(b, d) else 0
    units = a.shape[d] // unit if unit else 0
    return units if units <= MOST_UNITS else 0


def _shared(a: NormalType, b: NormalType, d: int) -> Count:
    """How many indices of dim `d` each rank holds in both, where all cuts are even."""
    units, sizes = _units(a, b, d), a.mesh.sizes
    before, after = _owners(a, d, units), _owners(b, d, units)
    kept = np.ones(units, bool)
    for axis in before.keys() & after.keys():
        kept &= before[axis] == after[axis]
    owners = {**before, **after}
    axes = sorted(owners)
    flat = np.zeros(units, np.int64)
    for axis in axes:
        flat = flat * sizes[axis] + owners[axis]
    counts = np.bincount(flat[kept], minlength=prod(sizes[axis] for axis in axes))
    shape = [size if axis in owners else 1 for axis, size in enumerate(sizes)]
    return np.reshape(counts.astype(np.object_), shape) * (a.shape[d] // units)


def _owners(type: NormalType, d: int, units: int) -> dict[int, NDArray[np.int64]]:
    """For each axis that cuts dim `d`, evenly, its index that holds each of so many parts."""
    owners: dict[int, NDArray[np.int64]] = {}
    at, size = np.arange(units), units  # where a part is in what the cuts so far leave
    for axis, count, placement in type.cuts[d]:
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        step = size // parts // count
        owners[axis] = at % (size // parts) // step
        at = at // (size // parts) * step + at % step
        size //= count
    return owners


@remembered(4096)
def to_receive(moves: Movement) -> Count:
    """The elements that each destination rank must get from others."""
    wanted: Count = numel(moves.dst) * moves.terms
    if moves.same_mesh:
        return wanted - _common_numel(moves.src, moves.dst)
    src, dst = moves.src, moves.dst
    if not set(src.mesh.order).isdisjoint(dst.mesh.order):
        wanted = np.array(np.broadcast_to(wanted, dst.mesh.sizes), order="C")
        flat = np.ravel(wanted)  # a view
        for place, rank in enumerate(dst.mesh.order):
            before, after = src.mesh.coord(rank), dst.mesh.coord(rank)
            if before is not None and after is not None:
                boxes = zip(src.box(before), dst.box(after), strict=True)
                flat[place] -= prod(length(intersect(a, b)) for a, b in boxes)
    return wanted


def to_send(moves: Movement) -> Count:
    """The elements each source rank sends on one mesh: what others want less what they hold."""
    src, dst, assigned = moves.src, moves.dst, moves.assigned
    paired = {b for _, b in moves.pairs}
    same = set(src.cut_axes) | set(moves.reduced)
    wanted = constant(src.mesh, 1)
    held = wanted
    for d in range(len(src.shape)):
        axes = axes_of((assigned, d), (dst, d))

        def met(c: list[int], fixed: Iterable[int], d: int = d) -> int:
            part = assigned.indices(d, tuple(c))
            blocks = overlaps(dst.cuts[d], whole(dst.shape[d]), part, {b: c[b] for b in fixed})
            return sum(length(common) for _, common in blocks)

        wanted = wanted * table(src, axes, lambda c: met(c, paired))
        held = held * table(src, axes, lambda c: met(c, paired | same))
    replicas = prod(dst.mesh.sizes[b] for b in dst.free if b not in paired)
    return wanted * replicas - held
