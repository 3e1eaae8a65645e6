"""Traffic: the bytes that each rank receives and sends in a step, and what any plan must receive.

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

from fdtensor.blocks import intersect, length, whole
from fdtensor.collective import AllReduce, Mask, Pad, Scale, Slice, Step, is_local
from fdtensor.exchange import Grid, Talk, grid, overlaps, route, talk
from fdtensor.layout import TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import Shard

__all__ = [
    "all_received",
    "least_total",
    "lower_bound",
    "most_received",
    "most_sent",
    "received",
    "received_at",
    "sent",
    "sent_at",
]


def received(step: Step) -> np.ndarray:
    """The bytes each rank of `step.dst.mesh` receives, as an array that broadcasts over it."""
    itemsize = step.src.dtype.itemsize
    match step.collective:
        case Slice() | Mask() | Pad() | Scale():
            return _constant(step.dst.mesh, 0)
        case AllReduce(axes):
            count = prod(step.src.mesh.axis_size(axis) for axis in axes)
            return _block_numel(grid(step.src)) * itemsize * (2 * (count - 1)) // count
        case _:
            return _lacking(talk(step.src, step.dst)) * itemsize


def received_at(step: Step, rank: int) -> int:
    """The bytes that `rank` receives, message by message."""
    coord = step.dst.mesh.coord(rank)
    match step.collective:
        case _ if coord is None or is_local(step):
            return 0
        case AllReduce(axes):
            count = prod(step.src.mesh.axis_size(axis) for axis in axes)
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
    return sum(_together(step.dst.mesh.sizes, received(step)) for step in steps)


def _busiest(counts: Sequence[tuple[Mesh, np.ndarray]]) -> int:
    """The most that one rank has of counts that add up, each with its mesh."""
    if len({mesh for mesh, _ in counts}) <= 1:
        return int(np.max(sum((count for _, count in counts), np.zeros((), object)), initial=0))
    by_rank: Counter[int] = Counter()
    for mesh, count in counts:
        for rank, n in zip(mesh.order, np.broadcast_to(count, mesh.sizes).flat):
            by_rank[rank] += n
    return max(by_rank.values())


def _together(sizes: Sequence[int], count: np.ndarray) -> int:
    """The sum of a count over ranks along axes of these sizes."""
    return int(np.sum(count)) * (prod(sizes) // np.size(count))


def _constant(mesh: Mesh, value: int) -> np.ndarray:
    """The count that every rank has."""
    return np.full((1,) * mesh.ndim, value, object)


def _table(here: Grid, axes: Iterable[int], value: Callable[[list[int]], int]) -> np.ndarray:
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


def _axes_of(*grids: tuple[Grid, int]) -> list[int]:
    return [axis for here, d in grids for axis, _, _ in here.cuts[d]]


def _lengths(here: Grid, d: int) -> np.ndarray:
    """How many indices of dim `d` each rank holds."""
    ways = prod(count for _, count, _ in here.cuts[d])
    plain = all(isinstance(placement, Shard) for _, _, placement in here.cuts[d])
    if plain and here.shape[d] % ways == 0:
        return _constant(here.mesh, here.shape[d] // ways)
    return _table(here, _axes_of((here, d)), lambda c: length(here.held(d, tuple(c))))


@functools.lru_cache(maxsize=4096)
def _block_numel(here: Grid) -> np.ndarray:
    total = _constant(here.mesh, 1)
    for d in range(len(here.shape)):
        total = total * _lengths(here, d)
    return total


def _common_numel(a: Grid, b: Grid) -> np.ndarray:
    """What each rank holds in both, on one mesh."""
    total = _constant(a.mesh, 1)
    for d, (before, after) in enumerate(zip(a.cuts, b.cuts, strict=True)):
        if before == after[: len(before)]:
            total = total * _lengths(b, d)
        elif after == before[: len(after)]:
            total = total * _lengths(a, d)
        else:

            def common(c: list[int], d: int = d) -> int:
                return length(intersect(a.held(d, tuple(c)), b.held(d, tuple(c))))

            total = total * _table(a, _axes_of((a, d), (b, d)), common)
    return total


@functools.lru_cache(maxsize=4096)
def _lacking(who: Talk) -> np.ndarray:
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
    wanted = _constant(src.mesh, 1)
    holding = wanted
    for d in range(len(src.shape)):
        axes = _axes_of((said, d), (dst, d))

        def met(c: list[int], fixed: Iterable[int], d: int = d) -> int:
            part = said.held(d, tuple(c))
            found = overlaps(dst.cuts[d], whole(dst.shape[d]), part, {b: c[b] for b in fixed})
            return sum(length(common) for _, common in found)

        wanted = wanted * _table(src, axes, lambda c: met(c, paired))
        holding = holding * _table(src, axes, lambda c: met(c, paired | same))
    ranks = prod(dst.mesh.sizes[b] for b in dst.free if b not in paired)
    return wanted * ranks - holding


# --- the lower bound -------------------------------------------------------------------------


def lower_bound(src: TensorType, dst: TensorType) -> int:
    """The bytes that no plan can be below: of the busiest rank, with reductions of the mean rank.

    For movement a rank must receive what it lacks of its block. With reductions see `least_total`.
    """
    if src.numel and _is_movement(src, dst):
        return int(np.max(_lacking(talk(src, dst)), initial=0)) * src.dtype.itemsize
    ranks = src.mesh.size
    if src.mesh is not dst.mesh:
        ranks = len({*src.mesh.order, *dst.mesh.order})
    return least_total(src, dst) // ranks


@functools.lru_cache(maxsize=4096)
def least_total(src: TensorType, dst: TensorType) -> int:
    """The bytes that all ranks together must receive, whatever the plan.

    An element with t pending terms that k wanters want needs t + k - 1 transfers, one less if a
    wanter holds a term. A wanter is a rank, or all ranks that share new pending terms, one of which
    must get the element.
    """
    a, b = grid(src), grid(dst)
    itemsize = src.dtype.itemsize
    if src.numel == 0:
        return 0
    if _is_movement(src, dst):
        return _together(dst.mesh.sizes, _lacking(talk(src, dst))) * itemsize
    if src.mesh is not dst.mesh:
        return _cross_bound(src, dst, a, b)
    reduced = _reduced(a, b)
    adding = [i for i in b.partial if not _kept(a, b, i)]
    sizes = src.mesh.sizes
    cosets = prod(sizes[i] for i in b.partial if i in a.partial and i not in reduced)
    wanters = prod(sizes[i] for i in b.free) * cosets
    if adding and dst.layout.partial[dst.mesh.axes[adding[0]]] == "avg":  # all of them want it
        wanters *= prod(sizes[i] for i in adding)
        adding = []
    numel = prod(a.shape)
    if reduced:
        terms = prod(sizes[i] for i in reduced)
        total = numel * (cosets * (terms - 1) + wanters) - cosets * _meeting(a, b)
    else:
        total = numel * wanters - _covered(a, b, adding)
    return total * itemsize


def _is_movement(src: TensorType, dst: TensorType) -> bool:
    """Whether no terms are reduced and none are added."""
    a, b = grid(src), grid(dst)
    return not _reduced(a, b) and all(_kept(a, b, i) for i in b.partial)


def _kept(a: Grid, b: Grid, axis: int) -> bool:
    """Whether an axis may keep its pending terms: sums may become averages in place."""
    if a.mesh is not b.mesh or axis not in a.partial or axis not in b.partial:
        return False
    ops = {a.type.layout.placements[axis], b.type.layout.placements[axis]}
    return len(ops) == 1 or {str(op) for op in ops} == {"P(sum)", "P(avg)"}


def _reduced(a: Grid, b: Grid) -> list[int]:
    return [i for i in a.partial if not _kept(a, b, i)]


def _meeting(a: Grid, b: Grid) -> int:
    """The elements for which some rank both holds a term and wants the result."""
    both = sorted(a.cut_axes & b.cut_axes)
    total = _constant(a.mesh, 1)
    for d in range(len(a.shape)):

        def common(c: list[int], d: int = d) -> int:
            fixed = {axis: c[axis] for axis in both}
            return sum(
                length(part)
                for _, held in overlaps(a.cuts[d], whole(a.shape[d]), whole(a.shape[d]), fixed)
                for _, part in overlaps(b.cuts[d], whole(b.shape[d]), held, fixed)
            )

        axes = [axis for axis in _axes_of((a, d), (b, d)) if axis in both]
        total = total * _table(a, axes, common)
    return _together(_spread(a, both), total)


def _spread(here: Grid, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size if i in axes else 1 for i, size in enumerate(here.mesh.sizes))


def _covered(a: Grid, b: Grid, adding: Sequence[int]) -> int:
    """The wanted elements that some rank of the wanting ones holds, over all wanters."""
    kept = [i for i in b.partial if _kept(a, b, i)]
    fixed_axes = [i for i in range(a.mesh.ndim) if i not in adding and i not in kept]
    total = _constant(a.mesh, 1)
    for d in range(len(a.shape)):

        def common(c: list[int], d: int = d) -> int:
            fixed = {axis: c[axis] for axis in fixed_axes}
            held = overlaps(a.cuts[d], whole(a.shape[d]), b.held(d, tuple(c)), fixed)
            return sum(length(part) for _, part in held)

        axes = [axis for axis in _axes_of((a, d), (b, d)) if axis in fixed_axes]
        total = total * _table(a, axes, common)
    return _together(_spread(a, [*fixed_axes, *kept]), total)


def _cross_bound(src: TensorType, dst: TensorType, a: Grid, b: Grid) -> int:
    """As above between meshes, where a wanter that holds a term is assumed wherever it may be."""
    terms = prod(src.mesh.sizes[i] for i in a.partial)
    added = prod(dst.mesh.sizes[i] for i in b.partial)
    repeated = any(op == "avg" for op in dst.layout.partial.values())
    wanters = prod(dst.mesh.sizes[i] for i in b.free) * (added if repeated else 1)
    apart = set(src.mesh.order).isdisjoint(dst.mesh.order)
    if terms > 1:
        total = prod(a.shape) * (terms + wanters - 1 - (not apart))
    else:
        total = prod(a.shape) * wanters if apart else 0
    return total * src.dtype.itemsize
