"""`most_buffered`: what the rounds of an exchange hold beside blocks, in the round that holds most.

A round has a piece of each message. Pieces of a message have one of two lengths along its longest
dim, so that all rounds are counted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from fdtensor.layouts.blocks import Box, Intervals, length, longest_dim
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.boxes import contiguous
from fdtensor.plans.collectives.rounds import piece
from fdtensor.plans.routes import Message, Route

__all__ = ["most_buffered"]

MANY = 8
"""The rounds from which on it is faster to count all at once."""

Counts = npt.NDArray[Any]
"""The elements of a message in each round: int64, or Python's where they might not fit."""


def most_buffered(way: Route, pieces: int, source: Sequence[int], packed: bool) -> int:
    """The most elements that a round packs and receives elsewhere than in place.

    All of them where messages are `packed`; else what is contiguous in the block of shape `source`,
    or in that of the destination, needs no buffer, and what several peers get is packed once.
    """
    sends = way.sends if packed else {m.box: m for m in way.sends}.values()
    if pieces < MANY or not (packed or _apart([m.box for m in sends])):
        return max(_of_round(way, i, pieces, source, packed) for i in range(pieces))
    target = way.shape or ()
    every = [(m, None if packed else source) for m in sends]
    every += [(m, None if packed or m.term else target) for m in way.recvs]
    return int(sum(_of_rounds(*entry, pieces) for entry in every).max()) if every else 0  # type: ignore[union-attr]


def _of_rounds(message: Message, shape: Sequence[int] | None, pieces: int) -> Counts:
    """The elements of a message in each round that are not contiguous in a block of this shape."""
    d = longest_dim(message.box)
    size = length(message.box[d])
    lengths = _lengths(size, pieces)
    rest = prod(length(held) for k, held in enumerate(message.box) if k != d)
    if shape is None:
        return lengths * rest
    if len(message.box[d]) > 1:  # which intervals a piece takes differs
        boxes = [piece(message, i, pieces).box for i in range(pieces)]
        return lengths * rest * [not contiguous(box, shape) for box in boxes]
    buffered = lengths * rest
    for n in {size // pieces, -(-size // pieces)}:
        at = int(np.argmax(lengths == n))
        if contiguous(piece(message, at, pieces).box, shape):
            buffered[lengths == n] = 0
    return buffered


@remembered(256)
def _lengths(size: int, pieces: int) -> Counts:
    """How long each of so many pieces of a dim is, which are one of two lengths."""
    kind = np.int64 if size * pieces < 2**62 else object
    return np.diff(size * np.arange(pieces + 1, dtype=kind) // pieces)


def _of_round(way: Route, i: int, pieces: int, source: Sequence[int], packed: bool) -> int:
    """The same in one round, by its pieces: two that are the same one are packed once."""
    sends = [piece(m, i, pieces) for m in way.sends]
    recvs = [piece(m, i, pieces) for m in way.recvs]
    if not packed:
        sends = {p.box: p for p in sends if not contiguous(p.box, source)}.values()
        recvs = [p for p in recvs if p.term or not contiguous(p.box, way.shape or ())]
    return sum(p.numel for p in (*sends, *recvs))


def _apart(boxes: Sequence[Box]) -> bool:
    """Whether boxes have no element in common, as far as one dim after the other shows it."""
    dims = range(len(boxes[0]) if boxes else 0)
    return _split(boxes, dims) or _split(boxes, dims[::-1])


def _split(boxes: Sequence[Box], dims: Sequence[int]) -> bool:
    """Whether the first dim splits boxes into groups that lie apart, and the others each group."""
    if len(boxes) < 2:
        return True
    if not dims:
        return False
    groups: dict[Intervals, list[Box]] = {}
    for box in boxes:
        groups.setdefault(box[dims[0]], []).append(box)
    runs = sorted(run for held in groups for run in held)
    lie_apart = all(a[1] <= b[0] for a, b in pairwise(runs))
    return lie_apart and all(_split(group, dims[1:]) for group in groups.values())
