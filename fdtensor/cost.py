"""What a step costs: bytes, memory, seconds; and what any plan must at least receive.

Bytes follow from the layouts alone, in closed form: what a rank must get is its new block, a term
for each pending reduction, without what it already holds. A `CostModel` turns them into seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod

import attrs
import numpy as np

from fdtensor.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Mask,
    Pad,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    is_local,
)
from fdtensor.exchange import Grid, Message, Route, Talk, grid, overlaps, route, talk
from fdtensor.layout import Box, TensorType, intersect, length, select, whole
from fdtensor.placement import Shard
from fdtensor.record import Record

__all__ = [
    "GLOO",
    "NCCL",
    "CostModel",
    "lower_bound",
    "peak_at",
    "received",
    "received_at",
    "seconds",
    "sent",
    "sent_at",
]


# --- bytes -----------------------------------------------------------------------------------


def received(step: Step) -> np.ndarray:
    """The bytes each rank of `step.dst.mesh` receives, as an array of the mesh's shape."""
    itemsize = step.src.dtype.itemsize
    match step.collective:
        case Slice() | Mask() | Pad() | Scale():
            return np.zeros((1,) * step.dst.mesh.ndim, np.int64)
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
    """The bytes each rank of `step.src.mesh` sends, as an array of the mesh's shape."""
    itemsize = step.src.dtype.itemsize
    if is_local(step) or isinstance(step.collective, AllReduce):
        return received(step)
    who = talk(step.src, step.dst)
    if who.same_mesh:
        return _speaking(who) * itemsize
    counts = [sent_at(step, rank) for rank in step.src.mesh.order]
    return np.array(counts, np.int64).reshape(step.src.mesh.sizes)


def sent_at(step: Step, rank: int) -> int:
    """The bytes that `rank` sends, message by message."""
    if is_local(step) or step.src.mesh.coord(rank) is None:
        return 0
    if isinstance(step.collective, AllReduce):
        return received_at(step, rank)
    sends = route(step.src, step.dst, rank).sends
    return sum(message.numel for message in sends) * step.src.dtype.itemsize


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
    return np.array(values, np.int64).reshape(shape)


def _axes_of(*grids: tuple[Grid, int]) -> list[int]:
    return [axis for here, d in grids for axis, _, _ in here.cuts[d]]


def _lengths(here: Grid, d: int) -> np.ndarray:
    """How many indices of dim `d` each rank holds."""
    ways = prod(count for _, count, _ in here.cuts[d])
    plain = all(isinstance(placement, Shard) for _, _, placement in here.cuts[d])
    if plain and here.shape[d] % ways == 0:
        return np.full((1,) * here.mesh.ndim, here.shape[d] // ways, np.int64)
    return _table(here, _axes_of((here, d)), lambda c: length(here.held(d, tuple(c))))


@functools.lru_cache(maxsize=4096)
def _block_numel(here: Grid) -> np.ndarray:
    total = np.ones((1,) * here.mesh.ndim, np.int64)
    for d in range(len(here.shape)):
        total = total * _lengths(here, d)
    return total


def _common_numel(a: Grid, b: Grid) -> np.ndarray:
    """What each rank holds in both, on one mesh."""
    total = np.ones((1,) * a.mesh.ndim, np.int64)
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
    wanted = np.ones((1,) * src.mesh.ndim, np.int64)
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


@functools.lru_cache(maxsize=4096)
def lower_bound(src: TensorType, dst: TensorType) -> int:
    """The bytes that no plan can be below: of the busiest rank, or of the mean rank with reductions.

    For movement a rank must receive what it lacks of its block. An element with t pending terms
    that k wanters want needs t + k - 1 transfers, one less if a wanter holds a term. A wanter is a
    rank, or all ranks that share new pending terms, one of which must get the element.
    """
    a, b = grid(src), grid(dst)
    if src.numel == 0:
        return 0
    reduced = _reduced(a, b)
    adding = [i for i in b.partial if not _kept(a, b, i)]
    repeated = bool(adding) and dst.layout.partial[dst.mesh.axes[adding[0]]] == "avg"
    if not reduced and not adding:
        return int(_lacking(talk(src, dst)).max(initial=0)) * src.dtype.itemsize
    if src.mesh is not dst.mesh:
        return _cross_bound(src, dst, a, b)
    if repeated:
        adding = []
    ranks = src.mesh.size
    cosets = prod(src.mesh.sizes[i] for i in b.partial if i in a.partial and i not in reduced)
    wanters = prod(src.mesh.sizes[i] for i in b.free) * cosets
    if repeated:
        wanters *= prod(src.mesh.sizes[i] for i in b.partial if not _kept(a, b, i))
    numel = prod(a.shape)
    if reduced:
        terms = prod(src.mesh.sizes[i] for i in reduced)
        total = numel * (cosets * (terms - 1) + wanters) - cosets * _meeting(a, b)
    else:
        total = numel * wanters - _covered(a, b, adding)
    return total * src.dtype.itemsize // ranks


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
    total = np.ones((1,) * a.mesh.ndim, np.int64)
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
    return int(np.broadcast_to(total, _spread(a, both)).sum())


def _spread(here: Grid, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size if i in axes else 1 for i, size in enumerate(here.mesh.sizes))


def _covered(a: Grid, b: Grid, adding: Sequence[int]) -> int:
    """The wanted elements that some rank of the wanting ones holds, over all wanters."""
    kept = [i for i in b.partial if _kept(a, b, i)]
    fixed_axes = [i for i in range(a.mesh.ndim) if i not in adding and i not in kept]
    total = np.ones((1,) * a.mesh.ndim, np.int64)
    for d in range(len(a.shape)):

        def common(c: list[int], d: int = d) -> int:
            fixed = {axis: c[axis] for axis in fixed_axes}
            held = overlaps(a.cuts[d], whole(a.shape[d]), b.held(d, tuple(c)), fixed)
            return sum(length(part) for _, part in held)

        axes = [axis for axis in _axes_of((a, d), (b, d)) if axis in fixed_axes]
        total = total * _table(a, axes, common)
    return int(np.broadcast_to(total, _spread(a, [*fixed_axes, *kept])).sum())


def _cross_bound(src: TensorType, dst: TensorType, a: Grid, b: Grid) -> int:
    """As above between meshes, where a wanter that holds a term is assumed wherever it may be."""
    terms = prod(src.mesh.sizes[i] for i in a.partial)
    added = prod(dst.mesh.sizes[i] for i in b.partial)
    repeated = any(op == "avg" for op in dst.layout.partial.values())
    wanters = prod(dst.mesh.sizes[i] for i in b.free) * (added if repeated else 1)
    ranks = {*src.mesh.order, *dst.mesh.order}
    apart = set(src.mesh.order).isdisjoint(dst.mesh.order)
    if terms > 1:
        total = prod(a.shape) * (terms + wanters - 1 - (not apart))
    else:
        total = prod(a.shape) * wanters if apart else 0
    return total * src.dtype.itemsize // len(ranks)


# --- memory ----------------------------------------------------------------------------------


def contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a contiguous tensor of `shape` is contiguous too."""
    seen = False
    for held, size in zip(box, shape, strict=True):
        if len(held) != 1:
            return False
        extent = held[0][1] - held[0][0]
        if seen and extent != size:
            return False
        seen = seen or extent > 1
    return True


def piece(message: Message, index: int, count: int) -> Message:
    """Part `index`, of `count`, of a message: a share of its longest dim."""
    if count == 1:
        return message
    d = max(range(len(message.box)), key=lambda d: length(message.box[d]))
    size = length(message.box[d])
    part = select(message.box[d], size * index // count, size * (index + 1) // count)
    return Message(message.peer, (*message.box[:d], part, *message.box[d + 1 :]), message.term)


def buffers_at(step: Step, here: Route, pieces: int | None = None) -> int:
    """The elements that an exchange holds beside its source and destination block."""
    collective = step.collective
    assert isinstance(collective, Exchange)
    count = collective.pieces if pieces is None else pieces
    src_shape = _local_shape(step.src, here.rank)
    most = 0
    for i in range(count):
        sends = [piece(message, i, count) for message in here.sends]
        recvs = [piece(message, i, count) for message in here.recvs]
        if collective.way == "all_to_all":
            total = sum(m.numel for m in sends) + sum(m.numel for m in recvs)
        else:
            packed = {m.box: m.numel for m in sends if not contiguous(m.box, src_shape)}
            landed = [m.numel for m in recvs if m.term or not contiguous(m.box, here.shape or ())]
            total = sum(packed.values()) + sum(landed)
        most = max(most, total)
    return most


def _local_shape(type: TensorType, rank: int) -> tuple[int, ...]:
    return (type.local_shape(rank) or (1,)) if type.mesh.coord(rank) is not None else ()


def _local_numel(type: TensorType, rank: int) -> int:
    return prod(type.local_shape(rank)) if type.mesh.coord(rank) is not None else 0


def peak_at(steps: Sequence[Step], rank: int) -> int:
    """The most bytes `rank` holds while the steps run, the caller's input counted."""
    first = steps[0].src
    caller = _local_numel(first, rank)
    most, held = caller, 0
    for step in steps:
        out = _local_numel(step.dst, rank)
        most = max(most, caller + held + _extra(step, rank, held > 0))
        held = out
    return most * first.dtype.itemsize


def _extra(step: Step, rank: int, owned: bool) -> int:
    """The elements of a step's output and buffers while it runs; `owned`: its input is not kept."""
    out, src = _local_numel(step.dst, rank), _local_numel(step.src, rank)
    match step.collective:
        case Slice() | Mask() | Pad() | Scale():
            return out
        case AllReduce():
            return 0 if owned else out
        case AllGather(_, dims):
            return out if _outermost(step.dst, rank, dims) else 2 * out
        case ReduceScatter(_, dims):
            return out if _outermost(step.src, rank, dims) else out + src
        case AllToAll(_, src_dim, dst_dim):
            packed = 0 if _outermost(step.src, rank, (dst_dim,)) else src
            landed = 0 if _outermost(step.dst, rank, (src_dim,)) else out
            return packed + landed + out
        case Broadcast():
            return out
        case Exchange():
            return out + buffers_at(step, route(step.src, step.dst, rank))


def _outermost(type: TensorType, rank: int, dims: Sequence[int]) -> bool:
    """Whether blocks along `dims` lie one after the other in a local tensor."""
    if type.mesh.coord(rank) is None:
        return True
    shape = type.local_shape(rank)
    return len(set(dims)) == 1 and all(size == 1 for size in shape[: dims[0]])


# --- seconds ---------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class CostModel(Record):
    """Seconds of a step from bytes, as data: `launch + messages * latency + bytes / bandwidth`."""

    name: str
    latency: float
    """Seconds for one more message."""
    bandwidth: float
    """Bytes per second into one rank."""
    copy: float
    """Bytes per second of a local copy, read and written."""
    launch: tuple[tuple[str, float], ...]
    """Seconds that a call takes by itself, by kind."""
    slowdown: tuple[tuple[str, float], ...]
    """How many times longer than `bandwidth` says, by kind; 1 where it is silent."""
    axes: tuple[tuple[str, float, float], ...] = ()
    """Axes with a latency and bandwidth of their own."""

    def link(self, axes: Sequence[str] | None) -> tuple[float, float]:
        """The latency and bandwidth of the slowest of `axes`."""
        own = {axis: (latency, bandwidth) for axis, latency, bandwidth in self.axes}
        links = [own[axis] for axis in axes or own if axis in own]
        plain = [(self.latency, self.bandwidth)] if not axes or len(links) < len(axes) else []
        return max(a for a, _ in links + plain), min(b for _, b in links + plain)


NCCL = CostModel(
    "nccl",
    latency=4e-6,
    bandwidth=40e9,
    copy=1e12,
    launch=(("", 10e-6),),
    slowdown=(("peer_to_peer", 1.3), ("exchange", 1.2)),
)
"""Eight accelerators with a fast link, where named collectives are best."""

GLOO = CostModel(
    "gloo",
    latency=20e-6,
    bandwidth=0.7e9,
    copy=8e9,
    launch=(("", 150e-6), ("peer_to_peer", 60e-6)),
    slowdown=(("all_gather", 1.5), ("reduce_scatter", 4.0), ("exchange", 2.5), ("all_reduce", 1.3)),
)
"""Processes of one machine that talk by gloo, where messages from rank to rank are best."""


@functools.lru_cache(maxsize=16384)
def seconds(step: Step, cost: CostModel) -> float:
    """The seconds that `cost` gives for a step."""
    kind, axes, messages = _kind(step)
    moved = int(received(step).max(initial=0))
    latency, bandwidth = cost.link(axes)
    slowdown = dict(cost.slowdown).get(kind, 1.0)
    launch = dict(cost.launch)
    time = _copied(step) / cost.copy
    if not is_local(step):
        time += launch.get(kind, launch.get("", 0.0))
        time += messages * latency + moved * slowdown / bandwidth
    return time


def _kind(step: Step) -> tuple[str, tuple[str, ...] | None, int]:
    """The kind of a step, its axes and how many messages a rank waits for."""
    mesh, collective = step.src.mesh, step.collective

    def peers(axes: Sequence[str]) -> int:
        return prod(mesh.axis_size(axis) for axis in axes) - 1

    match collective:
        case Slice(axes) | Mask(axes) | Pad(axes) | Scale(axes):
            return "local", axes, 0
        case AllGather(axes):
            return "all_gather", axes, peers(axes)
        case AllToAll(axes):
            return "all_to_all", axes, peers(axes)
        case AllReduce(axes):
            return "all_reduce", axes, 2 * peers(axes)
        case ReduceScatter(axes):
            return "reduce_scatter", axes, peers(axes)
        case Broadcast():
            return "broadcast", None, 1
        case Exchange(None, _, way, pieces):
            count = len(route(step.src, step.dst, step.dst.mesh.order[-1]).recvs)
            everyone = len({*step.src.mesh.order, *step.dst.mesh.order}) - 1
            whole_way = way == "all_to_all"
            return (
                ("exchange" if whole_way else way),
                None,
                pieces * (everyone if whole_way else count),
            )
        case Exchange(axes, _, way, pieces):
            if way == "all_to_all":
                return "exchange", axes, peers(axes) * pieces
            some = mesh.order[-1]
            return way, axes, len(route(step.src, step.dst, some).recvs) * pieces


def _copied(step: Step) -> int:
    """The bytes that a rank copies besides the traffic, of the last rank of the mesh."""
    rank = step.dst.mesh.order[-1]
    out = _local_numel(step.dst, rank)
    match step.collective:
        case Exchange():
            here = route(step.src, step.dst, rank)
            kept = here.kept[0].numel if here.kept else 0
            numel = kept + buffers_at(step, here)
        case _:
            numel = _extra(step, rank, owned=True)
            numel = numel if is_local(step) else max(0, numel - out)
    return 2 * numel * step.src.dtype.itemsize
