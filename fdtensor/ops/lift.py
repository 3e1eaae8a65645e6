"""`lifted`: the types of a call whose axes each follow a row of its rule.

Rows hold for blocks of any size, so rows of several axes compose as long as the axes that cut the
same dim do so in the same order everywhere. Rows that hold for certain cuts of whole dims alone
(merged and split dims, slices) compose only where the indices that every rank holds prove it, or
where all axes cut evenly and the row holds for one axis of as many ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Cut,
    Partial,
    Placement,
    Ragged,
    Shard,
    Spans,
    StridedShard,
)
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full
from fdtensor.ops.notation.core import Row
from fdtensor.ops.notation.reshape import RESHAPES
from fdtensor.ops.rows import rows_of
from fdtensor.ops.same_elements import same_elements

__all__ = ["kept_cuts", "layout_of", "lifted", "rows_compose", "strided_first"]

Types = tuple[tuple[TensorType, ...], tuple[TensorType | None, ...]]


def rows_compose(
    call: Call, mesh: Mesh, rows: Mapping[str, Row], axis: str, row: Row, types: Sequence[Full]
) -> bool:
    """Whether the call may follow `row` on `axis` beside the rows of other axes."""
    along = (*rows.values(), row)
    pending = {p.reduce_op for r in along for p in (*r.ins, *r.outs) if isinstance(p, Partial)}
    if len(pending) < 2 and not any(map(_order_matters, along)):
        return True
    part = Mesh(**{a: mesh.axis_size(a) for a in mesh.axes if a in rows or a == axis})
    return lifted(call, part, {**rows, axis: row}, types) is not None


def lifted(
    call: Call,
    mesh: Mesh,
    rows: Mapping[str, Row],
    types: Sequence[Full],
    first: Sequence[str] = (),
) -> Types | None:
    """The types that the call takes and gives when each axis follows its row, or None.

    Axes that cut the same dim come in the order of `first`, else in that of the mesh, else in any
    order that is right.
    """
    ins = tuple(types[v.index] for v in call.ins)
    outs = tuple(None if v is None else types[v.index] for v in call.outs)
    along = tuple(rows[axis] for axis in mesh.axes)
    share_dim = _share_dim(along) and not _as_one(call, types, mesh, along)
    return _lifted(call.op, ins, outs, mesh, along, tuple(first) or mesh.axes, share_dim)


@remembered(65536)
def _lifted(
    op: Any,
    ins: tuple[Full, ...],
    outs: tuple[Full | None, ...],
    mesh: Mesh,
    rows: tuple[Row, ...],
    first: tuple[str, ...],
    share_dim: bool,
) -> Types | None:
    if share_dim and op not in RESHAPES:
        return None
    for order in dict.fromkeys([first, mesh.axes, *_orders(mesh, rows)]):
        try:
            before = tuple(
                _typed(full, mesh, [row.ins[i] for row in rows], order)
                for i, full in enumerate(ins)
            )
            after = tuple(
                None if full is None else _typed(full, mesh, [row.outs[i] for row in rows], order)
                for i, full in enumerate(outs)
            )
        except LayoutError:
            continue
        if not share_dim or after[0] is None or same_elements(before[0], after[0]):
            return before, after
    return None


def _order_matters(row: Row) -> bool:
    """Whether the order in which axes cut a dim may matter to a row."""
    return row.exact or any(isinstance(p, Ragged) for p in (*row.ins, *row.outs))


def _orders(mesh: Mesh, rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    if any(map(_order_matters, rows)):
        yield from itertools.permutations(mesh.axes)


def _share_dim(rows: Sequence[Row]) -> bool:
    """Whether an axis with an exact row cuts a dim that another axis cuts too."""
    return any((a.exact or b.exact) and _meet(a, b) for a, b in itertools.combinations(rows, 2))


def _meet(a: Row, b: Row) -> bool:
    pairs = zip((*a.ins, *a.outs), (*b.ins, *b.outs), strict=True)
    return any(_dim(p) is not None and _dim(p) == _dim(q) for p, q in pairs)


def _as_one(call: Call, types: Sequence[Full], mesh: Mesh, along: Sequence[Row]) -> bool:
    """Whether the axes that cut a dim do so as one axis of as many ranks may, all evenly."""
    sizes: dict[Row, int] = {}
    for axis, row in zip(mesh.axes, along, strict=True):
        sizes[row] = sizes.get(row, 1) * mesh.axis_size(axis)
    if _share_dim(tuple(sizes)):
        return False
    fulls = [None if v is None else types[v.index] for v in (*call.ins, *call.outs)]
    return all(
        row in rows_of(call, types, count)
        and all(
            isinstance(p, Shard) and full.shape[p.dim] % count == 0
            for p, full in zip((*row.ins, *row.outs), fulls, strict=True)
            if isinstance(p, Cut) and full is not None
        )
        for row, count in sizes.items()
        if row.exact
    )


def _dim(p: Placement) -> int | None:
    return p.dim if isinstance(p, Cut) else None


def _typed(
    full: Full, mesh: Mesh, placements: Sequence[Placement], order: Sequence[str]
) -> TensorType:
    cuts: dict[int, list[str]] = {}
    for axis in order:
        dim = _dim(placements[mesh.axis(axis)])
        if dim is not None:
            cuts.setdefault(dim, []).append(axis)
    several = {dim: axes for dim, axes in cuts.items() if len(axes) > 1}
    return TensorType(full.shape, full.dtype, Layout(mesh, placements, several))


def kept_cuts(layout: Layout, wanted: Mapping[str, Placement]) -> tuple[str, ...]:
    """The axes that have the wanted cuts, outermost first: cuts that follow them move nothing."""
    cuts = dict.fromkeys(axis for d in range(_dims(layout)) for axis in layout.cuts(d))
    return tuple(axis for axis in cuts if layout[axis] is wanted[axis])


def _dims(layout: Layout) -> int:
    return 1 + max((d for d in map(_dim, layout.placements) if d is not None), default=-1)


def strided_first(
    axes: Iterable[str], placements: Mapping[str, Iterable[Placement]]
) -> tuple[str, ...]:
    """The axes in the order in which they cut a dim that is several merged into one.

    The more segments an axis cuts, the earlier: those that cut each further come after it.
    """
    segments = {
        a: max((p.split_factor for p in placements[a] if isinstance(p, StridedShard)), default=1)
        for a in axes
    }
    return tuple(sorted(segments, key=lambda a: -segments[a]))


@remembered(16384)
def layout_of(mesh: Mesh, placements: tuple[Placement, ...], first: tuple[str, ...] = ()) -> Layout:
    """The layout with these placements: ragged cuts first, then `first`, then strided cuts."""
    cuts: dict[int, list[str]] = {}
    each = {a: (p,) for a, p in zip(mesh.axes, placements, strict=True)}
    for axis in (*first, *strided_first([a for a in mesh.axes if a not in first], each)):
        p = placements[mesh.axis(axis)]
        if isinstance(p, (Ragged, Spans)):
            cuts.setdefault(p.dim, []).insert(0, axis)
        elif isinstance(p, Cut):
            cuts.setdefault(p.dim, []).append(axis)
    return Layout(mesh, placements, {d: axes for d, axes in cuts.items() if len(axes) > 1})
