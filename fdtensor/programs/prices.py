"""`Prices`: the seconds that moving each value of a graph takes, in a choice of its placements."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement
from fdtensor.ops.graph import Full, Var
from fdtensor.ops.notation.core import R
from fdtensor.plans.cost import CostModel
from fdtensor.programs.moves import Placements, move_seconds
from fdtensor.programs.solver import Place

__all__ = ["AxisPrices", "Prices"]

FIXED = 1.0
"""The seconds added to a move of a fixed value: less than the price of an impossible move."""


@attrs.frozen(eq=False)
class Prices:
    """The prices of moves of values, between placements on all axes of a mesh."""

    mesh: Mesh
    cost: CostModel
    fulls: tuple[Full, ...]
    """The full value, by its number."""
    fixed: frozenset[Var] = frozenset()
    """Values whose moves cost more than any other."""
    light: frozenset[Var] = frozenset()
    """Values whose moves cost nothing: a few numbers, which travel with other sums."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which pending sums of half precision are held; None for their own."""

    def __call__(
        self, v: int, src: Placements, dst: tuple[Place, ...], use: object = None
    ) -> float:
        """The seconds that moving value `v` from some placements to others takes, for any use."""
        del use
        if src == dst or Var(v) in self.light:
            return 0.0
        seconds = move_seconds(self.fulls[v], self.mesh, src, dst, self.cost, self.reduce_dtype)
        return seconds + FIXED if seconds and Var(v) in self.fixed else seconds


@attrs.frozen(eq=False)
class AxisPrices:
    """The prices of moves along one axis, where values have known placements on the others."""

    prices: Prices
    axis: str
    placed: Mapping[Var, Mapping[str, Placement]]
    """The placements in which values are computed on other axes; on the rest they are R."""

    def __call__(self, v: int, p: Placement, q: Place, use: Uses = None) -> float:
        """The seconds that moving value `v` from one placement to another takes.

        `use` has the placements in which the other axes want it there; None where they stay.
        """
        if q in (p, "free") and use is None:
            return 0.0
        return self.prices(v, *self.ends(v, p, q, use))

    def ends(
        self, v: int, p: Placement, q: Place, use: Uses = None
    ) -> tuple[Placements, tuple[Place, ...]]:
        """The placements on all axes before and after a move."""
        placed, axes = self.placed.get(Var(v), {}), self.prices.mesh.axes
        src = tuple([p if a == self.axis else placed.get(a, R) for a in axes])
        wanted = placed if use is None else dict(use)
        return src, tuple([q if a == self.axis else wanted.get(a, R) for a in axes])


Uses = tuple[tuple[str, Place], ...] | None
"""The placements that other axes want at a use, by axis."""
