"""`Layout` and `TensorType`: which part of a tensor each rank of a mesh holds, as values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.blocks import Box, Intervals, cut, length, whole
from fdtensor.dtypes import dtype_name, known, reducible
from fdtensor.errors import LayoutError
from fdtensor.mesh import Coord, Mesh
from fdtensor.placement import (
    Partial,
    Placement,
    Ragged,
    ReduceOp,
    Replicate,
    Shard,
    Spans,
    StridedShard,
)
from fdtensor.record import Record, integer

__all__ = ["Layout", "TensorType"]


def _placements(value: Any) -> tuple[Placement, ...]:
    placements = tuple(value) if isinstance(value, Iterable) else (value,)
    for placement in placements:
        if not isinstance(placement, Placement):
            raise LayoutError(
                f"{placement!r} is not a placement.",
                hint="Use Replicate(), Shard(dim), StridedShard(dim, split_factor), "
                "Ragged(dim, sizes) or Partial(reduce_op).",
            )
    return placements


def _order(value: Any) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The order as pairs `(dim, axes)`, from a mapping, from such pairs or from one entry a dim."""
    if value is None:
        return ()
    try:
        entries = list(value.items() if isinstance(value, Mapping) else value)
        paired = all(
            isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], int) for e in entries
        )
        pairs = entries if paired or isinstance(value, Mapping) else enumerate(entries)
        return tuple(sorted((integer(d), _axes(entry)) for d, entry in pairs if entry is not None))
    except (TypeError, AttributeError):
        raise LayoutError(
            f"{value!r} is not an order of axes.",
            hint="Map a dim to the axes that cut it, outermost first: {0: ('tp', 'dp')}.",
        ) from None


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes that an entry names: one, several, or none for None."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
        raise LayoutError(
            f"{entry!r} names no mesh axes.",
            hint="Write an axis, a tuple of axes from major to minor, or None.",
        )
    return tuple(axes)


@attrs.frozen(eq=False, repr=False, init=False)
class Layout(Record):
    """One placement for each axis of a mesh, and the order of the axes that cut the same dim.

    `order` maps a dim to the axes that cut it, outermost first; left to right where it is silent.
    Raises `LayoutError` for a placement too many or too few, sizes of `Ragged` that are not one an
    index, a `Ragged` that is not the first cut of its dim, reduce ops that differ, and an order
    that does not name the axes that cut the dim.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[tuple[int, tuple[str, ...]], ...]
    """The dims whose axes are not in the order of the mesh, each with its axes, outermost first."""

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Placement],
        order: Mapping[int, Sequence[str]] | Sequence[Any] | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutError(f"{mesh!r} is not a Mesh.", hint="Write Mesh(dp=2, tp=4).")
        given = _placements(placements)
        if len(given) != mesh.ndim:
            raise LayoutError(
                f"{len(given)} placements for a mesh that has {mesh.ndim} axes.",
                placements=f"({', '.join(map(str, given))})",
                mesh=mesh,
                hint="Give one placement for each axis.",
            )
        default = _cutting(mesh, given)
        wanted = dict(default)
        for dim, axes in _order(order):
            if sorted(axes) != sorted(default.get(dim, ())):
                raise LayoutError(
                    f"the order of dim {dim} names {_quoted(axes)}, but it is cut by "
                    f"{_quoted(default.get(dim, ()))}.",
                    placements=_named(mesh, given),
                    hint="Name each axis that cuts the dim once, outermost first.",
                )
            wanted[dim] = axes
        kept = tuple((d, axes) for d, axes in sorted(wanted.items()) if axes != default.get(d, ()))
        self.__attrs_init__(mesh, given, kept)  # type: ignore[attr-defined]
        _check_layout(self, wanted)

    def __getitem__(self, axis: str) -> Placement:
        """The placement of the axis called `axis`."""
        return self.placements[self.mesh.axis(axis)]

    def cuts(self, dim: int) -> tuple[str, ...]:
        """The axes that cut `dim`, outermost first."""
        return _cuts(self).get(dim, ())

    @property
    def partial(self) -> dict[str, ReduceOp]:
        """The axes with pending terms and their reduce op."""
        return {
            axis: placement.reduce_op
            for axis, placement in zip(self.mesh.axes, self.placements)
            if isinstance(placement, Partial)
        }

    @property
    def overlaps(self) -> bool:
        """Whether blocks may overlap or leave holes: such a layout is that of an operand."""
        return any(isinstance(p, Spans) for p in self.placements)

    def placed(self, axis: str, placement: Placement) -> Layout:
        """This layout with `placement` on `axis`.

        A new cut comes where the axis stands in the mesh, or last on a dim whose order is its own.
        """
        index = self.mesh.axis(axis)
        if placement == self.placements[index]:
            return self
        placements = (*self.placements[:index], placement, *self.placements[index + 1 :])
        order = {d: tuple(a for a in axes if a != axis) for d, axes in self.order}
        if not isinstance(placement, (Replicate, Partial)) and placement.dim in order:
            order[placement.dim] += (axis,)
        return Layout(self.mesh, placements, order)

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
        found = _cuts(self)
        dims = [found.get(d, ()) for d in range(max(found, default=-1) + 1)]
        return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in dims)

    def __repr__(self) -> str:
        placements = ", ".join(map(repr, self.placements))
        comma = "," if len(self.placements) == 1 else ""
        order = f", order={dict(self.order)!r}" if self.order else ""
        return f"Layout({self.mesh!r}, ({placements}{comma}){order})"

    def __str__(self) -> str:
        order = "".join(f" order {d}: {', '.join(axes)}" for d, axes in self.order)
        return _named(self.mesh, self.placements) + order


def _quoted(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes)) if axes else "no axis"


def _named(mesh: Mesh, placements: Sequence[Placement]) -> str:
    return f"({', '.join(f'{a}={p}' for a, p in zip(mesh.axes, placements, strict=True))})"


def _cutting(mesh: Mesh, placements: Sequence[Placement]) -> dict[int, tuple[str, ...]]:
    """For each dim that is cut, its axes from left to right."""
    found: dict[int, tuple[str, ...]] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if not isinstance(placement, (Replicate, Partial)):
            found[placement.dim] = (*found.get(placement.dim, ()), axis)
    return found


@functools.lru_cache(maxsize=65536)
def _cuts(layout: Layout) -> dict[int, tuple[str, ...]]:
    return {**_cutting(layout.mesh, layout.placements), **dict(layout.order)}


def _check_layout(layout: Layout, cuts: Mapping[int, tuple[str, ...]]) -> None:
    mesh = layout.mesh
    for axis, count, placement in zip(mesh.axes, mesh.sizes, layout.placements, strict=True):
        if not isinstance(placement, (Ragged, Spans)):
            continue
        given = len(placement.sizes if isinstance(placement, Ragged) else placement.spans)
        if given != count:
            raise LayoutError(
                f"mesh axis {axis!r} has {count} ranks, but its ragged shard has {given} sizes.",
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
        p.reduce_op: a for a, p in zip(mesh.axes, layout.placements) if isinstance(p, Partial)
    }
    if len(pending) > 1:
        (op_a, axis_a), (op_b, axis_b), *_ = pending.items()
        raise LayoutError(
            f"mesh axes {axis_a!r} and {axis_b!r} have different reduce ops pending, "
            f"{op_a} and {op_b}: the result would depend on which comes first.",
            layout=layout,
            hint="Reduce one of them before the other becomes partial.",
        )


def layout_of_dims(
    mesh: Mesh, dims: Sequence[str | Sequence[str] | None], partial: Mapping[str, str]
) -> Layout:
    """The layout that `Mesh.layout` describes."""
    placements: dict[str, Placement] = {}
    order: dict[int, tuple[str, ...]] = {}

    def place(axis: str, placement: Placement) -> None:
        mesh.axis(axis)
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
    for axis, reduce_op in partial.items():
        place(axis, Partial(reduce_op))  # type: ignore[arg-type]
    full = [placements.get(axis, Replicate()) for axis in mesh.axes]
    return Layout(mesh, full, order)


# --- TensorType ------------------------------------------------------------------------------

LARGEST = 2**63 - 1
"""The most bytes of a tensor, where a dim of 0 counts as 1: torch counts strides so."""


def _shape(value: Any) -> tuple[int, ...]:
    try:
        shape = tuple(integer(size) for size in value)
    except (TypeError, AttributeError):
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise LayoutError(
            f"{value!r} is not a shape.", hint="A shape is a tuple of ints, 0 or more."
        )
    return shape


@attrs.frozen(eq=False, repr=False)
class TensorType(Record):
    """A tensor spread over a mesh, but for its values: the full shape, the dtype and the layout.

    Raises `LayoutError` for a dim out of range, ragged sizes that do not add up to the dim, a
    reduce op that the dtype lacks, and 2**63 bytes or more, of which torch can make no tensor.
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype
    layout: Layout

    def __attrs_post_init__(self) -> None:
        _check_type(self)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh

    @property
    def numel(self) -> int:
        """How many elements the full tensor has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """How many dims the full tensor has."""
        return len(self.shape)

    def box(self, coord: Coord) -> Box:
        """The indices that the rank at `coord` holds, as intervals for each dim."""
        return tuple([_held(self, d, coord) for d in range(len(self.shape))])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds; raises `LayoutError` for a rank outside the mesh."""
        return tuple([length(intervals) for intervals in self.box(_coord(self, rank))])

    def local_nbytes(self, rank: int) -> int:
        """The bytes of what `rank` holds."""
        return prod(self.local_shape(rank)) * self.dtype.itemsize

    def offset(self, rank: int) -> tuple[int, ...]:
        """The first index that `rank` holds in each dim; the dim's size where it holds none."""
        box = self.box(_coord(self, rank))
        return tuple(
            [held[0][0] if held else size for held, size in zip(box, self.shape, strict=True)]
        )

    def index(self, rank: int) -> tuple[Sequence[int], ...]:
        """The indices that `rank` holds in each dim, ascending: a range if they are contiguous."""
        box = self.box(_coord(self, rank))
        return tuple([_indices(held, size) for held, size in zip(box, self.shape, strict=True)])

    def with_layout(self, layout: Layout) -> TensorType:
        """The same tensor under another layout."""
        return TensorType(self.shape, self.dtype, layout)

    def placed(self, axis: str, placement: Placement) -> TensorType:
        """The same tensor with `placement` on `axis`."""
        return self.with_layout(self.layout.placed(axis, placement))

    def cotangent(self) -> TensorType:
        """The type of a derivative with respect to this: the same, with Replicate for Partial."""
        layout = self.layout
        for axis in layout.partial:
            layout = layout.placed(axis, Replicate())
        return self.with_layout(layout)

    def __repr__(self) -> str:
        return f"TensorType({self.shape!r}, {self.dtype!r}, {self.layout!r})"

    def __str__(self) -> str:
        dims = ",".join(f"{size}{_at(self.layout, d)}" for d, size in enumerate(self.shape))
        pending = ",".join(f"{op}:{axis}" for axis, op in self.layout.partial.items())
        return f"{dtype_name(self.dtype)}[{dims}]" + (f"{{{pending}}}" if pending else "")

    def _repr_html_(self) -> str:
        from fdtensor.pictures import picture_of

        return picture_of(self).html


def _at(layout: Layout, dim: int) -> str:
    """How the cuts of a dim are written: `@dp`, `@(tp,dp)`, `@dp/2` strided, `@dp:3:5` ragged."""
    axes = []
    for axis in layout.cuts(dim):
        match layout[axis]:
            case StridedShard(_, factor):
                axes.append(f"{axis}/{factor}")
            case Ragged(_, sizes):
                axes.append(":".join([axis, *map(str, sizes)]))
            case Spans():
                axes.append(f"{axis} {str(layout[axis])[2:-1].partition(', ')[2]}")
            case _:
                axes.append(axis)
    if len(axes) > 1:
        return f"@({','.join(axes)})"
    return f"@{axes[0]}" if axes else ""


def _indices(held: Intervals, size: int) -> Sequence[int]:
    if not held:
        return range(size, size)
    if len(held) == 1:
        return range(*held[0])
    return tuple(i for start, stop in held for i in range(start, stop))


def _coord(type: TensorType, rank: int) -> Coord:
    coord = type.mesh.coord(rank)
    if coord is None:
        raise LayoutError(
            f"rank {rank} holds nothing of this tensor: it is not in the mesh.",
            type=type,
            mesh=type.mesh,
            hint="Ask for a rank of the mesh.",
        )
    return coord


def _held(type: TensorType, dim: int, coord: Coord) -> Intervals:
    layout, mesh = type.layout, type.mesh
    held = whole(type.shape[dim])
    for axis in layout.cuts(dim):
        i = mesh.axes.index(axis)
        held = cut(held, layout.placements[i], mesh.sizes[i], coord[i])  # type: ignore[arg-type]
    return held


def _too_large(type: TensorType) -> bool:
    nbytes = type.dtype.itemsize
    for size in type.shape:  # one by one, for a product of millions of sizes takes long
        nbytes *= max(1, size)
        if nbytes > LARGEST:
            return True
    return False


def _check_type(type: TensorType) -> None:
    if not isinstance(type.dtype, torch.dtype):
        raise LayoutError(f"{type.dtype!r} is not a dtype.", hint="Use torch.float32 and the like.")
    if not isinstance(type.layout, Layout):
        raise LayoutError(
            f"{type.layout!r} is not a Layout.", hint="Write Layout(mesh, placements)."
        )
    if not known(type.dtype):
        raise LayoutError(
            f"tensors of {type.dtype} cannot be laid out: its elements are not whole bytes of a "
            "plain dtype.",
            hint="Convert it, or view it as uint8 first.",
        )
    if _too_large(type):
        raise LayoutError(
            f"{dtype_name(type.dtype)}{list(type.shape)} has 2**63 bytes or more, empty dims left "
            "out.",
            largest=f"{LARGEST} bytes",
            hint="Give a shape that torch can make a tensor of.",
        )
    ndim = len(type.shape)
    for axis, placement in zip(type.mesh.axes, type.layout.placements, strict=True):
        match placement:
            case Replicate():
                pass
            case Partial(reduce_op):
                if not reducible(type.dtype, reduce_op):
                    raise LayoutError(
                        f"{dtype_name(type.dtype)} has no {reduce_op}, which mesh axis {axis!r} "
                        "has pending.",
                        layout=type.layout,
                        hint=f"Use another reduce op, or a dtype that has {reduce_op}.",
                    )
            case _ if placement.dim >= ndim:
                raise LayoutError(
                    f"mesh axis {axis!r} shards dim {placement.dim} of a tensor that has "
                    f"{ndim} dims.",
                    shape=type.shape,
                    layout=type.layout,
                    mesh=type.mesh,
                    hint=f"Shard one of dims 0 to {ndim - 1}, or leave {axis!r} as Replicate()."
                    if ndim
                    else f"A tensor without dims can only be replicated: leave {axis!r} as "
                    "Replicate().",
                )
            case Spans(dim, spans) if any(held and held[-1][1] > type.shape[dim] for held in spans):
                raise LayoutError(
                    f"the ranges of mesh axis {axis!r} reach beyond dim {dim}, which has "
                    f"{type.shape[dim]}.",
                    shape=type.shape,
                    layout=type.layout,
                    hint="Keep the ranges within the dim.",
                )
            case Ragged(dim, sizes) if sum(sizes) != type.shape[dim]:
                raise LayoutError(
                    f"the ragged sizes of mesh axis {axis!r} add up to {sum(sizes)}, but dim {dim} "
                    f"has {type.shape[dim]}.",
                    shape=type.shape,
                    sizes=sizes,
                    hint="Make the sizes add up to the size of the dim.",
                )
