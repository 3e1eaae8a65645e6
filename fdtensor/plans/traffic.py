"""Traffic: the bytes that each rank receives and sends in a step.

They follow from the layouts alone, in closed form: what a rank must get is its new block, a term
for each pending reduction, without what it already holds. Counts of all ranks are arrays that
broadcast over their mesh, of Python ints: sums over terms and ranks go beyond 64 bits.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod

import numpy as np

from fdtensor.layouts.blocks import intersect, length, whole
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard
from fdtensor.plans.collective import AllReduce, Mask, Pad, Scale, Slice, Step, is_local
from fdtensor.plans.messages import Grid, Talk, grid, overlaps, route, talk

__all__ = [
    "all_received",
    "axes_of",
    "constant",
    "lacking",
    "most",
    "most_received",
    "most_sent",
    "received",
    "received_at",
    "sent",
    "sent_at",
    "summed",
    "table",
]


def received(step: Step) -> np.ndarray:
    """The bytes each rank of `step.dst.mesh` receives, as an array that broadcasts over it."""
    itemsize = step.src.dtype.itemsize
    match step.collective:
        case Slice() | Mask() | Pad() | Scale():
            return constant(step.dst.mesh, 0)
        case AllReduce():
            return _around(step) // _members(step)
        case _:
            return lacking(talk(step.src, step.dst)) * itemsize


def received_at(step: Step, rank: int) -> int:
    """The bytes that `rank` receives, message by message."""
    coord = step.dst.mesh.coord(rank)
    match step.collective:
        case _ if coord is None or is_local(step):
            return 0
        case AllReduce():
            count = _members(step)
            return step.src.local_nbytes(rank) * 2 * (count - 1) // count
        case _:
            recvs = route(step.src, step.dst, rank).recvs
            return sum(message.numel for message in recvs) * step.src.dtype.itemsize


def sent(step: Step) -> np.ndarray:
    """The bytes each rank of `step.src.mesh` sends, as an array that broadcasts over it."""
    itemsize = step.src.dtype.itemsize
    if is_local(step) or isinstance(step.collective, AllReduce):
        return received(step)
    who = talk(step.src, step.dst)
    if who.same_mesh:
        return _speaking(who) * itemsize
    counts = [sent_at(step, rank) for rank in step.src.mesh.order]
    return np.array(counts, object).reshape(step.src.mesh.sizes)


def sent_at(step: Step, rank: int) -> int:
    """The bytes that `rank` sends, message by message."""
    if is_local(step) or step.src.mesh.coord(rank) is None:
        return 0
    if isinstance(step.collective, AllReduce):
        return received_at(step, rank)
    sends = route(step.src, step.dst, rank).sends
    return sum(message.numel for message in sends) * step.src.dtype.itemsize


def most_received(steps: Iterable[Step]) -> int:
    """The bytes that the busiest rank receives in these steps."""
    return _busiest([(step.dst.mesh, received(step)) for step in steps if not is_local(step)])


def most_sent(steps: Iterable[Step]) -> int:
    """The bytes that the rank that sends most sends in these steps."""
    return _busiest([(step.src.mesh, sent(step)) for step in steps if not is_local(step)])


def all_received(steps: Iterable[Step]) -> int:
    """The bytes that all ranks together receive in these steps."""
    return sum(map(_received_by_all, steps))


def _received_by_all(step: Step) -> int:
    if isinstance(step.collective, AllReduce):  # a rank has the mean of them, rounded down
        return summed(step.src.mesh.sizes, _around(step)) // _members(step)
    return summed(step.dst.mesh.sizes, received(step))


def _around(step: Step) -> np.ndarray:
    """The bytes that all members of each rank's group receive in an all-reduce."""
    return _block_numel(grid(step.src)) * step.src.dtype.itemsize * (2 * (_members(step) - 1))


def _members(step: Step) -> int:
    """The ranks that reduce together."""
    axes: Sequence[str] = step.collective.axes  # type: ignore[union-attr]
    return prod(step.src.mesh.axis_size(axis) for axis in axes)


def _busiest(counts: Sequence[tuple[Mesh, np.ndarray]]) -> int:
    """The most that one rank has of counts that add up, each with its mesh."""
    if len({mesh for mesh, _ in counts}) <= 1:
        return most(sum((count for _, count in counts), np.zeros((), object)))
    by_rank: Counter[int] = Counter()
    for mesh, count in counts:
        for rank, n in zip(mesh.order, np.broadcast_to(count, mesh.sizes).flat):
            by_rank[rank] += n
    return max(by_rank.values())


def most(count: np.ndarray) -> int:
    """The largest number of a count."""
    return int(np.max(count, initial=0))


def summed(sizes: Sequence[int], count: np.ndarray) -> int:
    """The sum of a count over ranks along axes of these sizes."""
    return int(np.sum(count)) * (prod(sizes) // np.size(count))


def constant(mesh: Mesh, value: int) -> np.ndarray:
    """The count that every rank has."""
    return np.full((1,) * mesh.ndim, value, object)


def table(here: Grid, axes: Iterable[int], value: Callable[[list[int]], int]) -> np.ndarray:
    """`value` of the coordinates along `axes`, as an array that broadcasts over the mesh."""
    axes = sorted(set(axes))
    sizes = here.mesh.sizes
    coord = [0] * len(sizes)
    values = []
    for indices in product(*[range(sizes[a]) for a in axes]):
        for a, index in zip(axes, indices, strict=True):
            coord[a] = index
        values.append(value(coord))
    shape = [sizes[a] if a in axes else 1 for a in range(len(sizes))]
    return np.array(values, object).reshape(shape)


def axes_of(*grids: tuple[Grid, int]) -> list[int]:
    return [axis for here, d in grids for axis, _, _ in here.cuts[d]]


def _lengths(here: Grid, d: int) -> np.ndarray:
    """How many indices of dim `d` each rank holds."""
    ways = prod(count for _, count, _ in here.cuts[d])
    plain = all(isinstance(placement, Shard) for _, _, placement in here.cuts[d])
    if plain and here.shape[d] % ways == 0:
        return constant(here.mesh, here.shape[d] // ways)
    return table(here, axes_of((here, d)), lambda c: length(here.held(d, tuple(c))))


@functools.lru_cache(maxsize=4096)
def _block_numel(here: Grid) -> np.ndarray:
    total = constant(here.mesh, 1)
    for d in range(len(here.shape)):
        total = total * _lengths(here, d)
    return total


def _common_numel(a: Grid, b: Grid) -> np.ndarray:
    """What each rank holds in both, on one mesh."""
    total = constant(a.mesh, 1)
    for d, (before, after) in enumerate(zip(a.cuts, b.cuts, strict=True)):
        if before == after[: len(before)]:
            total = total * _lengths(b, d)
        elif after == before[: len(after)]:
            total = total * _lengths(a, d)
        else:

            def common(c: list[int], d: int = d) -> int:
                return length(intersect(a.held(d, tuple(c)), b.held(d, tuple(c))))

            total = total * table(a, axes_of((a, d), (b, d)), common)
    return total


@functools.lru_cache(maxsize=4096)
def lacking(who: Talk) -> np.ndarray:
    """The elements each destination rank must get from others."""
    wanted = _block_numel(who.dst) * who.terms
    if who.same_mesh:
        return wanted - _common_numel(who.src, who.dst)
    src, dst = who.src, who.dst
    if not set(src.mesh.order).isdisjoint(dst.mesh.order):
        wanted = np.broadcast_to(wanted, dst.mesh.sizes).copy()
        flat = wanted.reshape(-1)
        for place, rank in enumerate(dst.mesh.order):
            here, there = src.mesh.coord(rank), dst.mesh.coord(rank)
            if here is not None and there is not None:
                boxes = zip(src.box(here), dst.box(there), strict=True)
                flat[place] -= prod(length(intersect(a, b)) for a, b in boxes)
    return wanted


def _speaking(who: Talk) -> np.ndarray:
    """The elements each source rank sends on one mesh: what others want less what they hold."""
    src, dst, said = who.src, who.dst, who.said
    paired = {b for _, b in who.pairs}
    same = set(src.cut_axes) | set(who.reduced)
    wanted = constant(src.mesh, 1)
    holding = wanted
    for d in range(len(src.shape)):
        axes = axes_of((said, d), (dst, d))

        def met(c: list[int], fixed: Iterable[int], d: int = d) -> int:
            part = said.held(d, tuple(c))
            found = overlaps(dst.cuts[d], whole(dst.shape[d]), part, {b: c[b] for b in fixed})
            return sum(length(common) for _, common in found)

        wanted = wanted * table(src, axes, lambda c: met(c, paired))
        holding = holding * table(src, axes, lambda c: met(c, paired | same))
    ranks = prod(dst.mesh.sizes[b] for b in dst.free if b not in paired)
    return wanted * ranks - holding
