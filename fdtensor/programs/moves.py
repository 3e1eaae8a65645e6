"""`move_seconds`: the seconds that moving a value takes, along one axis or several at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple

import torch

from fdtensor.layouts.errors import FdtensorError, LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Cut,
    Ragged,
    Spans,
    StridedShard,
)
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.precision import HALVES, is_sum, wide_of
from fdtensor.plans.collectives import Step
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.cost_parts import overlapped
from fdtensor.plans.planner import plan
from fdtensor.programs.by_size import (
    BySize,
    RoundedBySize,
    Shape,
    enlarged,
    essential,
    least_shape,
)
from fdtensor.programs.nested import Nested, layout_at, place_of, shares_dim
from fdtensor.programs.nodes import Place, Placements
from fdtensor.programs.rounding import stages

__all__ = [
    "IMPOSSIBLE",
    "LEAST",
    "move_seconds",
    "nested_seconds",
]

LEAST = 1e-9
"""The seconds that a move takes besides those of its steps."""

IMPOSSIBLE = 1e6
"""The price, in seconds, of a move to or from a placement that the tensor cannot have."""


@remembered(1 << 18)
def move_seconds(
    full: Full,
    mesh: Mesh,
    src: Placements,
    dst: tuple[Place, ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> float:
    """The seconds that moving a value takes, from a placement on each axis to another on each.

    "free" among `dst` is the placement that the value has. Pending sums of half precision are held
    in `reduce_dtype`. Axes along which the value stays only make its blocks smaller: of those that
    cut one dim they are taken to be the outer ones.
    """
    pairs = zip(mesh.axes, mesh.sizes, src, dst, strict=True)
    moving = [a for a, n, p, q in pairs if q not in (p, "free") and n > 1]
    if not moving:
        return 0.0
    part = _part(full, mesh, src, dst, moving)
    ends: list[Any] = [tuple([x[mesh.axis(a)] for a in moving]) for x in (src, dst)]
    return _priced(full, part, mesh, moving, ends, cost, reduce_dtype)


@remembered(1 << 18)
def nested_seconds(
    full: Full,
    mesh: Mesh,
    src: Placements,
    dst: tuple[Place, ...],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> float:
    """The same where axes that cut one dim do so in the order that the places have."""
    if "free" in dst or not (shares_dim(src) or shares_dim(dst)):
        return move_seconds(full, mesh, src, dst, cost, reduce_dtype)
    try:
        before, after = layout_at(mesh, src), layout_at(mesh, dst)
    except LayoutError:
        return IMPOSSIBLE
    many = [a for a, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1]
    moving = {a for a in many if before[a] != after[a]}
    exact = {x.dim for a in moving for x in (before[a], after[a]) if isinstance(x, _EXACT)}
    for dim in {p.dim for p in (*src, *dst) if isinstance(p, Cut)}:
        was, will = ([a for a in at.cuts(dim) if a in many] for at in (before, after))
        stays = 0 if dim in exact else _outer(was, will, moving)
        moving |= {*was[stays:], *will[stays:]}
    if not moving:
        return 0.0
    names = [a for a in many if a in moving]
    part = _part(full, mesh, src, dst, names)
    ends = [_within(at, names) for at in (before, after)]
    return _priced(full, part, mesh, names, ends, cost, reduce_dtype)


def _outer(before: Sequence[str], after: Sequence[str], moving: Collection[str]) -> int:
    """How many axes cut a dim before all that move, in both layouts alike."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    return sum(1 for _ in takewhile(lambda pair: pair[0] not in moving, same))


def _part(
    full: Full, mesh: Mesh, src: Placements, dst: Sequence[Place], moving: Sequence[str]
) -> Shape:
    """The shape of the block that the axes along which a value does not move leave of it."""
    ends = [x[mesh.axis(a)] for a in moving for x in (src, dst)]
    # a whole dim is cut in these kinds, so that no block of it is
    exact = {x.dim for x in ends if isinstance(x, _EXACT)}
    shape = list(full.shape)
    for a, n, p in zip(mesh.axes, mesh.sizes, src, strict=True):
        if a not in moving and isinstance(p, Cut) and p.dim not in exact:
            shape[p.dim] = -(-shape[p.dim] // n)
    return tuple(shape)


def _within(layout: Layout, axes: Sequence[str]) -> Placements:
    """The places of a layout on some axes, as on a mesh of these alone."""
    placements = tuple([layout[a] for a in axes])
    part = Mesh(**{a: layout.mesh.axis_size(a) for a in axes})
    dims = {p.dim for p in placements if isinstance(p, Cut)}
    order = {d: tuple([a for a in layout.cuts(d) if a in axes]) for d in dims}
    return place_of(Layout(part, placements, order))


def _priced(
    full: Full,
    shape: Shape,
    mesh: Mesh,
    axes: Sequence[str],
    ends: Sequence[Placements],
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> float:
    """The seconds of a move of a tensor of a shape along these axes alone."""
    wide = None
    if reduce_dtype is not None and full.dtype in HALVES and any(map(is_sum, ends[0])):
        wide = wide_of(full.dtype, reduce_dtype)
    part, names = _part_of(mesh, tuple(axes), cost)
    src, dst = (_renamed(x, names) for x in ends)
    sizes, src, dst = essential(shape, part, src, dst)
    move = _Move(src, dst, full.dtype, part, cost, wide)
    least = least_shape(sizes, part, src, dst)
    if least is None:
        return _seconds(sizes, move)
    by_size = _by_size(least, move)
    return IMPOSSIBLE if by_size is None else by_size.at(prod(sizes)) + LEAST


@remembered(4096)
def _part_of(mesh: Mesh, axes: tuple[str, ...], cost: CostModel) -> tuple[Mesh, Mapping[str, str]]:
    """The mesh of some axes, and their names: a number where the cost model has none."""
    known = {axis for axis, _, _ in cost.axes}
    names = {a: a if a in known else f"axis{i}" for i, a in enumerate(axes)}
    return Mesh(**{name: mesh.axis_size(a) for a, name in names.items()}), names


class _Move(NamedTuple):
    """A move of a tensor of any shape."""

    src: Placements
    dst: Placements
    dtype: torch.dtype
    mesh: Mesh
    cost: CostModel
    wide: torch.dtype | None
    """The dtype in which what is pending waits, where that is another one."""


_EXACT = (Ragged, StridedShard, Spans)


def _renamed(x: Placements, names: Mapping[str, str]) -> Placements:
    if not isinstance(x, Nested):
        return x
    return Nested(x, tuple([(d, tuple([names[a] for a in axes])) for d, axes in x.order]))


@remembered(1 << 17)
def _seconds(shape: Shape, move: _Move) -> float:
    steps = _steps(shape, move)
    if steps is None:
        return IMPOSSIBLE
    visible = overlapped(move.cost)
    return sum(seconds(step, visible) for step in steps) + LEAST


@remembered(1 << 14)
def _by_size(smallest: Shape, move: _Move) -> BySize | RoundedBySize | None:
    """The seconds of a move by the size of the tensor; None where it is impossible."""
    try:
        src, dst = _types(enlarged(smallest), move)
        if move.wide is not None:
            return RoundedBySize(src, dst, move.wide, move.cost)
        return BySize(src, dst, move.cost)
    except FdtensorError:
        return None


def _types(shape: Shape, move: _Move) -> tuple[TensorType, TensorType]:
    src, dst = (
        TensorType(shape, move.dtype, layout_at(move.mesh, x)) for x in (move.src, move.dst)
    )
    return src, dst


def _steps(shape: Shape, move: _Move) -> list[Step] | None:
    """The steps of the plan of a move; None where there is none."""
    try:
        before, after = _types(shape, move)
        parts = (
            (plan(before, after, cost=move.cost),)
            if move.wide is None
            else stages(before, after, move.wide, move.cost)
        )
    except FdtensorError:
        return None
    return [step for part in parts for step in part.steps]
