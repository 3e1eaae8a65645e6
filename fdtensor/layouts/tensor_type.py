"""`TensorType`: the shape, dtype and layout of a tensor spread over a mesh, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal, overload

import attrs
import torch

from fdtensor.layouts.blocks import Box, Intervals, cut, length, whole
from fdtensor.layouts.display import display
from fdtensor.layouts.dtypes import dtype_name, reducible
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.expected import no_layout
from fdtensor.layouts.free_type import FreeType, check_size, shape_of
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.placement import (
    Partial,
    Placement,
    Ragged,
    Replicate,
    Spans,
    StridedShard,
)
from fdtensor.layouts.record import Record

__all__ = ["TensorType"]


@attrs.frozen(eq=False, repr=False)
class TensorType(Record):
    """A tensor spread over a mesh, but for its values: the full shape, the dtype and the layout.

    Raises `LayoutError` for a dim out of range, ragged sizes that do not add up to the dim, a
    reduce op that the dtype lacks, and 2**63 bytes or more, of which torch can make no tensor.
    With `layout="free"` it is a `FreeType`: an argument of `trace` whose layout is to be chosen.

    >>> x = TensorType((8, 6), torch.float32, Mesh(dp=2, tp=4).layout("dp", partial={"tp": "sum"}))
    >>> print(x)
    f32[8@dp,6]{sum:tp}
    >>> x.local_shape(rank=0), x.nbytes
    ((4, 6), 192)
    >>> print(TensorType((8, 6), torch.float32, layout="free"))
    f32[8,6]{free}
    """

    shape: tuple[int, ...] = attrs.field(converter=shape_of)
    dtype: torch.dtype
    layout: Layout

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, shape: Iterable[int], dtype: torch.dtype, layout: Layout
        ) -> TensorType: ...

        @overload
        def __new__(
            cls, shape: Iterable[int], dtype: torch.dtype, layout: Literal["free"]
        ) -> FreeType: ...

        def __new__(cls, shape: object, dtype: object, layout: object) -> object: ...

    else:

        def __new__(cls, shape, dtype, layout):
            if isinstance(layout, str) and layout == "free":
                return FreeType(shape, dtype)
            return object.__new__(cls)

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
            [
                intervals[0][0] if intervals else size
                for intervals, size in zip(box, self.shape, strict=True)
            ]
        )

    def index(self, rank: int) -> tuple[Sequence[int], ...]:
        """The indices that `rank` holds in each dim, ascending: a range if they are contiguous."""
        box = self.box(_coord(self, rank))
        return tuple(
            [_indices(intervals, size) for intervals, size in zip(box, self.shape, strict=True)]
        )

    def with_layout(self, layout: Layout) -> TensorType:
        """The same tensor under another layout."""
        return TensorType(self.shape, self.dtype, layout)

    def placed(self, axis: str, placement: Placement) -> TensorType:
        """The same tensor with `placement` on `axis`."""
        return self.with_layout(self.layout.placed(axis, placement))

    def cotangent(self) -> TensorType:
        """The type of a derivative with respect to this: the same, with Replicate for Partial."""
        return self.with_layout(self.layout.reduced())

    def __repr__(self) -> str:
        return f"TensorType({self.shape!r}, {self.dtype!r}, {self.layout!r})"

    def __str__(self) -> str:
        dims = ",".join(f"{size}{_at(self.layout, d)}" for d, size in enumerate(self.shape))
        pending = ",".join(f"{op}:{axis}" for axis, op in self.layout.partial.items())
        return f"{dtype_name(self.dtype)}[{dims}]" + (f"{{{pending}}}" if pending else "")

    def _repr_html_(self) -> str:
        return display("html", self)


def _at(layout: Layout, dim: int) -> str:
    """How the cuts of a dim are written: `@dp`, `@(tp,dp)`, `@dp/2` strided, `@dp:3:5` ragged."""
    axes: list[str] = []
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


def _indices(intervals: Intervals, size: int) -> Sequence[int]:
    if not intervals:
        return range(size, size)
    if len(intervals) == 1:
        return range(*intervals[0])
    return tuple(i for start, stop in intervals for i in range(start, stop))


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
    intervals = whole(type.shape[dim])
    for axis in layout.cuts(dim):
        i = mesh.axes.index(axis)
        intervals = cut(intervals, layout.placements[i], mesh.sizes[i], coord[i])  # type: ignore[arg-type]
    return intervals


def _check_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise no_layout(layout)


def _check_type(type: TensorType) -> None:
    check_size(type.shape, type.dtype)
    _check_layout(type.layout)
    for axis, placement in zip(type.mesh.axes, type.layout.placements, strict=True):
        if not isinstance(placement, Replicate):
            _check_placement(type, axis, placement)


def _check_placement(type: TensorType, axis: str, placement: Placement) -> None:
    """Raises where a tensor of this type cannot have this placement on a mesh axis."""
    ndim, leave = len(type.shape), f"leave {axis!r} as Replicate()"
    last = f"Shard one of dims 0 to {ndim - 1}, or {leave}."
    match placement:
        case Partial(reduce_op) if not reducible(type.dtype, reduce_op):
            raise LayoutError(
                f"{dtype_name(type.dtype)} has no {reduce_op}, which mesh axis {axis!r} has "
                "pending.",
                layout=type.layout,
                hint=f"Use another reduce op, or a dtype that has {reduce_op}.",
            )
        case Partial() | Replicate():
            pass
        case _ if placement.dim >= ndim:
            raise LayoutError(
                f"mesh axis {axis!r} shards dim {placement.dim} of a tensor that has {ndim} dims.",
                shape=type.shape,
                layout=type.layout,
                mesh=type.mesh,
                hint=last if ndim else f"A tensor without dims can only be replicated: {leave}.",
            )
        case Spans(dim, spans) if max((r[-1][1] for r in spans if r), default=0) > type.shape[dim]:
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
        case _:
            pass
