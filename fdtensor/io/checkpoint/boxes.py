"""Rectangles: the pieces of a block that files hold, and where they lie in its local tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdtensor.layouts.blocks import Box, intersect, locate
from fdtensor.tensors.distribution import local_blocks
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Rectangle", "bounding", "held", "rectangle", "rectangles", "shared", "view"]

Rectangle = tuple[tuple[int, int], ...]
"""A range `(start, stop)` of each dim."""


def rectangle(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box that has one interval a dim; an empty one where a size is 0."""
    pairs = zip(offsets, sizes, strict=True)
    return tuple([((start, start + size),) if size else () for start, size in pairs])


def rectangles(box: Box) -> Iterator[Rectangle]:
    """The pieces of a box, the last dim fastest: one for shards, several for strided ones."""
    return itertools.product(*box)


def shared(a: Box, b: Box) -> Box:
    """The indices in both boxes."""
    return tuple(map(intersect, a, b))


def bounding(boxes: Sequence[Box]) -> Box | None:
    """The smallest box of one interval a dim that has all indices; None where there are none."""
    boxes = [box for box in boxes if all(box)]
    if not boxes:
        return None
    dims = zip(*boxes, strict=True)
    return tuple(
        [
            ((min(h[0][0] for h in intervals), max(h[-1][1] for h in intervals)),)
            for intervals in dims
        ]
    )


def view(local: torch.Tensor, box: Box, piece: Rectangle) -> torch.Tensor:
    """The part of `local`, which holds the indices of `box`, that has those of `piece`."""
    for dim, (intervals, part) in enumerate(zip(box, piece, strict=True)):
        ((start, stop),) = locate(intervals, (part,))
        local = local.narrow(dim, start, stop - start)
    return local


def held(x: DTensor[Any]) -> list[tuple[Box, torch.Tensor]]:
    """The blocks that this process has, each with its local tensor."""
    return [
        (x.type.box(x.mesh.coord(rank) or ()), local)
        for rank, local in local_blocks(x.local, x.mesh, x.comm)
    ]
