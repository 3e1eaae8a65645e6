"""`most_buffered`: what the rounds of an exchange hold beside blocks, in the round that holds most.

A round has a piece of each message. Pieces of a message have one of two lengths along its longest
dim, so that all rounds are counted at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from fdtensor.layouts.blocks import Box, intersect, length
from fdtensor.plans.boxes import contiguous
from fdtensor.plans.collectives.rounds import longest_dim, piece
from fdtensor.plans.routes import Message, Route

__all__ = ["most_buffered"]

Counts = npt.NDArray[Any]
"""The elements of a message in each round, of int64."""


def most_buffered(way: Route, pieces: int, source: Sequence[int], packed: bool) -> int:
    """The most elements that a round packs and receives elsewhere than in place.

    All of them where messages are `packed`; else what is contiguous in the block of shape `source`,
    or in that of the destination, needs no buffer, and what several peers get is packed once.
    """
    if packed:
        every = [(m, None) for m in (*way.sends, *way.recvs)]
    else:
        target = way.shape or ()
        sends = {m.box: m for m in way.sends}
        if pieces > 1 and _overlap(sends):  # pieces of two boxes may be the same one
            return max(_of_round(way, i, pieces, source) for i in range(pieces))
        every = [(m, source) for m in sends.values()]
        every += [(m, None if m.term else target) for m in way.recvs]
    return int(sum(_of_rounds(*entry, pieces) for entry in every).max()) if every else 0  # type: ignore[union-attr]


def _of_rounds(message: Message, shape: Sequence[int] | None, pieces: int) -> Counts:
    """The elements of a message in each round that are not contiguous in a block of this shape."""
    d = longest_dim(message)
    size = length(message.box[d])
    kind = np.int64 if size * pieces < 2**62 else object
    lengths = np.diff(size * np.arange(pieces + 1, dtype=kind) // pieces)
    rest = prod(length(held) for k, held in enumerate(message.box) if k != d)
    if shape is None:
        return lengths * rest
    if len(message.box[d]) > 1:  # which intervals a piece takes differs
        boxes = [piece(message, i, pieces).box for i in range(pieces)]
        return lengths * rest * [not contiguous(box, shape) for box in boxes]
    for n in set(lengths.tolist()):
        at = int(np.argmax(lengths == n))
        if contiguous(piece(message, at, pieces).box, shape):
            lengths[lengths == n] = 0
    return lengths * rest


def _of_round(way: Route, i: int, pieces: int, source: Sequence[int]) -> int:
    """The same in one round, by its pieces."""
    sends = {p.box: p for p in [piece(m, i, pieces) for m in way.sends]}
    recvs = [piece(m, i, pieces) for m in way.recvs]
    away = [p for p in recvs if p.term or not contiguous(p.box, way.shape or ())]
    away += [p for p in sends.values() if not contiguous(p.box, source)]
    return sum(p.numel for p in away)


def _overlap(boxes: Iterable[Box]) -> bool:
    """Whether two boxes have an element in common."""
    pairs = combinations(boxes, 2)
    return any(all(intersect(a, b) for a, b in zip(*pair, strict=True)) for pair in pairs)
