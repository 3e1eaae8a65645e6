"""Who sends what to whom when a tensor goes from one type to another, worked out for one rank.

Each source block may be held by several ranks. An axis that is free on both sides is *paired*: a
rank talks only to its own coordinate there. Over the other free axes of the source the replicas
share the work: each *speaks* for one part of the block. So every piece has one speaker, a rank
receives exactly what it lacks, and both sides know the box of each message without asking.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, product
from math import prod

import attrs

from fdtensor.layouts.blocks import Box, Intervals, cut, intersect, length, locate, merged, whole
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.placement import Cut, Partial, Ragged, Replicate, Shard, Spans
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["Grid", "Message", "Route", "Talk", "grid", "roomiest", "route", "talk"]


@attrs.frozen(eq=False)
class Grid:
    """A type as the planner sees it: axes by index, none of size 1, and 0-d as one element."""

    type: TensorType
    shape: tuple[int, ...]
    cuts: tuple[tuple[tuple[int, int, Cut], ...], ...]
    """For each dim its cuts, outermost first: axis, size of the axis, placement."""
    cut_axes: frozenset[int]
    partial: tuple[int, ...]
    free: tuple[int, ...]
    memo: dict[tuple[int, Coord], Intervals] = attrs.field(factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh:
        return self.type.mesh

    def held(self, dim: int, coord: Coord) -> Intervals:
        """The indices of `dim` that the rank at `coord` holds."""
        cuts = self.cuts[dim]
        key = (dim, tuple([coord[axis] for axis, _, _ in cuts]))
        found = self.memo.get(key)
        if found is None:
            found = whole(self.shape[dim])
            for axis, count, placement in cuts:
                found = cut(found, placement, count, coord[axis])
            if len(self.memo) < 65536:
                self.memo[key] = found
        return found

    def box(self, coord: Coord) -> Box:
        """The indices that the rank at `coord` holds."""
        return tuple([self.held(d, coord) for d in range(len(self.shape))])


@functools.lru_cache(maxsize=4096)
def grid(type: TensorType) -> Grid:
    """The grid of a type."""
    layout, mesh = type.layout, type.mesh
    index = {axis: i for i, axis in enumerate(mesh.axes)}
    cuts = []
    for d in range(max(1, len(type.shape))):
        axes = [index[axis] for axis in layout.cuts(d)]
        cuts.append(
            tuple((i, mesh.sizes[i], layout.placements[i]) for i in axes if mesh.sizes[i] > 1)
        )
    large = [i for i, size in enumerate(mesh.sizes) if size > 1]
    return Grid(
        type,
        type.shape or (1,),
        tuple(cuts),  # type: ignore[arg-type]
        frozenset(axis for dim in cuts for axis, _, _ in dim),
        tuple(i for i in large if isinstance(layout.placements[i], Partial)),
        tuple(i for i in large if isinstance(layout.placements[i], Replicate)),
    )


@attrs.frozen(eq=False)
class Talk:
    """Who may talk to whom between two types."""

    src: Grid
    dst: Grid
    said: Grid
    """The source, cut further by the free axes that are not paired: what each rank speaks for."""
    pairs: tuple[tuple[int, int], ...]
    """Source and destination axes on which a rank talks only to its own coordinate."""
    reduced: tuple[int, ...]
    """The source axes whose pending terms are reduced."""
    axes: tuple[int, ...] | None
    """The axes along which ranks talk; None when the meshes differ."""

    @property
    def same_mesh(self) -> bool:
        return self.src.mesh is self.dst.mesh

    @property
    def terms(self) -> int:
        """How many terms of each element are reduced; 1 for pure movement."""
        return prod(self.src.mesh.sizes[axis] for axis in self.reduced)


@functools.lru_cache(maxsize=4096)
def talk(src_type: TensorType, dst_type: TensorType) -> Talk:
    """Who may talk to whom between types of one shape and dtype.

    Axes that are partial in both keep their terms; the other partial axes of the source are
    reduced, and `dst_type` may not add any. Blocks that overlap stay as they are in both.
    """
    src, dst = grid(src_type), grid(dst_type)
    if src.mesh is dst.mesh:
        pairs = [(a, a) for a in src.free if a in dst.free or _sliced(src, dst, a)]
        kept = set(src.partial) & set(dst.partial)
        pairs += [(a, a) for a in sorted(kept)]
        still = {a for common in map(_common, src.cuts, dst.cuts) for a in common}
        held = src_type.layout.placements
        pairs += [
            (a, a) for a in sorted(still) if isinstance(held[a], Spans)
        ]  # else others send the same
        paired = {a for a, _ in pairs}
        axes = tuple(
            a
            for a, size in enumerate(src.mesh.sizes)
            if size > 1 and a not in paired and a not in still
        )
    else:
        pairs, rest = [], list(dst.free)
        for a in src.free:
            b = next((b for b in rest if dst.mesh.sizes[b] == src.mesh.sizes[a]), None)
            if b is not None:
                rest.remove(b)
                pairs.append((a, b))
        kept, paired, axes = set(), {a for a, _ in pairs}, None
    said = src_type.layout
    place = {axis: d for d, cuts in enumerate(dst.cuts) for axis, _, _ in cuts}
    names = src.mesh.axes
    for a in src.free if src_type.shape else ():
        if a not in paired:
            there = place.get(a) if src.mesh is dst.mesh else None
            said = said.split(names[a], roomiest(src_type.with_layout(said), a, there))
    return Talk(
        src,
        dst,
        _said_grid(src_type, said, [a for a in src.free if a not in paired]),
        tuple(pairs),
        tuple(a for a in src.partial if a not in kept),
        axes,
    )


def _said_grid(src: TensorType, said: object, unpaired: list[int]) -> Grid:
    """The grid of what each rank speaks for; a 0-d tensor's one element is cut as a dim of 1."""
    if src.shape:
        return grid(src.with_layout(said))  # type: ignore[arg-type]
    plain = grid(src)
    cuts = (tuple((a, src.mesh.sizes[a], Shard(0)) for a in unpaired),)
    return attrs.evolve(plain, cuts=cuts, cut_axes=frozenset(unpaired), free=(), memo={})


def _sliced(src: Grid, dst: Grid, axis: int) -> bool:
    """Whether the destination only cuts further, with `axis`, what the source already holds."""
    return any(
        cuts[: len(held)] == held and any(a == axis for a, _, _ in cuts)
        for held, cuts in zip(src.cuts, dst.cuts, strict=True)
    )


def _common(src: Sequence[tuple[int, int, Cut]], dst: Sequence[tuple[int, int, Cut]]) -> list[int]:
    """The axes of the outer cuts that both have."""
    axes = []
    for a, b in zip(src, dst):
        if a != b:
            break
        axes.append(a[0])
    return axes


def roomiest(
    type: TensorType, axis: int, there: int | None = None, beside: TensorType | None = None
) -> int:
    """The dim that `axis` had best cut further: `there` if given, else the one with most room.

    Before that come dims that are cut as in `beside`, whose blocks then meet its blocks only, and
    dims that the axis divides.
    """
    if there is not None:
        return there
    here, count = grid(type), type.mesh.sizes[axis]
    along = None if beside is None else grid(beside).cuts

    def room(d: int) -> tuple[bool, bool, int]:
        ways = prod(n for _, n, _ in here.cuts[d])
        plain = all(isinstance(placement, Shard) for _, _, placement in here.cuts[d])
        size = -(-here.shape[d] // ways)
        aligned = along is not None and along[d] == here.cuts[d] and size >= count
        return aligned, plain and here.shape[d] % (ways * count) == 0, size

    return max(range(len(here.shape)), key=lambda d: (*room(d), -d))


# --- routes ----------------------------------------------------------------------------------


@attrs.frozen
class Message:
    """A block for or from `peer`: positions in the local tensor, and which term it holds."""

    peer: int
    box: Box
    term: int = 0

    @property
    def numel(self) -> int:
        return prod(length(intervals) for intervals in self.box)


@attrs.frozen
class Route:
    """What one rank does in an exchange.

    `kept` is what it already holds, as positions in the source and in the destination block that
    go interval by interval together, or None. `shape` is that of its destination block, None where
    it is not in the destination.
    """

    rank: int
    shape: tuple[int, ...] | None
    kept: tuple[Message, Message] | None
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    """In the order of their terms."""


@functools.lru_cache(maxsize=8192)
def route(src: TensorType, dst: TensorType, rank: int) -> Route:
    """What `rank` sends, receives and keeps. Time: linear in its messages."""
    who = talk(src, dst)
    here, there = src.mesh.coord(rank), dst.mesh.coord(rank)
    kept = None
    if here is not None and there is not None:
        old, new = who.src.box(here), who.dst.box(there)
        both = tuple([intersect(a, b) for a, b in zip(old, new, strict=True)])
        if all(both):
            kept = (
                Message(rank, tuple(map(locate, old, both))),
                Message(rank, tuple(map(locate, new, both)), _term(who, here)),
            )
    shape = None
    if there is not None:
        shape = tuple([length(held) for held in who.dst.box(there)])
    return Route(
        rank,
        shape,
        kept,
        tuple(_sends(who, rank, here)) if here is not None else (),
        tuple(_recvs(who, here, there)) if there is not None else (),
    )


def _recvs(who: Talk, here: Coord | None, there: Coord) -> list[Message]:
    src, said = who.src, who.said
    want = who.dst.box(there)
    fixed = {a: there[b] for a, b in who.pairs}
    found = []
    for dim, held in enumerate(want):
        found.append(overlaps(said.cuts[dim], whole(said.shape[dim]), held, fixed))
    counts = [range(src.mesh.sizes[a]) for a in who.reduced]
    terms = list(enumerate(product(*counts)))
    place = [0] * src.mesh.ndim
    for axis, index in fixed.items():
        place[axis] = index
    identity = _identity(who)
    mine = None if here is None else [here[a] for a in identity]
    messages = []
    for parts in product(*found):
        for cuts, (coords, _) in zip(said.cuts, parts, strict=True):
            for (axis, _, _), index in zip(cuts, coords, strict=True):
                place[axis] = index
        box = _locate(want, [part for _, part in parts])
        for term, coords in terms:
            for axis, index in zip(who.reduced, coords, strict=True):
                place[axis] = index
            if mine is None or [place[a] for a in identity] != mine:
                messages.append(Message(src.mesh.rank_at(place), box, term))
    if len(terms) > 1:
        messages.sort(key=lambda message: message.term)
    return messages


def _sends(who: Talk, rank: int, here: Coord) -> list[Message]:
    src, dst = who.src, who.dst
    speak, held = who.said.box(here), src.box(here)
    if not all(speak):
        return []
    fixed = {b: here[a] for a, b in who.pairs}
    found = []
    for dim, part in enumerate(speak):
        found.append(overlaps(dst.cuts[dim], whole(dst.shape[dim]), part, fixed))
    free = [b for b in dst.free if b not in fixed]
    wanters = list(product(*[range(dst.mesh.sizes[b]) for b in free]))
    place = [0] * dst.mesh.ndim
    for axis, index in fixed.items():
        place[axis] = index
    identity = _identity(who)
    mine = [here[a] for a in identity]
    messages = []
    for parts in product(*found):
        for cuts, (coords, _) in zip(dst.cuts, parts, strict=True):
            for (axis, _, _), index in zip(cuts, coords, strict=True):
                place[axis] = index
        box = _locate(held, [part for _, part in parts])
        for coords in wanters:
            for axis, index in zip(free, coords, strict=True):
                place[axis] = index
            peer = dst.mesh.rank_at(place)
            theirs = place if who.same_mesh else src.mesh.coord(peer)
            if theirs is None or [theirs[a] for a in identity] != mine:
                messages.append(Message(peer, box))
    # start with the next rank, so that not everyone sends to the first at once
    messages.sort(key=lambda message: (message.peer <= rank, message.peer))
    return messages


def _identity(who: Talk) -> list[int]:
    """The source axes on which ranks agree exactly when they hold the same block and term."""
    return [*who.src.cut_axes, *who.reduced]


def _term(who: Talk, here: Coord) -> int:
    term = 0
    for axis in who.reduced:
        term = term * who.src.mesh.sizes[axis] + here[axis]
    return term


def _locate(held: Box, part: Sequence[Intervals]) -> Box:
    return tuple([merged(locate(a, b)) for a, b in zip(held, part, strict=True)])


Overlap = tuple[Coord, Intervals]


def overlaps(
    cuts: Sequence[tuple[int, int, Cut]],
    held: Intervals,
    target: Intervals,
    fixed: Mapping[int, int],
) -> list[Overlap]:
    """The blocks that `cuts` make of `held` and that meet `target`: coordinates and common indices.

    Axes in `fixed` have that coordinate only. Descends only into what meets the target.
    """
    if not target:
        return []
    if not cuts:
        return [((), target)]
    (axis, count, placement), *inner = cuts
    found: list[Overlap] = []
    for i in (fixed[axis],) if axis in fixed else _meeting(held, placement, count, target):
        child = cut(held, placement, count, i)
        both = intersect(child, target)
        if both:
            found += [((i, *rest), part) for rest, part in overlaps(inner, child, both, fixed)]
    return found


def _meeting(held: Intervals, placement: Cut, count: int, target: Intervals) -> Iterable[int]:
    """The indices along an axis whose blocks may meet the target."""
    inside = intersect(held, target)
    if not inside:
        return ()
    positions = locate(held, inside)
    low, high = positions[0][0], positions[-1][1]
    match placement:
        case Shard():
            step = -(-length(held) // count)
            return range(low // step, (high - 1) // step + 1)
        case Ragged(_, sizes):
            stops = _stops(sizes)
            return range(bisect_right(stops, low), min(count, bisect_left(stops, high) + 1))
        case _:
            return range(count)


@functools.lru_cache(maxsize=256)
def _stops(sizes: tuple[int, ...]) -> list[int]:
    return list(accumulate(sizes))
