"""`Space`: all combinations of the options of a call on each axis, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.layouts.placement import Cut
from fdtensor.ops.flops import Work
from fdtensor.programs.choices import Body
from fdtensor.programs.nodes import Node, Option, Place

__all__ = ["Floats", "Sites", "Space", "joined"]

Floats = NDArray[np.float64]
Along = tuple[Place, ...]
"""A place on each axis of a mesh."""


@attrs.frozen
class Sites:
    """The places that a value may have on each axis, and so, in each combination, on all."""

    along: tuple[tuple[Place, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many places there are on each axis."""
        return tuple([len(places) for places in self.along])

    @property
    def size(self) -> int:
        """How many combinations there are."""
        return int(np.prod(self.shape))

    def number(self, placements: Along) -> int:
        """The number of a combination, in row-major order."""
        where = [places.index(p) for places, p in zip(self.along, placements, strict=True)]
        return int(np.ravel_multi_index(where, self.shape))

    def placements(self, number: int) -> Along:
        """The combination of a number."""
        where = np.unravel_index(number, self.shape)
        return tuple([places[int(i)] for places, i in zip(self.along, where, strict=True)])

    def numbers_in(self, wider: Sites) -> NDArray[np.int64]:
        """The number of each combination among those of wider sites."""
        where = [
            np.array([places.index(p) for p in own])
            for own, places in zip(self.along, wider.along, strict=True)
        ]
        return _grid(wider.shape)[np.ix_(*where)].ravel()

    def differ(self, other: Sites) -> Floats:
        """1 where a combination, in a row, is another one than one of other sites, else 0."""
        own, theirs = ([s.placements(i) for i in range(s.size)] for s in (self, other))
        return np.array([[float(p != q) for q in theirs] for p in own])


def joined(each: Iterable[Sites]) -> Sites:
    """The sites with the places of several on each axis."""
    axes = zip(*(sites.along for sites in each), strict=True)
    return Sites(tuple(tuple(dict.fromkeys(p for one in axis for p in one)) for axis in axes))


def _grid(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The numbers of all combinations, in an array of this shape."""
    return np.reshape(np.arange(int(np.prod(shape))), shape)


def _outer(factors: Sequence[Floats]) -> Floats:
    """The product of one factor of each axis, for all combinations."""
    grids: Sequence[Floats] = np.meshgrid(*factors, indexing="ij", sparse=True)
    return functools.reduce(np.multiply, grids)


class Space:
    """All combinations of a node's options on each axis; the last axis runs fastest.

    `seconds` are those of each combination, or less until it is `settled`.
    """

    def __init__(
        self,
        node: Node,
        alone: Sequence[Sequence[Option]],
        work: Work | None,
        sizes: Sequence[int],
    ) -> None:
        self.node, self.alone = node, tuple(map(tuple, alone))
        self.shape = tuple(map(len, self.alone))
        self.ins = self._sites(len(node.ins), lambda option: option.ins)
        self.outs = self._sites(len(node.outs), lambda option: option.outs)
        self._in_sites = self._numbers(self.ins, lambda option: option.ins)
        self._out_sites = self._numbers(self.outs, lambda option: option.outs)
        least: Floats = np.zeros(self.shape) if work is None else self._least(work, sizes)
        self.seconds: Floats = least.ravel()
        self.settled = np.full(self.seconds.shape, work is None or self.seconds.size == 1)

    def _sites(self, count: int, side: Callable[[Option], Along]) -> list[Sites]:
        """The sites of each operand, or each result."""
        return [
            Sites(tuple(tuple(dict.fromkeys(side(o)[i] for o in one)) for one in self.alone))
            for i in range(count)
        ]

    def _numbers(
        self, sites: Sequence[Sites], side: Callable[[Option], Along]
    ) -> list[NDArray[np.int64]]:
        """The site of each operand or result in each combination."""
        numbers: list[NDArray[np.int64]] = []
        for i, one in enumerate(sites):
            where = [
                np.array([places.index(side(o)[i]) for o in options])
                for places, options in zip(one.along, self.alone, strict=True)
            ]
            numbers.append(_grid(one.shape)[np.ix_(*where)].ravel())
        return numbers

    def _least(self, work: Work, sizes: Sequence[int]) -> Floats:
        """The seconds of rows; of a decomposition on one axis as if others shared it evenly."""
        seconds = self._seconds_of_rows(work, sizes)
        bodies = [
            ((*[slice(None)] * axis, k), option.seconds * n / np.prod(sizes))
            for axis, (options, n) in enumerate(zip(self.alone, sizes, strict=True))
            for k, option in enumerate(options)
            if isinstance(option.note, Body)
        ]
        for at, _ in bodies:
            seconds[at] = 0.0
        for at, least in bodies:
            seconds[at] = np.maximum(seconds[at], least)
        return seconds

    def _seconds_of_rows(self, work: Work, sizes: Sequence[int]) -> Floats:
        if work.is_free:
            return np.zeros(self.shape)
        moved = np.zeros(self.shape)
        for side, values in (("ins", self.node.ins), ("outs", self.node.outs)):
            for i, v in enumerate(values):
                parts = [
                    np.array([1 / n if isinstance(getattr(o, side)[i], Cut) else 1.0 for o in one])
                    for one, n in zip(self.alone, sizes, strict=True)
                ]
                if v is not None:
                    nbytes = work.types[v].nbytes
                    moved += _outer(parts) * nbytes
        shares = [
            np.array(
                [1 / n if any(isinstance(p, Cut) for p in (*o.ins, *o.outs)) else 1.0 for o in one]
            )
            for one, n in zip(self.alone, sizes, strict=True)
        ]
        return moved / work.cost.copy + _outer(shares) * work.compute

    def along(self, number: int) -> tuple[Option, ...]:
        """The option of a combination on each axis."""
        where = np.unravel_index(number, self.shape)
        return tuple([one[int(k)] for one, k in zip(self.alone, where, strict=True)])

    def number(self, options: Sequence[Option]) -> int:
        """The number of the combination that takes an option with these placements on each axis."""
        where = [
            next(k for k, o in enumerate(one) if o.key == option.key)
            for one, option in zip(self.alone, options, strict=True)
        ]
        return int(np.ravel_multi_index(where, self.shape))

    def in_site(self, i: int) -> NDArray[np.int64]:
        """The site of operand `i` in each combination."""
        return self._in_sites[i]

    def out_site(self, k: int) -> NDArray[np.int64]:
        """The site of result `k` in each combination."""
        return self._out_sites[k]
