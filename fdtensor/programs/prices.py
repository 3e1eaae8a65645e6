"""`Prices`: the seconds that moving each value of a graph along one axis takes."""

from __future__ import annotations

import functools
from math import prod

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Placement, Ragged, Spans, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full, Var
from fdtensor.ops.precision import HALVES, is_sum, wide_of
from fdtensor.plans.cost import CostModel, overlapped, seconds
from fdtensor.plans.planner import plan
from fdtensor.programs.rounding import stages
from fdtensor.programs.solver import Place

__all__ = ["Prices"]

FIXED = 1.0
"""The seconds added to a move of a fixed value: less than the price of an impossible move."""

IMPOSSIBLE = 1e6
"""The price, in seconds, of a move to or from a placement that the tensor cannot have."""


@attrs.frozen(eq=False)
class Prices:
    """The prices of moves along one axis, where the other axes leave a block of each value."""

    axis: str
    count: int
    """The number of ranks along the axis."""
    cost: CostModel
    fulls: tuple[Full, ...]
    """The full value, by its number."""
    left: tuple[Full, ...]
    """The block that the other axes leave of each value."""
    fixed: frozenset[Var] = frozenset()
    """Values whose moves cost more than any other."""
    light: frozenset[Var] = frozenset()
    """Values whose moves cost nothing: a few numbers, which travel with other sums."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which pending sums of half precision are held; None for their own."""

    def __call__(self, v: int, p: Placement, q: Place) -> float:
        """The seconds that moving value `v` from one placement to another takes."""
        if q == "free" or q == p or Var(v) in self.light:
            return 0.0
        extra = FIXED if Var(v) in self.fixed else 0.0
        full = self.moved(v, p, q)
        wide = None
        if self.reduce_dtype is not None and full.dtype in HALVES and is_sum(p):
            wide = wide_of(full.dtype, self.reduce_dtype)
        return extra + move_seconds(full, p, q, self.axis, self.count, self.cost, wide)

    def moved(self, v: int, p: Placement, q: Placement) -> Full:
        """The part of value `v` that moves: all of a dim whose cut is one of the whole dim."""
        exact = {x.dim for x in (p, q) if isinstance(x, (Ragged, StridedShard, Spans))}
        full, left = self.fulls[v], self.left[v]
        if not exact:
            return left
        sizes = enumerate(zip(full.shape, left.shape, strict=True))
        return Full(tuple([n if d in exact else m for d, (n, m) in sizes]), full.dtype)


def move_seconds(
    full: Full,
    p: Placement,
    q: Placement,
    axis: str,
    count: int,
    cost: CostModel,
    wide: torch.dtype | None,
) -> float:
    """The seconds that moving a tensor along one axis takes, its terms being held in `wide`."""
    shape, p, q = _essential(full.shape, p, q, count)
    name = axis if any(known == axis for known, _, _ in cost.axes) else "axis"
    return _move_seconds(Full(shape, full.dtype), p, q, name, count, cost, wide)


@functools.lru_cache(maxsize=65536)
def _essential(
    shape: tuple[int, ...], p: Placement, q: Placement, count: int
) -> tuple[tuple[int, ...], Placement, Placement]:
    """The same move of a tensor with fewer dims: those between the cut ones are merged."""
    dims = sorted({x.dim for x in (p, q) if isinstance(x, Cut)})
    if any(isinstance(x, Partial) for x in (p, q)) and all(n % count for n in shape):
        return shape, p, q  # what is pending is reduced in blocks of a dim, which are uneven here
    sizes: list[int] = []
    start = 0
    for d in dims:
        sizes += [prod(shape[start:d]), shape[d]]
        start = d + 1
    sizes.append(prod(shape[start:]))

    def moved(x: Placement) -> Placement:
        return attrs.evolve(x, dim=1 + 2 * dims.index(x.dim)) if isinstance(x, Cut) else x

    return tuple(sizes), moved(p), moved(q)


@functools.lru_cache(maxsize=65536)
def _move_seconds(
    full: Full,
    p: Placement,
    q: Placement,
    axis: str,
    count: int,
    cost: CostModel,
    wide: torch.dtype | None,
) -> float:
    mesh, visible = Mesh(**{axis: count}), overlapped(cost)
    try:
        src, dst = (TensorType(full.shape, full.dtype, Layout(mesh, [x])) for x in (p, q))
        parts = (plan(src, dst, cost=cost),) if wide is None else stages(src, dst, wide, cost)
        return sum(seconds(step, visible) for part in parts for step in part.steps) + 1e-9
    except FdtensorError:
        return IMPOSSIBLE
