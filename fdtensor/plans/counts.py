"""Counts of what each rank of a mesh holds, lacks and sends, in closed form from the layouts.

What a rank must get is its new block, a term for each pending reduction, without what it already
holds. A count is an array that broadcasts over its mesh, of Python ints: sums over terms and ranks
go beyond 64 bits. Those of one number for each of many ranks are of int64 where all are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdtensor.layouts.blocks import intersect, length, whole
from fdtensor.layouts.mesh import Coord, Mesh
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
    "per_rank",
    "shared",
    "to_receive",
    "to_send",
]


Count = NDArray[Any]
"""A number for each rank, as an array that broadcasts over the mesh: of ints of any size, or of
int64 where all are below `SMALL`, which bytes, rounds and ranks may multiply."""

SMALL = 1 << 32

Places = NDArray[np.intp] | slice  # where ranks are in the order of a mesh


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


def _common_numel(a: NormalType, b: NormalType, kind: Any = np.object_) -> Count:
    """The elements that each rank holds in both, on one mesh, as such an array."""
    total: Count = constant(a.mesh, 1).astype(kind)
    for d, (before, after) in enumerate(zip(a.cuts, b.cuts, strict=True)):
        if before == after[: len(before)]:
            total = total * _lengths(b, d).astype(kind)
        elif after == before[: len(after)]:
            total = total * _lengths(a, d).astype(kind)
        elif (both := shared(a, b, d)) is not None:
            total = total * both.astype(kind)
        else:

            def common(c: list[int], d: int = d) -> int:
                return length(intersect(a.indices(d, tuple(c)), b.indices(d, tuple(c))))

            total = total * table(a, axes_of((a, d), (b, d)), common).astype(kind)
    return total


def shared(a: NormalType, b: NormalType, d: int) -> NDArray[np.int64] | None:
    """How many indices of dim `d` a block of one type and a block of the other have in common.

    By the indices along the axes that cut the dim; None where that has no closed form.
    """
    if _plain(a, d) and _plain(b, d):
        (start, size), (other, its) = _blocks(a, d), _blocks(b, d)
        return np.maximum(np.minimum(start + size, other + its) - np.maximum(start, other), 0)
    return _shared(a, b, d) if _units(a, b, d) else None


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


def _shared(a: NormalType, b: NormalType, d: int) -> NDArray[np.int64]:
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
    return np.reshape(counts, shape) * (a.shape[d] // units)


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


def per_rank(mesh: Mesh, numbers: Sequence[int]) -> Count:
    """An array over a mesh from the number of each rank, in their order."""
    kind: Any = np.int64 if max(numbers) < SMALL else np.object_
    return np.reshape(np.array(numbers, kind), mesh.sizes)


@remembered(4096)
def to_receive(moves: Movement) -> Count:
    """The elements that each destination rank must get from others."""
    wanted: Count = np.asarray(numel(moves.dst) * moves.terms)
    kind: Any = np.int64 if most(wanted) < SMALL else np.object_
    wanted = wanted.astype(kind)
    if moves.same_mesh:
        return wanted - _common_numel(moves.src, moves.dst, kind)
    before, after = _in_both(moves.src.mesh, moves.dst.mesh)
    wanted = np.array(np.broadcast_to(wanted, moves.dst.mesh.sizes), order="C")
    flat = np.ravel(wanted)  # a view
    flat[after] -= _held_by_both(moves.src, before, moves.dst, after, kind)
    return wanted


def _in_both(a: Mesh, b: Mesh) -> tuple[Places, Places]:
    """The places in two meshes of the ranks that are in both."""
    if isinstance(a.order, range) and isinstance(b.order, range):
        places = slice(min(len(a.order), len(b.order)))
        return places, places
    first, second = np.asarray(a.order), np.asarray(b.order)
    _, before, after = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    return before, after


def _held_by_both(a: NormalType, before: Places, b: NormalType, after: Places, kind: Any) -> Count:
    """The elements that ranks at these places of either mesh hold in both types."""
    total: Count = np.ones(1, kind)
    for d, size in enumerate(a.shape):
        if not a.cuts[d] and not b.cuts[d]:
            total = total * size
        elif _plain(a, d) and _plain(b, d):
            start, held = (_at(count, a, before) for count in _blocks(a, d))
            other, its = (_at(count, b, after) for count in _blocks(b, d))
            shared = np.minimum(start + held, other + its) - np.maximum(start, other)
            total = total * np.maximum(shared, 0).astype(kind)
        else:
            first, second = _blocks_of(a, d, before), _blocks_of(b, d, after)
            apart = b.mesh.size
            pairs, which = np.unique(first * apart + second, return_inverse=True)
            both: list[int] = pairs.tolist()
            lengths = [_shared_by(a, pair // apart, b, pair % apart, d) for pair in both]
            total = total * np.array(lengths, kind)[np.ravel(which)]
    return total


def _at(count: NDArray[np.int64], type: NormalType, places: Places) -> NDArray[np.int64]:
    """A count of the ranks at these places."""
    return np.reshape(np.broadcast_to(count, type.mesh.sizes), -1)[places]


def _blocks_of(type: NormalType, d: int, places: Places) -> NDArray[np.int64]:
    """The number of the block of dim `d` that each rank at these places holds."""
    axes = [axis for axis, _, _ in type.cuts[d]]
    sizes = [size if axis in axes else 1 for axis, size in enumerate(type.mesh.sizes)]
    return _at(np.reshape(np.arange(prod(sizes)), sizes), type, places)


def _shared_by(a: NormalType, i: int, b: NormalType, j: int, d: int) -> int:
    """How many indices of dim `d` are in block `i` of one type and in block `j` of another."""
    first, second = a.indices(d, _coord(a, i, d)), b.indices(d, _coord(b, j, d))
    return length(intersect(first, second))


def _coord(type: NormalType, block: int, d: int) -> Coord:
    """The first coordinate with this block of dim `d`."""
    axes = [axis for axis, _, _ in type.cuts[d]]
    coord = [0] * type.mesh.ndim
    for axis in sorted(axes, reverse=True):
        block, coord[axis] = divmod(block, type.mesh.sizes[axis])
    return tuple(coord)


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
