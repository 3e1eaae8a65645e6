"""`Prices`: the seconds that moving each value of a graph takes, in a choice of its placements."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement
from fdtensor.ops.graph import Call, Full
from fdtensor.ops.notation.core import R
from fdtensor.plans.cost import CostModel
from fdtensor.programs.as_if import dearer
from fdtensor.programs.following import Tolls
from fdtensor.programs.moves import IMPOSSIBLE, move_seconds, nested_seconds
from fdtensor.programs.nodes import Node, Option, Place, Placements, Price
from fdtensor.programs.rough_moves import about_seconds

__all__ = ["AxisPrices", "LeastPrices", "Prices", "moves_near", "moves_of"]

STEPS = 8
"""How many steps a loop is taken to make, where layouts are chosen."""

FIXED = 1.0
"""The seconds added to a move of a fixed value: less than the price of an impossible move."""


@attrs.frozen(eq=False)
class Prices:
    """The prices of moves of values, between placements on all axes of a mesh."""

    mesh: Mesh
    cost: CostModel
    fulls: tuple[Full, ...]
    """The full value, by its number."""
    fixed: frozenset[int] = frozenset()
    """Values whose moves cost more than any other."""
    light: frozenset[int] = frozenset()
    """Values whose moves cost nothing: a few numbers, which travel with other sums."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which pending sums of half precision are held; None for their own."""
    tied: frozenset[int] = frozenset()
    """Ties, which are no values of the graph and cannot move."""
    tolls: Tolls | None = None
    """What undoing a layout that was given costs besides."""
    again: Mapping[int, int] = attrs.field(factory=dict[int, int])
    """How often the steps of a loop compute a value."""
    nested: bool = False
    """Whether the order in which axes cut one dim is known; else it is taken to suit each move."""

    def __call__(
        self, v: int, src: Placements, dst: tuple[Place, ...], use: object = None
    ) -> float:
        """The seconds that moving value `v` from some placements to others takes, for any use."""
        del use
        if src == dst or v in self.light:
            return 0.0
        if v in self.tied:
            return IMPOSSIBLE
        priced = nested_seconds if self.nested else move_seconds
        seconds = priced(self.fulls[v], self.mesh, src, dst, self.cost, self.reduce_dtype)
        seconds *= self.times(v)
        return seconds + self.besides(v, src, dst) if seconds else seconds

    def between(
        self,
        v: int,
        srcs: Sequence[Placements],
        dsts: Sequence[tuple[Place, ...]],
        use: object = None,
    ) -> list[float]:
        """The same of all moves from `srcs` to `dsts`, of which the latter run fastest."""
        if self.again or self.tolls is not None or v in self.fixed | self.light | self.tied:
            return [self(v, src, dst, use) for src in srcs for dst in dsts]
        priced = nested_seconds if self.nested else move_seconds
        full, mesh, cost, dtype = self.fulls[v], self.mesh, self.cost, self.reduce_dtype
        return [
            0.0 if src == dst else priced(full, mesh, src, dst, cost, dtype)
            for src in srcs
            for dst in dsts
        ]

    def times(self, v: int) -> int:
        """How often a value is taken to be moved wherever it is."""
        return self.again.get(v, 1)

    def cost_of(self, call: Call) -> CostModel:
        """The cost model by which a call computes, dearer for one in each step of a loop."""
        if not self.again:
            return self.cost
        steps = max([self.times(v.index) for v in call.outs if v is not None], default=1)
        return self.cost if steps == 1 else dearer(self.cost, steps)

    def besides(self, v: int, src: Placements, dst: tuple[Place, ...]) -> float:
        """What a move costs besides its seconds."""
        fixed = FIXED if v in self.fixed else 0.0
        return fixed if self.tolls is None else fixed + self.tolls(v, src, dst)

    def kind(self, v: int) -> Hashable:
        """What the prices of a value depend on."""
        own = self.tolls is not None and v in self.tolls.parameters
        rare = v in self.fixed, v in self.light, v in self.tied, self.times(v)
        return self.fulls[v], own, *rare


Move = tuple[int, Placements, tuple[Place, ...]]
"""A value, where it is and where it is wanted."""


class LeastPrices(Price):
    """Prices of some moves, and of the others what they take at least.

    To price a move as it is takes a plan. A solution whose own moves have their prices is the best
    by all prices too.
    """

    def __init__(self, prices: Prices, known: Iterable[Move]) -> None:
        self.prices = prices
        self._kinds: dict[int, Hashable] = {}
        self._known: dict[Hashable, set[tuple[Placements, tuple[Place, ...]]]] = {}
        """The moves of values of a kind that have their own prices."""
        self.knew(known)

    def __call__(
        self, v: int, src: Placements, dst: tuple[Place, ...], use: object = None
    ) -> float:
        """The seconds that moving value `v` takes, or takes at least."""
        if src == dst or v in self.prices.light or (src, dst) in self._known_of(v):
            return self.prices(v, src, dst, use)
        if v in self.prices.tied:
            return IMPOSSIBLE
        full, mesh = self.prices.fulls[v], self.prices.mesh
        least = about_seconds(full, mesh.sizes, src, dst, self.prices.cost) * self.prices.times(v)
        return least + self.prices.besides(v, src, dst) if least else least

    def kind(self, v: int) -> Hashable:
        """What the prices of a value depend on."""
        if v not in self._kinds:
            self._kinds[v] = self.prices.kind(v)
        return self._kinds[v]

    def _known_of(self, v: int) -> set[tuple[Placements, tuple[Place, ...]]]:
        return self._known.setdefault(self.kind(v), set())

    def knew(self, moves: Iterable[Move]) -> bool:
        """Whether all these moves had their own prices; from now on they do."""
        knew = True
        for v, src, dst in moves:
            known = self._known_of(v)
            if src != dst and (src, dst) not in known:
                knew = False
                known.add((src, dst))
        return knew


def moves_of(nodes: Sequence[Node], taken: Sequence[Option]) -> Iterator[Move]:
    """The moves of a solution."""
    made: dict[int, Placements] = {}
    for node, option in zip(nodes, taken, strict=True):
        for v, q in zip(node.ins, option.ins, strict=True):
            yield v, made[v], q
        made |= {v: p for v, p in zip(node.outs, option.outs, strict=True) if v is not None}


def moves_near(nodes: Sequence[Node], taken: Sequence[Option]) -> Iterator[Move]:
    """The moves that begin or end where those of a solution do."""
    made: dict[int, Placements] = {}
    places: dict[int, set[Placements]] = {}
    for node, option in zip(nodes, taken, strict=True):
        for i, v in enumerate(node.ins):
            for other in node.options:
                yield v, made[v], other.ins[i]
            for place in places[v]:
                yield v, place, option.ins[i]
        for i, v in enumerate(node.outs):
            if v is not None:
                made[v], places[v] = option.outs[i], {other.outs[i] for other in node.options}


@attrs.frozen(eq=False)
class AxisPrices:
    """The prices of moves along one axis, where values have known placements on the others."""

    prices: Prices
    axis: str
    placed: Mapping[int, Mapping[str, Placement]]
    """The placements in which values are computed on other axes; on the rest they are R."""
    least: LeastPrices | None = None
    """What moves take at least, where that is enough to begin with."""

    def __call__(self, v: int, p: Placement, q: Place, use: Uses = None) -> float:
        """The seconds that moving value `v` from one placement to another takes.

        `use` has the placements in which the other axes want it there; None where they stay.
        """
        if q in (p, "free") and use is None:
            return 0.0
        return (self.least or self.prices)(v, *self.ends(v, p, q, use))

    def between(
        self, v: int, srcs: Sequence[Placement], dsts: Sequence[Place], use: Uses = None
    ) -> list[float]:
        """The same of all moves from `srcs` to `dsts`, of which the latter run fastest."""
        prices = self.least or self.prices
        seconds = prices.between(v, self._whole(v, srcs), self._whole(v, dsts, use))
        if use is None:
            pairs = zip(product(srcs, dsts), seconds, strict=True)
            return [0.0 if q in (p, "free") else s for (p, q), s in pairs]
        return seconds

    def kind(self, v: int) -> Hashable:
        """What the prices of a value depend on."""
        return self.prices.kind(v), tuple(self.placed.get(v, {}).items())

    def ends(
        self, v: int, p: Placement, q: Place, use: Uses = None
    ) -> tuple[Placements, tuple[Place, ...]]:
        """The placements on all axes before and after a move."""
        (src,), (dst,) = self._whole(v, [p]), self._whole(v, [q], use)
        return src, dst

    def _whole(self, v: int, places: Sequence[Any], use: Uses = None) -> list[tuple[Any, ...]]:
        """Placements on all axes: these on this one, those of the value or of a use on others."""
        others = self.placed.get(v, {}) if use is None else dict(use)
        axes = self.prices.mesh.axes
        k, rest = axes.index(self.axis), [others.get(a, R) for a in axes]
        return [(*rest[:k], place, *rest[k + 1 :]) for place in places]


Uses = tuple[tuple[str, Place], ...] | None
"""The placements that other axes want at a use, by axis."""
