"""`move_seconds`: the seconds that moving a value takes, along one axis or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Cut,
    Partial,
    Placement,
    Ragged,
    Spans,
    StridedShard,
)
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.lift import layout_of
from fdtensor.ops.precision import HALVES, is_sum, wide_of
from fdtensor.plans.cost import LOCAL, CostModel, overlapped, seconds
from fdtensor.plans.planner import plan
from fdtensor.programs.nodes import Place
from fdtensor.programs.rounding import stages

__all__ = ["IMPOSSIBLE", "Placements", "about_seconds", "fastest", "move_seconds"]

Placements = tuple[Placement, ...]
"""A placement on each axis of a mesh."""

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
    in `reduce_dtype`. Axes along which the value stays only make its blocks smaller.
    """
    pairs = zip(mesh.axes, mesh.sizes, src, dst, strict=True)
    moving = [(a, n, p, q) for a, n, p, q in pairs if q not in (p, "free") and n > 1]
    if not moving:
        return 0.0
    # a whole dim is cut in these kinds, so that no block of it is
    exact = {x.dim for _, _, *ends in moving for x in ends if isinstance(x, _EXACT)}
    shape = list(full.shape)
    for n, p, q in zip(mesh.sizes, src, dst, strict=True):
        if q in (p, "free") and isinstance(p, Cut) and p.dim not in exact:
            shape[p.dim] = -(-shape[p.dim] // n)
    wide = None
    if (
        reduce_dtype is not None
        and full.dtype in HALVES
        and any(is_sum(p) for _, _, p, _ in moving)
    ):
        wide = wide_of(full.dtype, reduce_dtype)
    known = {axis for axis, _, _ in cost.axes}
    names = [a if a in known else f"axis{i}" for i, (a, _, _, _) in enumerate(moving)]
    part = Mesh(**dict(zip(names, [n for _, n, _, _ in moving], strict=True)))
    before, after = tuple([p for _, _, p, _ in moving]), tuple([q for _, _, _, q in moving])
    return _seconds(*_essential(tuple(shape), part, before, after), full.dtype, part, cost, wide)  # type: ignore[arg-type]


_EXACT = (Ragged, StridedShard, Spans)


@remembered(65536)
def _essential(
    shape: tuple[int, ...], mesh: Mesh, src: Placements, dst: Placements
) -> tuple[tuple[int, ...], Placements, Placements]:
    """The same move of a tensor with fewer dims: those between the cut ones are merged."""
    dims = sorted({x.dim for x in (*src, *dst) if isinstance(x, Cut)})
    if any(isinstance(x, Partial) for x in (*src, *dst)) and all(n % mesh.size for n in shape):
        return shape, src, dst  # what is pending is reduced in blocks of a dim, here uneven ones
    sizes: list[int] = []
    start = 0
    for d in dims:
        sizes += [prod(shape[start:d]), shape[d]]
        start = d + 1
    sizes.append(prod(shape[start:]))

    def moved(x: Placement) -> Placement:
        return attrs.evolve(x, dim=1 + 2 * dims.index(x.dim)) if isinstance(x, Cut) else x

    return tuple(sizes), tuple(map(moved, src)), tuple(map(moved, dst))


@remembered(1 << 17)
def _seconds(
    shape: tuple[int, ...],
    src: Placements,
    dst: Placements,
    dtype: torch.dtype,
    mesh: Mesh,
    cost: CostModel,
    wide: torch.dtype | None,
) -> float:
    visible = overlapped(cost)
    try:
        before, after = (TensorType(shape, dtype, layout_of(mesh, x)) for x in (src, dst))
        parts = (
            (plan(before, after, cost=cost),) if wide is None else stages(before, after, wide, cost)
        )
        return sum(seconds(step, visible) for part in parts for step in part.steps) + 1e-9
    except FdtensorError:
        return IMPOSSIBLE


def about_seconds(
    full: Full, sizes: Sequence[int], src: Placements, dst: Sequence[Place], cost: CostModel
) -> float:
    """About the least seconds that moving a value takes, from the bytes that a rank lacks.

    Terms are added by their owners, who then send the result; else a rank receives what it wants
    but for the part that it holds. It is a hundred times as fast to ask as `move_seconds`.
    """
    before, after = float(full.nbytes), float(full.nbytes)
    pending, elsewhere = 1, 1
    for n, p, q in zip(sizes, src, dst, strict=True):
        wanted = p if q == "free" else q
        before /= n if isinstance(p, Cut) else 1
        after /= n if isinstance(wanted, Cut) else 1
        if p != wanted:
            pending *= n if isinstance(p, Partial) else 1
            elsewhere *= n if isinstance(p, Cut) else 1
    if pending > 1:
        moved = before * (1 - 1 / pending) + max(0.0, after - before / pending)
    else:
        moved = after * (1 - 1 / elsewhere)
    if not moved:
        return 0.0
    launch, bandwidth = fastest(cost)
    return moved / bandwidth + launch


@remembered(64)
def fastest(cost: CostModel) -> tuple[float, float]:
    """The seconds of the cheapest message without bytes, and the most bytes in a second."""
    visible = overlapped(cost)
    latency = min([visible.latency, *(seconds for _, seconds, _ in visible.axes)])
    launch = min((seconds for kind, seconds in visible.launch if kind != LOCAL), default=0.0)
    bandwidth = max([cost.bandwidth, *(rate for _, _, rate in cost.axes)])
    return latency + launch, bandwidth / min([1.0, *(times for _, times in cost.slowdown)])
