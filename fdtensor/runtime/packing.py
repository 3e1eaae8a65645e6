"""`Round`: what a rank does in one round of an exchange, ready to cut its local tensors.

It follows from types and ranks alone, so it is worked out once. A `Part` is a box of a local
tensor: a few rectangles. A 0-d tensor is handled as one element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from math import prod

import attrs
import torch

from fdtensor.layouts.blocks import Box, Intervals, length
from fdtensor.plans.collective import Exchange, Step
from fdtensor.plans.memory import contiguous, piece
from fdtensor.plans.messages import Message, route

__all__ = ["Cutting", "Parcel", "Part", "Round", "Views", "cut", "cutting", "pack_into", "rounds"]

Index = tuple[slice, ...]
"""What a rectangle of a tensor is, without the dims at the end that it takes whole."""

Views = Sequence[torch.Tensor]
"""A part of a tensor: a view of each of its rectangles, the last dim fastest."""


@attrs.frozen(eq=False)
class Part:
    """A box of a tensor; packed, it is contiguous, and its rectangles are at `runs`."""

    shape: tuple[int, ...]
    numel: int
    runs: tuple[Index, ...]


@attrs.frozen(eq=False)
class Cutting:
    """Parts of one tensor of known shape, cut out together.

    Often they are slabs along one dim, and then `sizes` covers it, and slab `order[i]` is part i.
    """

    parts: tuple[Part, ...]
    places: tuple[tuple[Index, ...], ...]
    """The rectangles of each part."""
    dim: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


@attrs.frozen(eq=False)
class Parcel:
    """A message to or from `peer`, with term number `term` of part number `index` of a cutting."""

    peer: int
    term: int
    index: int
    part: Part
    in_place: bool
    """Whether what arrives can be received where it belongs."""


@attrs.frozen(eq=False)
class Round:
    """What one rank does in one round of an exchange.

    There is at most one parcel for each peer; those that arrive are in the order of their terms.
    """

    source: Cutting
    target: Cutting
    """The parts of the source and of the destination block."""
    sends: tuple[Parcel, ...]
    recvs: tuple[Parcel, ...]
    kept: tuple[tuple[int, int], ...]
    """Parts of the source, each with the part of the destination block that it goes to."""
    kept_term: int
    """Which term is kept."""

    @property
    def to(self) -> list[int]:
        """The peers of what is sent."""
        return [parcel.peer for parcel in self.sends]

    @property
    def of(self) -> list[int]:
        """The peers of what arrives."""
        return [parcel.peer for parcel in self.recvs]


@functools.lru_cache(maxsize=8192)
def rounds(step: Step, rank: int) -> tuple[Round, ...]:
    """The rounds of an exchange on one rank, as many as it has pieces."""
    collective = step.collective
    assert isinstance(collective, Exchange)
    here = route(step.src, step.dst, rank)
    inside = step.src.mesh.position(rank) is not None
    source, target = (step.src.local_shape(rank) or (1,)) if inside else (), here.shape or ()
    count = collective.pieces
    found = []
    for i in range(count):
        sends = [m for m in (piece(m, i, count) for m in here.sends) if m.numel]
        recvs = [m for m in (piece(m, i, count) for m in here.recvs) if m.numel]
        kept: list[tuple[Box, Box]] = []
        if here.kept is not None:
            old, new = here.kept
            if count == 1 or (collective.reduce_op is None and i == 0):
                kept = [(old.box, new.box)]
            elif collective.reduce_op is not None:  # a term is added when the others are
                kept = [_within(here.kept, box) for box in dict.fromkeys(m.box for m in recvs)]
                kept = [pair for pair in kept if all(pair[1])]
        olds = list(dict.fromkeys([*(m.box for m in sends), *(old for old, _ in kept)]))
        news = list(dict.fromkeys([*(m.box for m in recvs), *(new for _, new in kept)]))
        before, after = cutting(olds, source), cutting(news, target)
        found.append(
            Round(
                before,
                after,
                _parcels(sends, olds, before, source),
                _parcels(recvs, news, after, target),
                tuple([(olds.index(old), news.index(new)) for old, new in kept]),
                here.kept[1].term if here.kept else 0,
            )
        )
    return tuple(found)


def _within(kept: tuple[Message, Message], box: Box) -> tuple[Box, Box]:
    """What is kept of a box of the destination block: where it was and where it goes."""
    before: list[Intervals] = []
    after: list[Intervals] = []
    for olds, news, wanted in zip(kept[0].box, kept[1].box, box, strict=True):
        old, new = [], []
        for (shift, _), (start, stop) in zip(olds, news, strict=True):
            for ends in wanted:
                low, high = max(ends[0], start), min(ends[1], stop)
                if low < high:
                    old.append((shift + low - start, shift + high - start))
                    new.append((low, high))
        before.append(tuple(old))
        after.append(tuple(new))
    return tuple(before), tuple(after)


def _parcels(
    messages: Sequence[Message], boxes: Sequence[Box], among: Cutting, shape: Sequence[int]
) -> tuple[Parcel, ...]:
    index = {box: i for i, box in enumerate(boxes)}
    found = []
    for m in messages:
        i = index[m.box]
        in_place = m.term == 0 and contiguous(m.box, shape)
        found.append(Parcel(m.peer, m.term, i, among.parts[i], in_place))
    return tuple(found)


# --- cutting ---------------------------------------------------------------------------------


def cutting(boxes: Sequence[Box], shape: Sequence[int]) -> Cutting:
    """How boxes of positions are cut out of a tensor of `shape`."""
    parts, places = [], []
    for box in boxes:
        sizes = tuple(map(length, box))
        runs = [_index(corner, sizes) for corner in product(*map(_run, box))]
        parts.append(Part(sizes, prod(sizes), tuple(runs)))
        places.append(tuple([_index(corner, shape) for corner in product(*box)]))
    return Cutting(tuple(parts), tuple(places), *_slabs(boxes, shape))


def _run(held: Intervals) -> Intervals:
    """Intervals as positions in the packed tensor: the same runs, one after the other."""
    runs, start = [], 0
    for low, high in held:
        runs.append((start, start + high - low))
        start += high - low
    return tuple(runs)


def _index(corner: Sequence[tuple[int, int]], shape: Sequence[int]) -> Index:
    index = [
        slice(None) if ends == (0, size) else slice(*ends)
        for ends, size in zip(corner, shape, strict=True)
    ]
    while index and index[-1] == slice(None):
        index.pop()
    return tuple(index)


def _slabs(
    boxes: Sequence[Box], shape: Sequence[int]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Dim, sizes and order of boxes that are disjoint slabs along one dim, else nothing."""
    none = 0, (), ()
    dims = {d for box in boxes for d, n in enumerate(shape) if box[d] != ((0, n),)}
    if len(dims) != 1 or len(boxes) < 2 or any(len(held) != 1 for box in boxes for held in box):
        return none
    (dim,) = dims
    sizes: list[int] = []
    order = [0] * len(boxes)
    at = 0
    for (start, stop), i in sorted((box[dim][0], i) for i, box in enumerate(boxes)):
        if start < at:
            return none
        if start > at:
            sizes.append(start - at)
        order[i] = len(sizes)
        sizes.append(stop - start)
        at = stop
    if at < shape[dim]:
        sizes.append(shape[dim] - at)
    return dim, tuple(sizes), tuple(order)


def cut(tensor: torch.Tensor, parts: Cutting) -> list[Views]:
    """The parts of a tensor."""
    if parts.sizes:
        slabs = torch.split_with_sizes(tensor, parts.sizes, parts.dim)
        return [slabs[i : i + 1] for i in parts.order]
    return [
        [tensor[index] if index else tensor for index in rectangles] for rectangles in parts.places
    ]


def pack_into(packed: torch.Tensor, part: Part, rectangles: Views) -> None:
    """Copies a part into a contiguous tensor of its shape."""
    for run, rectangle in zip(part.runs, rectangles, strict=True):
        (packed[run] if run else packed).copy_(rectangle)
