"""`Boxes`: parts of a local tensor of known shape, ready to be cut out of it.

They follow from types and ranks alone, so they are worked out once. A `Part` is a box of a local
tensor: a few rectangles. A 0-d tensor is handled as one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import attrs
import torch

from fdtensor.layouts.blocks import Box, Intervals, length

__all__ = ["Boxes", "Part", "Views", "boxes_in", "contiguous", "cut", "pack_into", "packed"]

Index = tuple[slice, ...]
"""A rectangle of a tensor, without the dims at the end that it takes whole."""

Views = Sequence[torch.Tensor]
"""A part of a tensor: a view of each of its rectangles, the last dim fastest."""


@attrs.frozen(eq=False)
class Part:
    """A box of a tensor; packed, it is contiguous, and its rectangles are at `runs`."""

    shape: tuple[int, ...]
    numel: int
    runs: tuple[Index, ...]


@attrs.frozen(eq=False)
class Boxes:
    """Parts of one tensor of known shape, cut out together.

    Often they are slabs along one dim, and then `sizes` covers it, and slab `order[i]` is part i.
    """

    parts: tuple[Part, ...]
    places: tuple[tuple[Index, ...], ...]
    """The rectangles of each part."""
    dim: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


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


def boxes_in(boxes: Sequence[Box], shape: Sequence[int]) -> Boxes:
    """How boxes of positions are cut out of a tensor of `shape`."""
    parts: list[Part] = []
    places: list[tuple[Index, ...]] = []
    for box in boxes:
        sizes = tuple(map(length, box))
        runs = [_index(corner, sizes) for corner in product(*map(_run, box))]
        parts.append(Part(sizes, prod(sizes), tuple(runs)))
        places.append(tuple([_index(corner, shape) for corner in product(*box)]))
    return Boxes(tuple(parts), tuple(places), *_slabs(boxes, shape))


def _run(held: Intervals) -> Intervals:
    """Intervals as positions in the packed tensor: the same runs, one after the other."""
    runs: list[tuple[int, int]] = []
    start = 0
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


def cut(tensor: torch.Tensor, boxes: Boxes) -> list[Views]:
    """The parts of a tensor."""
    if boxes.sizes:
        slabs = torch.split_with_sizes(tensor, boxes.sizes, boxes.dim)
        return [slabs[i : i + 1] for i in boxes.order]
    return [
        [tensor[index] if index else tensor for index in rectangles] for rectangles in boxes.places
    ]


def pack_into(packed: torch.Tensor, part: Part, rectangles: Views) -> None:
    """Copies a part into a contiguous tensor of its shape."""
    for run, rectangle in zip(part.runs, rectangles, strict=True):
        (packed[run] if run else packed).copy_(rectangle)


def packed(part: Part, rectangles: Views) -> torch.Tensor:
    """A part as a contiguous tensor; a view where it is one already."""
    if len(rectangles) == 1:
        return rectangles[0].contiguous()
    buffer = rectangles[0].new_empty(part.shape)
    pack_into(buffer, part, rectangles)
    return buffer
