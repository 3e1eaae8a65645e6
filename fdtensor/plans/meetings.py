"""`Meeting`: at which rank the pending terms of a piece meet, and which ranks get their reduction.

A piece is what one block of the source and one of the destination have in common. Its owner is a
rank that holds a term and wants the result, if there is one: so n terms that k ranks want take
n + k - 2 transfers, else one more, and less is not possible. Owners need not follow any layout.
Pieces are listed one by one, so this is for few ranks: see `few_enough`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import attrs

from fdtensor.layouts.blocks import Box, Intervals, length, longest_dim, share, whole
from fdtensor.layouts.placement import Spans
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.movement import common_axes
from fdtensor.plans.normal_type import NormalType, normalized, overlaps

__all__ = [
    "MAX_RANKS",
    "MAX_TALKING",
    "Meeting",
    "added_axes",
    "busy_turns",
    "few_enough",
    "meetings",
    "received_and_sent",
    "reduced_axes",
    "talking_axes",
]

MAX_TALKING = 64
"""The most ranks among which bytes are worth more than messages."""

MAX_RANKS = 1024
"""The most ranks of a mesh that are looked at one by one."""

Fixed = Mapping[int, int]
"""The index along some axes."""


@attrs.frozen
class Meeting:
    """A piece of a tensor, whose terms meet at `owner`."""

    box: Box
    """Its indices."""
    senders: tuple[int, ...]
    """The rank that gives each term, in the order of the terms."""
    owner: int
    places: tuple[int, ...]
    """The ranks that hold the result in the end, the owner among them."""

    @property
    def numel(self) -> int:
        return prod(length(intervals) for intervals in self.box)


def _transfers(meeting: Meeting) -> Iterator[tuple[int, int]]:
    """The sender and the receiver each time that the piece goes from one rank to another."""
    owner = meeting.owner
    yield from ((rank, owner) for rank in meeting.senders if rank != owner)
    yield from ((owner, rank) for rank in meeting.places if rank != owner)


@remembered(4096)
def received_and_sent(src: TensorType, dst: TensorType) -> tuple[Counter[int], Counter[int]]:
    """The elements that each rank receives, and that it sends."""
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for meeting in meetings(src, dst):
        for sender, receiver in _transfers(meeting):
            sent[sender] += meeting.numel
            received[receiver] += meeting.numel
    return received, sent


@remembered(4096)
def busy_turns(src: TensorType, dst: TensorType) -> tuple[bool, bool]:
    """Whether anything goes to owners, and whether anything goes on from them."""
    met = meetings(src, dst)
    return (
        any({*m.senders} != {m.owner} for m in met),
        any({*m.places} != {m.owner} for m in met),
    )


@attrs.frozen
class _Piece:
    """A piece before its owner is chosen."""

    box: Box
    terms: tuple[tuple[int, ...], ...]
    """The ranks that hold each term."""
    wanted: tuple[tuple[int, ...], ...]
    """All ranks of one of these must get the result; the others hold identity elements."""


def few_enough(src: TensorType, dst: TensorType) -> bool:
    """Whether meetings are listed for these types."""
    if any(isinstance(p, Spans) for type in (src, dst) for p in type.layout.placements):
        return False
    if src.mesh is not dst.mesh:
        return len({*src.mesh.order, *dst.mesh.order}) <= MAX_TALKING
    talking = prod(src.mesh.axis_size(axis) for axis in talking_axes(src, dst) or ())
    return talking <= MAX_TALKING and src.mesh.size <= MAX_RANKS


@remembered(1024)
def meetings(src_type: TensorType, dst_type: TensorType) -> tuple[Meeting, ...]:
    """All meetings from one type to another of the same shape and dtype. See `few_enough`.

    Ranks with the fewest bytes so far are taken first, so that the work is shared.
    """
    src, dst = normalized(src_type), normalized(dst_type)
    load: Counter[int] = Counter()
    met: list[Meeting] = []
    for fixed in _cosets(src, dst):
        for piece in _pieces(src, dst, fixed):
            met += (_reducing if len(piece.terms) > 1 else _moving)(piece, load)
    return tuple(met)


def talking_axes(src_type: TensorType, dst_type: TensorType) -> tuple[str, ...] | None:
    """The axes along which ranks meet; None between two meshes."""
    src, dst = normalized(src_type), normalized(dst_type)
    if src.mesh is not dst.mesh:
        return None
    still = _still(src, dst)
    large = [i for i, size in enumerate(src.mesh.sizes) if size > 1 and i not in still]
    return tuple(src.mesh.axes[i] for i in large)


def reduced_axes(src_type: TensorType, dst_type: TensorType) -> tuple[str, ...]:
    """The axes of the source whose terms are reduced."""
    src = normalized(src_type)
    kept = _kept(src, normalized(dst_type))
    return tuple(src.mesh.axes[i] for i in src.partial if i not in kept)


def added_axes(src_type: TensorType, dst_type: TensorType) -> tuple[str, ...]:
    """The axes of the destination whose terms are new."""
    dst = normalized(dst_type)
    kept = _kept(normalized(src_type), dst)
    return tuple(dst.mesh.axes[i] for i in dst.partial if i not in kept)


def _still(src: NormalType, dst: NormalType) -> list[int]:
    """The axes of one mesh along which nothing moves: outer cuts of both, terms that stay."""
    if src.mesh is not dst.mesh:
        return []
    outer = [axis for common in map(common_axes, src.cuts, dst.cuts) for axis in common]
    return [*_kept(src, dst), *outer]


def _kept(src: NormalType, dst: NormalType) -> list[int]:
    """The axes of one mesh whose terms stay as they are."""
    before, after = src.type.layout.placements, dst.type.layout.placements
    both = src.mesh is dst.mesh and set(src.partial) & set(dst.partial)
    return [i for i in sorted(both or ()) if before[i] is after[i]]


def _cosets(src: NormalType, dst: NormalType) -> Iterator[Fixed]:
    still = _still(src, dst)
    for index in product(*[range(src.mesh.sizes[i]) for i in still]):
        yield dict(zip(still, index, strict=True))


def _pieces(src: NormalType, dst: NormalType, fixed: Fixed) -> Iterator[_Piece]:
    kept = _kept(src, dst)
    reduced = [i for i in src.partial if i not in kept]
    added = [i for i in dst.partial if i not in kept]
    ops = dst.type.layout.partial
    if any(ops[dst.mesh.axes[i]] == "avg" for i in added):  # every term is the value itself
        added, each = [], [*dst.free, *added]
    else:
        each = list(dst.free)
    for cells in product(*[_cells(src, dst, d, fixed) for d in range(len(src.shape))]):
        before, after = dict(fixed), dict(fixed)
        for held, wanted, _ in cells:
            before.update(held)
            after.update(wanted)
        yield _Piece(
            tuple(intervals for _, _, intervals in cells),
            _ranks(src, before, reduced, [i for i in src.free if i not in fixed]),
            _ranks(dst, after, added, [i for i in each if i not in fixed]),
        )


def _cells(
    src: NormalType, dst: NormalType, dim: int, fixed: Fixed
) -> list[tuple[Fixed, Fixed, Intervals]]:
    """What each block of the source has in common with each of the destination, in one dim."""
    full = whole(src.shape[dim])
    axes = [[i for i, _, _ in type.cuts[dim]] for type in (src, dst)]
    return [
        (dict(zip(axes[0], a, strict=True)), dict(zip(axes[1], b, strict=True)), common)
        for a, held in overlaps(src.cuts[dim], full, full, fixed)
        for b, common in overlaps(dst.cuts[dim], full, held, fixed)
    ]


def _ranks(
    type: NormalType, at: Fixed, outer: Sequence[int], inner: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """For each index along the axes `outer` the ranks along `inner`, at an index of all others."""
    sizes, mesh = type.mesh.sizes, type.mesh
    coord = [at.get(i, 0) for i in range(mesh.ndim)]
    rows: list[tuple[int, ...]] = []
    for first in product(*[range(sizes[i]) for i in outer]):
        row: list[int] = []
        for second in product(*[range(sizes[i]) for i in inner]):
            for i, index in zip((*outer, *inner), (*first, *second), strict=True):
                coord[i] = index
            row.append(mesh.rank_at(coord))
        rows.append(tuple(row))
    return tuple(rows)


# --- owners ----------------------------------------------------------------------------------


def _reducing(piece: _Piece, load: Counter[int]) -> Iterator[Meeting]:
    """The piece in as many parts as ranks may own it."""
    holders = {rank for ranks in piece.terms for rank in ranks}
    wanting = dict.fromkeys(rank for ranks in piece.wanted for rank in ranks)
    owners = [rank for rank in wanting if rank in holders] or list(wanting)
    for box in _shares(piece.box, len(owners)):
        owner = _least(owners, load)
        senders = [owner if owner in ranks else _least(ranks, load) for ranks in piece.terms]
        (places,) = [ranks for ranks in piece.wanted if owner in ranks]
        yield _counted(Meeting(box, tuple(senders), owner, places), load)


def _moving(piece: _Piece, load: Counter[int]) -> Iterator[Meeting]:
    """What is no sum goes from one of its holders to each that wants it and holds it not yet."""
    (holders,) = piece.terms
    places = min(piece.wanted, key=lambda ranks: sum(rank not in holders for rank in ranks))
    for rank in places:
        for box in (piece.box,) if rank in holders else _shares(piece.box, len(holders)):
            sender = rank if rank in holders else _least(holders, load)
            yield _counted(Meeting(box, (sender,), rank, (rank,)), load)


def _least(ranks: Sequence[int], load: Counter[int]) -> int:
    return min(ranks, key=lambda rank: (load[rank], rank))


def _counted(meeting: Meeting, load: Counter[int]) -> Meeting:
    for pair in _transfers(meeting):
        for rank in pair:
            load[rank] += meeting.numel
    return meeting


def _shares(box: Box, count: int) -> list[Box]:
    """The box in at most so many parts along its longest dim."""
    count = min(count, length(box[longest_dim(box)]))
    return [share(box, i, count) for i in range(count)]
