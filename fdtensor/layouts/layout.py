"""`Layout`: what each axis of a mesh does to a tensor, and in which order axes cut a dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.expected import no_axes, no_cuts, no_mesh, no_placement, no_reduce_ops
from fdtensor.layouts.kinds import is_iterable, is_list, is_mapping, is_tuple
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.mesh_fields import listed
from fdtensor.layouts.placement import (
    Partial,
    Placement,
    Ragged,
    ReduceOp,
    Replicate,
    Shard,
    Spans,
    StridedShard,
)
from fdtensor.layouts.record import Record, integer
from fdtensor.layouts.remembered import remembered

__all__ = ["Layout"]

Order = (
    Mapping[int, Sequence[str]]
    | Sequence[tuple[int, Sequence[str]]]
    | Sequence[str | Sequence[str] | None]
)
"""The axes that cut dims, outermost first: by dim, as pairs of a dim and axes, or dim by dim."""


def _mesh(value: object) -> Mesh:
    if not isinstance(value, Mesh):
        raise no_mesh(value)
    return value


def _placements(value: object) -> tuple[Placement, ...]:
    return tuple(map(_placement, value if is_iterable(value) else (value,)))


def _placement(value: object) -> Placement:
    if not isinstance(value, Placement):
        raise no_placement(value)
    return value


def _order(value: Order | None) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The order as pairs `(dim, axes)`, from a mapping, from such pairs or from one entry a dim."""
    if value is None:
        return ()
    try:
        entries: list[Any] = list(value.items() if isinstance(value, Mapping) else value)
        alike = all(is_tuple(e) and len(e) == 2 and isinstance(e[0], int) for e in entries)
        paired = alike or isinstance(value, Mapping)
        pairs: Iterable[tuple[Any, Any]] = entries if paired else enumerate(entries)
        return tuple(sorted((integer(d), _axes(entry)) for d, entry in pairs if entry is not None))
    except (TypeError, AttributeError):
        raise LayoutError(
            f"{value!r} is not an order of axes.",
            hint="Map a dim to the axes that cut it, outermost first: {0: ('tp', 'dp')}.",
        ) from None


def _axes(entry: object) -> tuple[str, ...]:
    """The axes that an entry names: one, several, or none for None."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if is_tuple(axes) or is_list(axes):
        names = [axis for axis in axes if isinstance(axis, str)]
        if len(names) == len(axes):
            return tuple(names)
    raise no_axes(entry)


@attrs.frozen(eq=False, repr=False, init=False)
class Layout(Record):
    """One placement for each axis of a mesh, and the order of the axes that cut the same dim.

    `order` maps a dim to the axes that cut it, outermost first; left to right where it is silent.
    Raises `LayoutError` for a placement too many or too few, sizes of `Ragged` that are not one an
    index, a `Ragged` that is not the first cut of its dim, reduce ops that differ, and an order
    that does not name the axes that cut the dim.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> layout = Layout(mesh, [Shard(0), Partial("sum")])
    >>> layout is mesh.layout("dp", partial={"tp": "sum"})
    True
    >>> layout["tp"]
    Partial('sum')
    >>> print(layout.placed("tp", Replicate()))
    (dp=S(0), tp=R)
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[tuple[int, tuple[str, ...]], ...]
    """The dims whose axes are not in the order of the mesh, each with its axes, outermost first."""

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Placement],
        order: Order | None = None,
    ) -> None:
        mesh = _mesh(mesh)
        own = _placements(placements)
        if len(own) != mesh.ndim:
            raise LayoutError(
                f"{len(own)} placements for a mesh that has {mesh.ndim} axes.",
                placements=f"({', '.join(map(str, own))})",
                mesh=mesh,
                hint="Give one placement for each axis.",
            )
        default = _cutting(mesh, own)
        wanted = dict(default)
        for dim, axes in _order(order):
            if sorted(axes) != sorted(default.get(dim, ())):
                raise LayoutError(
                    f"the order of dim {dim} names {listed(axes, 'no axis')}, but it is cut by "
                    f"{listed(default.get(dim, ()), 'no axis')}.",
                    placements=_named(mesh, own),
                    hint="Name each axis that cuts the dim once, outermost first.",
                )
            wanted[dim] = axes
        kept = tuple((d, axes) for d, axes in sorted(wanted.items()) if axes != default.get(d, ()))
        self.__attrs_init__(mesh, own, kept)  # type: ignore[attr-defined]
        _check_layout(self, wanted)

    def __getitem__(self, axis: str) -> Placement:
        """The placement of the axis called `axis`."""
        return self.placements[self.mesh.axis(axis)]

    def cuts(self, dim: int) -> tuple[str, ...]:
        """The axes that cut `dim`, outermost first."""
        try:
            return _cuts(self).get(dim) or (() if dim.__class__ is int else no_cuts(dim))
        except TypeError:  # what has no hash
            return no_cuts(dim)

    @property
    def partial(self) -> dict[str, ReduceOp]:
        """The axes with pending terms and their reduce op."""
        pairs = zip(self.mesh.axes, self.placements, strict=True)
        return {axis: p.reduce_op for axis, p in pairs if isinstance(p, Partial)}

    @property
    def overlaps(self) -> bool:
        """Whether blocks may overlap or leave holes: such a layout is that of an operand."""
        return any(isinstance(p, Spans) for p in self.placements)

    def placed(self, axis: str, placement: Placement) -> Layout:
        """This layout with `placement` on `axis`.

        A new cut comes where the axis stands in the mesh, or last on a dim whose order is its own.
        """
        index = self.mesh.axis(axis)
        if _placement(placement) == self.placements[index]:
            return self
        placements = (*self.placements[:index], placement, *self.placements[index + 1 :])
        order = {d: tuple(a for a in axes if a != axis) for d, axes in self.order}
        if not isinstance(placement, (Replicate, Partial)) and placement.dim in order:
            order[placement.dim] += (axis,)
        return Layout(self.mesh, placements, order)

    def reduced(self) -> Layout:
        """The same layout with Replicate for Partial."""
        places = [Replicate() if isinstance(p, Partial) else p for p in self.placements]
        return Layout(self.mesh, places, self.order)

    def split(self, axis: str, dim: int) -> Layout:
        """This layout with `axis` cutting `dim` further: its innermost cut."""
        placements = list(self.placements)
        placements[self.mesh.axis(axis)] = Shard(dim)
        order = dict(self.order)
        order[dim] = (*self.cuts(dim), axis)
        return Layout(self.mesh, placements, order)

    def per_dim(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """The axes that cut each dim, as `Mesh.layout` takes them; uncut dims at the end left out.

        Pending sums are in `partial`. Raises `LayoutError` for strided and ragged shards, which
        this way of writing does not have.
        """
        for placement in self.placements:
            if isinstance(placement, (StridedShard, Ragged, Spans)):
                raise LayoutError(
                    f"{placement} cannot be written per dim.",
                    layout=self,
                    hint="Write this layout per axis: Layout(mesh, placements).",
                )
        cuts = _cuts(self)
        dims = [cuts.get(d, ()) for d in range(max(cuts, default=-1) + 1)]
        return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in dims)

    def __repr__(self) -> str:
        placements = ", ".join(map(repr, self.placements))
        comma = "," if len(self.placements) == 1 else ""
        order = f", order={dict(self.order)!r}" if self.order else ""
        return f"Layout({self.mesh!r}, ({placements}{comma}){order})"

    def __str__(self) -> str:
        order = "".join(f" order {d}: {', '.join(axes)}" for d, axes in self.order)
        return _named(self.mesh, self.placements) + order


def _named(mesh: Mesh, placements: Sequence[Placement]) -> str:
    return f"({', '.join(f'{a}={p}' for a, p in zip(mesh.axes, placements, strict=True))})"


def _cutting(mesh: Mesh, placements: Sequence[Placement]) -> dict[int, tuple[str, ...]]:
    """For each dim that is cut, its axes from left to right."""
    axes_of: dict[int, tuple[str, ...]] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if not isinstance(placement, (Replicate, Partial)):
            axes_of[placement.dim] = (*axes_of.get(placement.dim, ()), axis)
    return axes_of


@remembered(65536)
def _cuts(layout: Layout) -> dict[int, tuple[str, ...]]:
    return {**_cutting(layout.mesh, layout.placements), **dict(layout.order)}


def _check_layout(layout: Layout, cuts: Mapping[int, tuple[str, ...]]) -> None:
    mesh = layout.mesh
    for axis, count, placement in zip(mesh.axes, mesh.sizes, layout.placements, strict=True):
        if not isinstance(placement, (Ragged, Spans)):
            continue
        named = len(placement.sizes if isinstance(placement, Ragged) else placement.spans)
        if named != count:
            raise LayoutError(
                f"mesh axis {axis!r} has {count} ranks, but its ragged shard has {named} sizes.",
                placement=placement,
                mesh=mesh,
                hint="Give the size of each index along the axis.",
            )
        if count == 1 and isinstance(placement, Spans):
            raise LayoutError(
                f"mesh axis {axis!r} has one rank, which holds the whole.",
                placement=placement,
                mesh=mesh,
                hint="Use Replicate() or Shard(dim).",
            )
        if cuts[placement.dim][0] != axis:
            raise LayoutError(
                f"the ragged shard of mesh axis {axis!r} is not the first cut of dim "
                f"{placement.dim}.",
                layout=layout,
                hint=f"Let it come first: order={{{placement.dim}: ({axis!r}, ...)}}.",
            )
    pending = {
        p.reduce_op: a
        for a, p in zip(mesh.axes, layout.placements, strict=True)
        if isinstance(p, Partial)
    }
    if len(pending) > 1:
        (op_a, axis_a), (op_b, axis_b), *_ = pending.items()
        raise LayoutError(
            f"mesh axes {axis_a!r} and {axis_b!r} have different reduce ops pending, "
            f"{op_a} and {op_b}: the result would depend on which comes first.",
            layout=layout,
            hint="Reduce one of them before the other becomes partial.",
        )


def _layout(
    self: Mesh,
    *dims: str | Sequence[str] | None,
    partial: Mapping[str, str] | None = None,
) -> Layout:
    """The layout written per dim: the axes that cut each one, from major to minor.

    `mesh.layout("dp", None, ("tp", "pp"), partial={"x": "sum"})` cuts dim 0 over dp and dim 2
    over tp, then pp; x holds pending sums; every other axis replicates.
    """
    placements: dict[str, Placement] = {}
    order: dict[int, tuple[str, ...]] = {}

    def place(axis: str, placement: Placement) -> None:
        self.axis(axis)
        if axis in placements:
            raise LayoutError(
                f"mesh axis {axis!r} is used twice.",
                first=placements[axis],
                second=placement,
                hint="An axis does one thing to a tensor.",
            )
        placements[axis] = placement

    for dim, entry in enumerate(dims):
        order[dim] = _axes(entry)
        for axis in order[dim]:
            place(axis, Shard(dim))
    if partial is not None and not is_mapping(partial):
        raise no_reduce_ops(partial)
    for axis, reduce_op in (partial or {}).items():
        place(axis, Partial(reduce_op))  # type: ignore[arg-type]
    full = [placements.get(axis, Replicate()) for axis in self.axes]
    return Layout(self, full, order)


_layout.__name__, _layout.__qualname__ = "layout", "Mesh.layout"
Mesh.layout = _layout  # a Layout is made of a Mesh, which comes before it
