"""What rows of rules say of cuts that no placement can: `Units`, `Window`, `Entries`, `Halo`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from fdtensor.layouts.blocks import chunk, united
from fdtensor.layouts.placement import Placement, Ragged, Shard, Spans, StridedShard
from fdtensor.layouts.record import Record

__all__ = ["Entries", "Halo", "Units", "Window"]

MOST_RUNS = 1 << 16
"""The most runs of a block that a row cuts: each is an interval in all that is planned of it."""


@attrs.frozen(eq=False)
class Units(Record):
    """Blocks of dim `dim`, or of each of `blocks` of it, in whole units of `unit` elements."""

    dim: int
    unit: int
    blocks: int = 1

    def of(self, size: int, count: int) -> Placement | None:
        """The placement of a dim of `size` over an axis of `count` ranks."""
        if self.blocks > 1:
            block = size // self.blocks
            even = -(-block // count) == self.unit * -(-block // (self.unit * count))
            return (
                StridedShard(self.dim, self.blocks) if even and self.blocks <= MOST_RUNS else None
            )
        units = -(-size // self.unit)
        blocks = [chunk(units, count, i) for i in range(count)]
        sizes = [min(size, b * self.unit) - min(size, a * self.unit) for a, b in blocks]
        return _contiguous(self.dim, sizes)


@attrs.frozen(eq=False)
class Window(Record):
    """Positions `range(start, stop, step)` of a dim of `size` cut as S, each on its rank.

    They are dim `dim` of this tensor. Positions before the dim are on the rank of its first block,
    those after it on that of the last one, or, unless `beside`, where they complete a plain S.
    """

    dim: int
    size: int
    start: int
    stop: int
    step: int = 1
    beside: bool = False

    def of(self, size: int, count: int, blocks: Sequence[int] | None = None) -> Placement:
        """The placement of a dim of `size` over an axis of `count` ranks.

        `blocks` are the sizes of those that the other dim is cut into, where it is not cut as S.
        """

        def passed(end: int) -> int:
            return min(size, max(0, -(-(end - self.start) // self.step)))

        stops = [chunk(self.size, count, i)[1] for i in range(count - 1)]
        ends = [*map(passed, stops if blocks is None else itertools.accumulate(blocks[:-1]))]
        plain = [chunk(size, count, i)[1] for i in range(count - 1)]
        last = passed(self.size)
        if not self.beside and all(
            a == b or min(a, b) >= last for a, b in zip(ends, plain, strict=True)
        ):
            return Shard(self.dim)
        sizes = [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]
        return _contiguous(self.dim, sizes)


@attrs.frozen(eq=False)
class Halo(Record):
    """The ranges of dim `dim` that blocks of a dim of `made` elements, cut as S, are made from.

    `of_block(start, stop)` is the range, or a list of ranges, that the elements from `start` to
    `stop` need; it is cut off where the dim ends. Empty blocks need none.
    """

    dim: int
    made: int
    of_block: Callable[[int, int], Any]

    def of(self, size: int, count: int) -> Placement:
        """The placement of a dim of `size` over an axis of `count` ranks."""
        blocks = []
        for i in range(count):
            start, stop = chunk(self.made, count, i)
            ranges: list[tuple[int, int]] = []
            if start < stop:
                needed = self.of_block(start, stop)
                ranges += [needed] if isinstance(needed, tuple) else needed
            blocks.append(united(ranges, size))
        plain = [chunk(size, count, i) for i in range(count)]
        if count == 1 or blocks == [((a, b),) if a < b else () for a, b in plain]:
            return Shard(self.dim)
        return Spans(self.dim, tuple(blocks))


@attrs.frozen(eq=False)
class Entries(Record):
    """An entry of dim `dim` on each rank; no row unless the dim has as many as the axis has ranks.

    No other axis cuts the dim.
    """

    dim: int

    def of(self, size: int, count: int) -> Placement | None:
        """The placement of a dim of `size` over an axis of `count` ranks."""
        return Shard(self.dim) if size == count else None


def _contiguous(dim: int, sizes: Sequence[int]) -> Placement:
    """The placement of contiguous blocks of these sizes."""
    count = len(sizes)
    plain = [b - a for a, b in (chunk(sum(sizes), count, i) for i in range(count))]
    return Shard(dim) if list(sizes) == plain else Ragged(dim, tuple(sizes))
