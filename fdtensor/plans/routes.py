"""`Route`: what one rank sends, receives and keeps in an exchange.

Both sides know the box of each message without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import attrs

from fdtensor.layouts.blocks import Box, Intervals, intersect, length, locate, merged, whole
from fdtensor.layouts.mesh import Coord
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.movement import Movement
from fdtensor.plans.normal_type import Overlap, overlaps

__all__ = ["Message", "Route", "route"]


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
    """The part of one rank in an exchange.

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


@remembered(8192)
def route(moves: Movement, rank: int) -> Route:
    """The messages that `rank` sends, receives and keeps. Time: linear in their number."""
    before, after = moves.src.mesh.coord(rank), moves.dst.mesh.coord(rank)
    kept = None
    if before is not None and after is not None:
        old, new = moves.src.box(before), moves.dst.box(after)
        both = tuple([intersect(a, b) for a, b in zip(old, new, strict=True)])
        if all(both):
            kept = (
                Message(rank, tuple(map(locate, old, both))),
                Message(rank, tuple(map(locate, new, both)), _term(moves, before)),
            )
    shape = None
    if after is not None:
        shape = tuple([length(intervals) for intervals in moves.dst.box(after)])
    return Route(
        rank,
        shape,
        kept,
        tuple(_sends(moves, rank, before)) if before is not None else (),
        tuple(_recvs(moves, before, after)) if after is not None else (),
    )


def _recvs(moves: Movement, before: Coord | None, after: Coord) -> list[Message]:
    """The messages to the rank that is at `before` in the source and `after` in the destination."""
    src, assigned = moves.src, moves.assigned
    block = moves.dst.box(after)
    fixed = {a: after[b] for a, b in moves.pairs}
    met: list[list[Overlap]] = []
    for dim, indices in enumerate(block):
        met.append(overlaps(assigned.cuts[dim], whole(assigned.shape[dim]), indices, fixed))
    counts = [range(src.mesh.sizes[a]) for a in moves.reduced]
    terms = list(enumerate(product(*counts)))
    coord = [0] * src.mesh.ndim
    for axis, index in fixed.items():
        coord[axis] = index
    identity = moves.identity
    own = None if before is None else [before[a] for a in identity]
    messages: list[Message] = []
    for parts in product(*met):
        for cuts, (coords, _) in zip(assigned.cuts, parts, strict=True):
            for (axis, _, _), index in zip(cuts, coords, strict=True):
                coord[axis] = index
        box = _locate(block, [part for _, part in parts])
        for term, coords in terms:
            for axis, index in zip(moves.reduced, coords, strict=True):
                coord[axis] = index
            if own is None or [coord[a] for a in identity] != own:
                messages.append(Message(src.mesh.rank_at(coord), box, term))
    if len(terms) > 1:
        messages.sort(key=lambda message: message.term)
    return messages


def _sends(moves: Movement, rank: int, before: Coord) -> list[Message]:
    """The messages from a rank, which is at `before` in the source."""
    src, dst = moves.src, moves.dst
    assigned, block = moves.assigned.box(before), src.box(before)
    if not all(assigned):
        return []
    fixed = {b: before[a] for a, b in moves.pairs}
    met: list[list[Overlap]] = []
    for dim, part in enumerate(assigned):
        met.append(overlaps(dst.cuts[dim], whole(dst.shape[dim]), part, fixed))
    free = [b for b in dst.free if b not in fixed]
    replicas = list(product(*[range(dst.mesh.sizes[b]) for b in free]))
    coord = [0] * dst.mesh.ndim
    for axis, index in fixed.items():
        coord[axis] = index
    identity = moves.identity
    own = [before[a] for a in identity]
    messages: list[Message] = []
    for parts in product(*met):
        for cuts, (coords, _) in zip(dst.cuts, parts, strict=True):
            for (axis, _, _), index in zip(cuts, coords, strict=True):
                coord[axis] = index
        box = _locate(block, [part for _, part in parts])
        for coords in replicas:
            for axis, index in zip(free, coords, strict=True):
                coord[axis] = index
            peer = dst.mesh.rank_at(coord)
            held = coord if moves.same_mesh else src.mesh.coord(peer)
            if held is None or [held[a] for a in identity] != own:
                messages.append(Message(peer, box))
    # start with the next rank, so that not everyone sends to the first at once
    messages.sort(key=lambda message: (message.peer <= rank, message.peer))
    return messages


def _term(moves: Movement, coord: Coord) -> int:
    """The number of the term that the rank at `coord` holds."""
    term = 0
    for axis in moves.reduced:
        term = term * moves.src.mesh.sizes[axis] + coord[axis]
    return term


def _locate(block: Box, part: Sequence[Intervals]) -> Box:
    return tuple([merged(locate(a, b)) for a, b in zip(block, part, strict=True)])
