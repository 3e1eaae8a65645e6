"""`Space`: all combinations of the options of a call on each axis, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Full
from fdtensor.ops.pins import pinned
from fdtensor.programs.choices import Body
from fdtensor.programs.nested import Way, place_of, ways_of, ways_of_end
from fdtensor.programs.nodes import Node, Option, Place
from fdtensor.programs.prices import Prices

__all__ = ["Floats", "Sites", "Space", "joined", "space_of_call", "space_of_end"]

Floats = NDArray[np.float64]
Along = tuple[Place, ...]
"""A place on each axis of a mesh."""


@attrs.frozen
class Sites:
    """The places that a value may have on all axes."""

    each: tuple[Along, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.each)

    @functools.cached_property
    def numbers(self) -> dict[Along, int]:
        """The number of each."""
        return {placements: number for number, placements in enumerate(self.each)}

    @functools.cached_property
    def along(self) -> tuple[tuple[Place, ...], ...]:
        """The places on each axis."""
        return tuple([tuple(dict.fromkeys(places)) for places in zip(*self.each, strict=True)])

    @functools.cached_property
    def in_grid(self) -> NDArray[np.int64]:
        """The number of each among all combinations of `along`, in row-major order."""
        where = [
            [places.index(p) for p in own]
            for own, places in zip(zip(*self.each, strict=True), self.along, strict=True)
        ]
        return np.ravel_multi_index(where, [len(places) for places in self.along])  # type: ignore[arg-type]

    def numbers_in(self, wider: Sites) -> NDArray[np.int64]:
        """The number of each among those of wider sites."""
        return np.array([wider.numbers[placements] for placements in self.each])

    def differ(self, other: Sites) -> Floats:
        """1 where one of these, in a row, is another one than one of other sites, else 0."""
        known = {p: k for k, p in enumerate(dict.fromkeys((*self.each, *other.each)))}
        own, theirs = (np.array([known[p] for p in sites.each]) for sites in (self, other))
        return np.where(own[:, None] == theirs, 0.0, 1.0)


def joined(each: Iterable[Sites]) -> Sites:
    """The sites that are among some of these."""
    return Sites(tuple(dict.fromkeys(p for sites in each for p in sites.each)))


def _outer(factors: Sequence[Floats]) -> Floats:
    """The product of one factor of each axis, for all combinations."""
    grids: Sequence[Floats] = np.meshgrid(*factors, indexing="ij", sparse=True)
    return functools.reduce(np.multiply, grids)


class Space:
    """All combinations of a node's options on each axis, in all orders of the axes.

    `seconds` are those of each combination, or less until it is `settled`.
    """

    def __init__(
        self,
        node: Node,
        alone: Sequence[Sequence[Option]],
        ways: Callable[[Sequence[Option]], Iterable[Way]],
        work: Work | None,
        sizes: Sequence[int],
    ) -> None:
        self.node, self.alone = node, tuple(map(tuple, alone))
        self.shape = tuple(map(len, self.alone))
        each = [(k, way) for k, o in enumerate(product(*self.alone)) for way in ways(o)]
        self.ways = tuple([way for _, way in each])
        """The order of each combination, and its places."""
        self._rows = np.array([k for k, _ in each])
        """The number of each without its order; the last axis runs fastest."""
        self.ins, self._in_sites = _numbered([way.ins for way in self.ways])
        self.outs, self._out_sites = _numbered([way.outs for way in self.ways])
        least: Floats = np.zeros(self.shape) if work is None else self._least(work, sizes)
        self.seconds: Floats = least.ravel()[self._rows]
        self.settled = np.full(self.seconds.shape, work is None or self.seconds.size == 1)

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
        where = np.unravel_index(int(self._rows[number]), self.shape)
        return tuple([one[int(k)] for one, k in zip(self.alone, where, strict=True)])

    def number(self, options: Sequence[Option], taken: Option) -> int:
        """The number of the combination of options like these on each axis that is `taken`."""
        where = [
            next(k for k, o in enumerate(one) if o.key == option.key)
            for one, option in zip(self.alone, options, strict=True)
        ]
        row = np.ravel_multi_index(where, self.shape)
        each: list[int] = np.flatnonzero(self._rows == row).tolist()
        same = (k for k in each if (self.ways[k].ins, self.ways[k].outs) == taken.key)
        return next(same, each[0])

    def in_site(self, i: int) -> NDArray[np.int64]:
        """The site of operand `i` in each combination."""
        return self._in_sites[i]

    def out_site(self, k: int) -> NDArray[np.int64]:
        """The site of result `k` in each combination."""
        return self._out_sites[k]


def space_of_call(
    node: Node,
    alone: Sequence[Sequence[Option]],
    call: Call,
    types: Sequence[Full],
    prices: Prices,
) -> Space:
    """The combinations of the options of a call."""
    mesh = prices.mesh

    def ways(options: Sequence[Option]) -> list[Way]:
        along = dict(zip(mesh.axes, options, strict=True))
        return ways_of(call, types, mesh, along, prices.nested)

    is_pinned = pinned(call) is not None
    work = None if is_pinned else Work(call, types, mesh.sizes, prices.cost_of(call))
    return Space(node, alone, ways, work, mesh.sizes)


def space_of_end(
    node: Node, alone: Sequence[Sequence[Option]], mesh: Mesh, given: Layout | None
) -> Space:
    """The combinations of an input, a constant or an output; in all orders if it has no layout."""

    def ways(options: Sequence[Option]) -> list[Way]:
        places = tuple([(o.ins or o.outs)[0] for o in options])
        each = ways_of_end(mesh, places) if given is None else [place_of(given)]
        return [Way(mesh.axes, (p,) * len(node.ins), (p,) * len(node.outs)) for p in each]

    return Space(node, alone, ways, None, mesh.sizes)


def _numbered(
    ways: Sequence[Sequence[Along]],
) -> tuple[list[Sites], list[NDArray[np.int64]]]:
    """The sites of each operand or result, and the site that each combination has."""
    sites: list[Sites] = []
    numbers: list[NDArray[np.int64]] = []
    for each in zip(*ways, strict=True):
        sites.append(Sites(tuple(dict.fromkeys(each))))
        numbers.append(np.array([sites[-1].numbers[placements] for placements in each]))
    return sites, numbers
